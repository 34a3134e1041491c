"""From a plan to a `Program`: local operators, communication, each rank's order, and the proof that
all ranks end.

Imports ir and passes/analysis; nothing of placement or schedule.
"""
