"""Partitions of a model's nodes into pipeline stages.

`chain_cut` partitions a chain of operators into contiguous stages. `downsets` enumerates all
downsets of a graph. `flow` and `min_cut_ilp` find balanced stages with the fewest bytes between
them. This package imports analysis, cost and solvers, and no strategy.
"""
