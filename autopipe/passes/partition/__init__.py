"""Dividing a model's nodes among stages: cuts of a chain, downsets of a DAG, flows, an integer program."""
