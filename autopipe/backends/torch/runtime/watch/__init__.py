"""Observation and control of a running rank: clocks, reports, heartbeats, failures, and requests to
stop or to save.
"""
