"""One step of training or inference: the stages of a rank and their tasks, gradients, the update of
parameters, and the capture of both as CUDA graphs.
"""
