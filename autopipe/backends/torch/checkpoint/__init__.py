"""Checkpoints on disk: their form, their folder, and reading them.

May import `ir` and numpy, so that no torch is needed to look at one.
"""
