"""Strategies: one file or folder per strategy. A strategy chooses a placement, a mapping from nodes
to stages and devices, for a problem.

A strategy imports schedule, sharding, partition, cost, analysis and solvers, and no other strategy.
"""
