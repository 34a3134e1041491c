"""One step of training or inference: stages and their tasks, gradients, the update, and capture as
CUDA graphs.
"""
