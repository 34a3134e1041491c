"""The application: one module per command, for the command line and for Python.

Functions of this package take settings and paths, return values and raise subclasses of
`AutopipeError`. They print nothing: they report progress, notes and warnings to an `Events` object.
`interface` contains the functions and the class of `import autopipe`.
"""
