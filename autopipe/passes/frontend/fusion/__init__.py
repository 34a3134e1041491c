"""Fusion: nodes that together compute a known operator, such as attention, are replaced by one node
of that operator.

`rules` has the pass and the table of rules, `view` the graph that rules match against. This package
may import `ir`, and the clean-up, inference and rewriter modules of the frontend.
"""
