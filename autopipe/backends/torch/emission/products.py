"""Emission of products."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter, literal, number, torch_dtype
from autopipe.ir.ops.products import equation_of, has_bias


def _matmul(call: Call) -> str:
    library = "operators.matmul_whole" if call.result().dtype.is_integer else "torch.matmul"
    return f"{library}({call.arg(0)}, {call.arg(1)})"


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
