"""Operators whose parameters' gradients are left to the second half of a split backward."""

from __future__ import annotations

import ast
from dataclasses import replace

from autopipe.backends.torch.emission.call import Call, Emitter

_LIBRARIES = ("torch", "F", "operators")


def deferred(emitter: Emitter, call: Call) -> str:
    """The expression of `call` for the `WeightGradQueue`: `p.weight_grads(F.linear, x0, p.w1.t(), p.w2)`.

    What is not one call of a function becomes one of the tensors it reads.
    """
    code = emitter(call)
    function = _function(code)
    if function:
        return f"p.weight_grads({function}, {code[len(function) + 1 :]}"
    present = [index for index, each in enumerate(call.codes) if each is not None]
    names = tuple(None if each is None else f"y{index}" for index, each in enumerate(call.codes))
    tensors = ", ".join(call.arg(index) for index in present)
    arguments = ", ".join(f"y{index}" for index in present)
    return f"p.weight_grads(lambda {arguments}: {emitter(replace(call, codes=names))}, {tensors})"


def _function(code: str) -> str:
    """The library function that an expression is one call of; "" where it is something else."""
    tree = ast.parse(code, mode="eval").body
    if not isinstance(tree, ast.Call) or not tree.args:
        return ""
    function = ast.unparse(tree.func)
    is_name = all(each.isidentifier() for each in function.split("."))
    return function if is_name and function.split(".")[0] in _LIBRARIES and code.startswith(f"{function}(") else ""
