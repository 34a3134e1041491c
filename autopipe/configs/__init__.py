"""Files that users write and that ship with autopipe: YAML schemas, clusters, recipes and the model
zoo.

May import `ir`, and neither passes nor backends.
"""
