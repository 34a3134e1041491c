"""The best plan over all strategies and schedules: candidates, their search, and answers kept
between runs.

May import everything that a plan is made with; only explain, export and cli stand above it.
"""
