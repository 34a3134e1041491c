"""Generation of the Python modules of a `Program`: one module per stage and one per rank. Each
operator has an emitter, a function that returns the Python code of one use of the operator. The
modules of this package with emitters correspond to the operator families of `ir.ops`.

This package may import `ir`, but neither torch nor the runtime, because its output is text.
"""
