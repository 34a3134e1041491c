"""GraphPipe: stages that keep the model's branches apart (Jeon et al., 2024): `series_parallel` makes the tree,
`search` and `micro_batch_search` go over it, `stage_costs`, `intra_stage` and `estimate` price its stages.

It imports what stands below placement (schedule, sharding, partition, cost, analysis, solvers), and no other
strategy.
"""
