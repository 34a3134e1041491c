"""Measurement of operators, tasks, messages and collectives on the available device.
`ir.measured_costs` holds the results.

May import torch, and of autopipe's packages `ir`, `codegen`, the runtime and the launcher.
"""
