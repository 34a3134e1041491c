"""Stages that keep the model's branches apart, by dynamic programming over its series-parallel tree."""
