"""Dividing a model's nodes among stages: a line cut into runs (`chain_cut`), all downsets of a
graph (`downsets`), and even stages between which the fewest bytes cross (`flow`, `min_cut_ilp`).

It imports analysis, cost and solvers, and knows nothing of strategies.
"""
