"""Lower a plan to a `Program`: operators on local shards, communication, the instructions of each
rank in order, and the proof that no rank waits forever.

This package imports `ir` and `passes/analysis`, but no placement strategy and no scheduler.
"""
