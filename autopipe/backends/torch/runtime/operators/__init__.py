"""Operators that torch spells with more than one expression. Generated code calls them by name."""
