"""Partitions of the nodes of a model into pipeline stages.

`chain_cut` partitions a chain of blocks into contiguous stages. `downsets` enumerates the downsets
of a graph: sets that contain, with each block, all blocks that it depends on. `flow` and
`min_cut_ilp` find balanced stages with the fewest bytes between them. This package imports
analysis, cost and solvers, and no placement strategy.
"""
