"""Strategy `pase`: the best split of each operator over the devices (Elango, "PaSE", IPDPS 2021).

`strategy` uses autopipe's costs. `paper_costs`, `paper_rules` and `paper_search` reproduce the
paper's own cost model and search.

This package imports schedule, sharding, partition, cost, analysis and solvers, and no other
strategy.
"""
