"""Stages by dynamic programming over the downsets of the operator graph."""
