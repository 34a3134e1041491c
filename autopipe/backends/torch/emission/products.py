"""Emission of products."""

from __future__ import annotations

from string import ascii_lowercase

from autopipe.backends.torch.emission.call import Call, Emitter, literal, number, torch_dtype
from autopipe.ir.ops.products import equation_of, has_bias


def _matmul(call: Call) -> str:
    if call.result().dtype.is_integer:
        return f"operators.matmul_whole({call.arg(0)}, {call.arg(1)})"
    return multiply(call, call.arg(0), call.arg(1))


def multiply(call: Call, left: str, right: str) -> str:
    """The product of the first two operands, each as it is or transposed, as `left` and `right` write them."""
    equation = _stacked(call.operand(0).shape, call.operand(1).shape)
    if equation is None:
        return f"torch.matmul({left}, {right})"
    return f"torch.einsum({equation!r}, {left}, {right})"


def _stacked(left: tuple[int, ...], right: tuple[int, ...]) -> str | None:
    """The equation of a product of stacks of matrices, one of which is read again along an axis only the other has.

    None where there is no such axis. `torch.matmul` writes a copy of the matrices for each time they are read, and
    sums gradients as many; `torch.einsum` takes such an axis for rows of the other factor, as one would by hand.
    """
    rank = max(len(left), len(right))
    if min(len(left), len(right)) < 3 or rank >= len(ascii_lowercase):
        return None
    stacks = [(1,) * (rank - len(shape)) + shape[:-2] for shape in (left, right)]
    if stacks[0] == stacks[1]:
        return None
    lead, row, inner, column = ascii_lowercase[: rank - 2], *ascii_lowercase[rank - 2 : rank + 1]
    first, second = (lead[rank - len(shape) :] for shape in (left, right))
    return f"{first}{row}{inner},{second}{inner}{column}->{lead}{row}{column}"


def _gemm(call: Call) -> str:
    """`F.linear` where the weight lies as in torch.nn.Linear, else `torch.addmm` on transposed views."""
    node = call.node
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    left = f"{call.arg(0)}.t()" if node.integer("transA") else call.arg(0)
    right = f"{call.arg(1)}.t()" if node.integer("transB") else call.arg(1)
    if not has_bias(call.signature):
        if node.integer("transB") and alpha == 1.0:
            return f"F.linear({left}, {call.arg(1)})"
        product = f"torch.mm({left}, {right})"
        return product if alpha == 1.0 else f"{_factor(call, alpha)} * {product}"
    bias = call.bias(2, "k")
    if node.integer("transB") and alpha == beta == 1.0 and call.operand(2).shape == call.result().shape[1:]:
        return f"F.linear({left}, {call.arg(1)}, {bias})"
    factors = f", beta={_factor(call, beta)}" if beta != 1.0 else ""
    factors += f", alpha={_factor(call, alpha)}" if alpha != 1.0 else ""
    return f"torch.addmm({bias}, {left}, {right}{factors})"


def _factor(call: Call, value: float) -> str:
    return literal(int(value)) if call.result().dtype.is_integer else number(value)


def _einsum(call: Call) -> str:
    operands = ", ".join(call.arg(index) for index in range(len(call.codes)))
    return f"torch.einsum({str(equation_of(call.signature))!r}, {operands})"


def _matmul_integer(call: Call) -> str:
    arguments = ", ".join((call.arg(0), call.arg(1), call.optional(2), call.optional(3)))
    return f"operators.matmul_integer({arguments})"


def _matmul_quantized(call: Call) -> str:
    arguments = ", ".join(call.arg(index) for index in range(8))
    return f"operators.matmul_quantized({arguments}, {torch_dtype(call.result().dtype)})"


PRODUCTS: dict[str, Emitter] = {
    "MatMul": _matmul,
    "autopipe.Linear": lambda call: f"F.linear({call.arg(0)}, {call.arg(1)}.t(), {call.arg(2)})",
    "Gemm": _gemm,
    "Einsum": _einsum,
    "MatMulInteger": _matmul_integer,
    "QLinearMatMul": _matmul_quantized,
}
