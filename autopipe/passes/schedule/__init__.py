"""Schedules: the order of tasks on each device, and the simulation of a step that follows this
order.

Orders come from published schedules, from Tessel's search, or from a file. The modules of this
package may import ir, analysis, cost, solvers, and the modules batching and registry of passes. The
simulator imports only ir and simulates the schedules of any scheduler.
"""
