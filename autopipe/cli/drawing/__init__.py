"""A step as a picture (bars on devices over time, memory below) and its forms: terminal, SVG, page,
trace, CSV.

It may import `ir` and the command line's figures (`cli.output`).
"""
