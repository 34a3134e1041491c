"""Generate the Python modules of a `Program`: one per stage and one per rank. Each operator has an
emitter; the modules have the operator families of `ir.ops`.

This package may import `ir`, but neither torch nor the runtime, because its output is text.
"""
