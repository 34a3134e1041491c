"""Schedules: the order of tasks on each device, and the simulation of a step.

The orders come from published schedules, from Tessel's search, or from a file. The modules may
import ir, analysis, cost and solvers. The simulator imports only ir and works for any scheduler.
"""
