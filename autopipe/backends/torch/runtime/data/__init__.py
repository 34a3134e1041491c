"""Input data of a run: sources of samples, the order in which samples are read, checks of their
values, and the readers that give a rank its part of each batch. Also the collection of inference
outputs.
"""
