"""Solvers of integer programs (HiGHS, or any solver through PuLP), of CP-SAT models, and of
pairwise min-sum models in numpy (`min_sum`).

The solvers know neither neural networks nor clusters nor plans. They obey time limits. Values that
an external integer-program solver returns are checked against the program; values of CP-SAT are
not.
"""
