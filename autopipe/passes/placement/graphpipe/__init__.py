"""GraphPipe: stages that keep the model's branches apart (Jeon et al., 2024). `series_parallel`
makes the tree and its line of blocks, `search` goes over it for one target, `micro_batch_search`
over targets and sizes, `stage_costs` prices.

It imports what stands below placement (schedule, sharding, partition, cost, analysis, solvers), and
no other strategy.
"""
