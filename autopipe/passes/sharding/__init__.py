"""Splits inside a stage: PaSE's configurations of nodes, what they cost, the min-sum problem, and
Megatron's regions.

`configurations` and `node_costs` price nodes, `reshard_tables` changes of layout, `search` makes
the model and fits its answers into memory; `regions` cuts layers by hand's rules. May import ir,
analysis, cost and solvers.
"""
