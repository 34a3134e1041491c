"""Published pipeline schedules, with the names and notation of their papers. F is a forward and B a
backward. If a backward is split, I computes the input gradients and W the weight gradients.

In formulas, s is a stage, p the number of devices of a pipeline, and m a micro-batch.
"""
