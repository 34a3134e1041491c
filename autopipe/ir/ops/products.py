"""Products: operators that multiply and sum over an axis."""

from __future__ import annotations

from autopipe.ir.ops.row import Line, Operator, Signature, per_point


def matmul(signature: Signature) -> Line:
    """`*b m k, *b k n -> *b m n`, with numpy's rules for vectors and for broadcasting the leading dimensions."""
    left, right = signature.operand(0).shape, signature.operand(1).shape
    result = signature.result().shape
    lead = result[: len(result) - (len(left) > 1) - (len(right) > 1)]
    names = [f"b{axis}" for axis in range(len(lead))]

    def leading(shape: tuple[int, ...]) -> list[str]:
        dims = shape[:-2]
        offset = len(lead) - len(dims)
        return [names[offset + axis] if extent == lead[offset + axis] else "1" for axis, extent in enumerate(dims)]

    row = ["m"] if len(left) > 1 else []
    column = ["n"] if len(right) > 1 else []
    first = " ".join([*leading(left), *row, "k+"])
    second = " ".join([*leading(right), "k", *column])
    return Line(f"{first}, {second} -> {' '.join([*names, *row, *column])}")


PRODUCTS = (Operator("MatMul", matmul, "matmul", per_point(2.0), 2.0, keeps=("0", "1")),)
