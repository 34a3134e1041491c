"""The application: one module per command, for the command line and for Python.

A function of this package takes settings and paths, returns values and raises children of
`AutopipeError`. It prints nothing: progress, notes and warnings go to an `Events`. `interface` has
the functions and the class that `import autopipe` offers.
"""
