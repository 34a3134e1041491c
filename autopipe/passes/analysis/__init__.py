"""Analyses of a graph and its stages that several passes use: gradients and saved tensors,
resharding, chains of blocks, repeated layers, micro-batches, and the dependence of the loss on the
division of a batch.

This package imports `ir` and `passes/frontend`, but no other pass.
"""
