"""Piper: stages by dynamic programming over the downsets of the operator graph (Tarnawski et al.,
NeurIPS 2021).

`strategy` joins operators to blocks and divides them, `stage_costs` prices what runs of them take
on devices. It imports what stands below placement (schedule, sharding, partition, cost, analysis,
solvers), and no other strategy.
"""
