"""Figures of a step: bars on devices over time, and memory below. They are drawn in the terminal,
as SVG, as an HTML report, as a trace, or as CSV.

This package may import `ir` and the number formatting of `cli.output`.
"""
