"""Facts about a graph and its stages that several passes need: gradients, resharding, chains,
micro-batches.

Imports ir and passes/frontend, and no other pass.
"""
