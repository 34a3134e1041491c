"""Measurement of operators, tasks, P2P messages and collectives on the available device. The
results are values of `ir.measured_costs`.

This package may import torch and, of autopipe's packages, `ir`, `codegen`, the runtime and the
launcher.
"""
