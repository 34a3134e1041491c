"""Splits inside a stage: PaSE's configurations of nodes, their costs, the min-sum problem, and
Megatron's tensor parallelism.

`configurations` and `node_costs` enumerate configurations and compute their costs. `reshard_tables`
computes the costs of changes of layout. `search` builds the optimisation model and fits its
solutions into memory. `regions` splits layers by the rules of Megatron-LM. This package may import
ir, analysis, cost and solvers.
"""
