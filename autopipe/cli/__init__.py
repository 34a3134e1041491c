"""The command line: one module per command, and modules that several commands share (options,
requests, plan folders, output).

This package may import every other package. Heavy modules are imported inside the functions that
use them. `main` converts errors to messages and exit codes.
"""
