"""Strategies: a file or a folder each, that chooses a placement for a problem.

A strategy imports what stands below placement (schedule, sharding, partition, cost, analysis,
solvers), and no other.
"""
