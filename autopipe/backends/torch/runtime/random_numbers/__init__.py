"""Random numbers that are equal for every plan: the Philox generator, normal numbers, slices of
random tensors, and the random streams of operators.
"""
