"""Tensors that persist between steps: parameters, running statistics, and their checkpoints."""
