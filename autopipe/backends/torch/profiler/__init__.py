"""Times of operators, tasks, messages and collectives on the device at hand, which
`ir.measured_costs` holds.

May import torch, and of ours ir, the emission, the runtime and the launcher.
"""
