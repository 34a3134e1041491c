"""Doors to the solvers: their statuses read properly, their limits kept."""
