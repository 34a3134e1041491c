"""Published schedules by the names and in the notation of their papers: F and B, or I and W where B
is split.

Stages are s of p devices, micro-batches m. May import ir, cost, schedule's orders and predict, and
tessel's model.
"""
