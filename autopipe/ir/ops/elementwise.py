"""Operators that compute each element of the result from the elements at the same place, with broadcasting."""

from __future__ import annotations

from autopipe.ir.ops.row import Line, Operator, Signature, per_result


def broadcast(signature: Signature) -> Line:
    """`*x, *x -> *x`: trailing dimensions aligned, extent one (or absence) broadcasts."""
    result = signature.result().shape
    names = [f"x{axis}" for axis in range(len(result))]
    tensors = []
    for value in signature.operands:
        if value is None:
            tensors.append("?")
            continue
        offset = len(result) - len(value.shape)
        dims = [
            names[offset + axis] if extent == result[offset + axis] else "1" for axis, extent in enumerate(value.shape)
        ]
        tensors.append(" ".join(dims))
    return Line(f"{', '.join(tensors)} -> {' '.join(names)}")


def _row(name: str, cost: float = 1.0, keeps: tuple[str, ...] = (), differentiable: bool = True) -> Operator:
    return Operator(name, broadcast, "elementwise", per_result(cost), 1.0, keeps, differentiable=differentiable)


ELEMENTWISE = (
    _row("Add"),
    _row("Sub"),
    _row("Mul", keeps=("0", "1")),
    _row("Div", keeps=("0", "1")),
    _row("Relu", keeps=(">0",)),
    _row("Gelu", 8.0, keeps=("0",)),
    _row("Tanh", 4.0, keeps=(">0",)),
    _row("Sigmoid", 4.0, keeps=(">0",)),
)
