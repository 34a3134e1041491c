"""Operators that a graph spells out, put back together.

`rules` has the pass and the rules by operator, `view` the graph as they see it; may import ir and
the frontend's clean-up and inference.
"""
