"""Tensors that persist from step to step: parameters and running statistics. Also their
checkpoints.
"""
