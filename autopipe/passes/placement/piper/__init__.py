"""Piper: stages by dynamic programming over the downsets of the operator graph (Tarnawski et al., NeurIPS 2021).

`blocks` joins operators, `stage_costs` prices what runs of them take on devices, `strategy` divides. It imports what
stands below placement (schedule, sharding, partition, cost, analysis, solvers), and no other strategy.
"""
