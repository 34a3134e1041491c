"""PaSE: the best split of every operator (Elango, IPDPS 2021): `strategy` with this package's
costs, and the paper's own model in `paper_costs`, `paper_rules` and `paper_search`.

It imports what stands below placement (schedule, sharding, partition, cost, analysis, solvers), and
no other strategy.
"""
