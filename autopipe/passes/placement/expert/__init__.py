"""Strategies that experts designed by hand, each for one kind of network."""
