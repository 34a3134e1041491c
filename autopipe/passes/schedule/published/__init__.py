"""Published pipeline schedules, under the names and in the notation of their papers: F and B, or I
and W if a backward is split into input gradients and weight gradients.

In formulas, s is a stage, p the number of devices of a pipeline, and m a micro-batch.
"""
