"""Strategy `piper`: pipeline stages by dynamic programming over the downsets of the operator graph
(Tarnawski et al., NeurIPS 2021). A downset is a set of blocks of operators that contains all blocks
on which its members depend.

`strategy` merges operators into blocks and partitions the blocks into stages; `stage_costs`
computes the cost of each possible stage. The package imports schedule, sharding, partition, cost,
analysis and solvers, but no other strategy.
"""
