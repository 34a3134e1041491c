"""Solvers, their statuses read properly and their limits kept: integer programs (HiGHS), CP-SAT,
and pairwise min-sum models in numpy (`min_sum`).

They know nothing of models, clusters or plans: of the package they import `ir/errors` alone.
"""
