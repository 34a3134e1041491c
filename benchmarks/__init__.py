"""Benchmarks: the papers' tables and figures (`python -m benchmarks tessel`), and scripts that each
measure one thing.

They may import all of autopipe, which imports nothing from here.
"""
