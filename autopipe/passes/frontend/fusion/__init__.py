"""Fusion: groups of nodes that compute a known operator, such as attention, become one node.

`rules` has the pass and the table of rules, `view` the graph that rules match against. May import
ir and the frontend's clean-up, inference and rewriter.
"""
