"""Lowering of a plan to a `Program`: operators on local shards, communication, and the instructions
of each rank in order. Also the checks that no rank waits forever.

This package imports `ir` and `passes/analysis`, but no placement strategy and no scheduler.
"""
