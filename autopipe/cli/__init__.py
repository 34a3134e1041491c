"""The command line: one module a command, and what several commands share (options, requests, plan
folders, output).

It may import everything; heavy modules inside the functions that use them. `main` alone catches
errors.
"""
