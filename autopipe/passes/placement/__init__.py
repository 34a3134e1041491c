"""Placement strategies, one file or folder per strategy. A strategy chooses a placement: a mapping
from the graph's nodes to pipeline stages, and from stages to devices.

A strategy imports the packages schedule, sharding, partition, cost, analysis and solvers, and no
other strategy.
"""
