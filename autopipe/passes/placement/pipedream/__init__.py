"""A chain of stages by dynamic programming over the operators in one line."""
