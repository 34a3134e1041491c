"""The order of tasks on every device: published schedules, Tessel's search, a user's file; and the
simulated step.

May import ir, analysis, cost and solvers; the simulator imports ir alone and knows no scheduler.
"""
