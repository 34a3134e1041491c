"""Strategies: one a file, each choosing a placement for a problem."""
