"""From a `Program` to Python text: stages, ranks, and one emitter an operator, by families as in
`ir.ops`.

May import ir, and neither torch nor the runtime: what is written is text.
"""
