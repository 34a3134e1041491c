"""Splits inside a stage: PaSE's configurations of nodes, their costs, the min-sum problem, and
Megatron's tensor parallelism.

A configuration is one way to split the iteration space of a node over the devices of its stage.
`configurations` enumerates the configurations of a node, and `node_costs` computes their costs.
`reshard_tables` computes the costs of changes of layout between nodes. `search` builds the
optimisation model and fits its solutions into memory. `regions` splits layers by the rules of
Megatron-LM. This package may import `ir` and the passes `analysis`, `cost` and `solvers`.
"""
