"""Random numbers that are equal for every plan: the Philox generator, normal values, shards of
random tensors, and streams of operators.
"""
