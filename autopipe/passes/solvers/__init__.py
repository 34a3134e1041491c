"""Solvers of integer programs (HiGHS, or any solver through PuLP), of CP-SAT models, and of
pairwise min-sum models in numpy (`min_sum`).

The solvers are independent of models, clusters and plans. They keep time limits and check the
values that external solvers return.
"""
