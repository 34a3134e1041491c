"""Seconds and bytes of nodes, stages and exchanges: rooflines or measurements, collectives, memory.

`stages` is read by strategies and schedulers, `range_tables` by searches over chains. Imports ir
and passes/analysis.
"""
