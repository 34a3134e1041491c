"""Products: operators that multiply and sum over an axis."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Value
from autopipe.ir.ops.row import NotationLine, Operator, Signature, per_point
from autopipe.ir.space import Space


def is_matrix_product(signature: Signature) -> bool:
    """True if this is a MatMul with one matrix for its second factor."""
    node = signature.node
    return node.op == "MatMul" and not node.domain and len(signature.operand(1).shape) == 2


def takes_bias(product: Value, bias: Value) -> bool:
    """True if adding `bias` to such a product can be computed along with it."""
    return len(product.shape) > 1 and bias.shape == product.shape[-1:] and bias.dtype is product.dtype


def matmul(signature: Signature) -> NotationLine:
    """`*b m k, *b k n -> *b m n`, with numpy's rules for vectors and for broadcasting the leading dimensions."""
    first, second, result = batched(signature.operand(0).shape, signature.operand(1).shape, signature.result().shape)
    return NotationLine(f"{first}, {second} -> {result}")


def batched(left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...], k: str = "k+") -> list[str]:
    """Notation of the two factors and the result of a product of stacks of matrices."""
    lead = result[: len(result) - (len(left) > 1) - (len(right) > 1)]
    names = [f"b{axis}" for axis in range(len(lead))]

    def leading(shape: tuple[int, ...]) -> list[str]:
        dims = shape[:-2]
        offset = len(lead) - len(dims)
        return [names[offset + axis] if extent == lead[offset + axis] else "1" for axis, extent in enumerate(dims)]

    row = ["m"] if len(left) > 1 else []
    column = ["n"] if len(right) > 1 else []
    return [
        " ".join(dims) for dims in ([*leading(left), *row, k], [*leading(right), k, *column], [*names, *row, *column])
    ]


def gemm(signature: Signature) -> NotationLine:
    """`m k, k n, *m *n -> m n`, either matrix possibly transposed; of devices with parts of k the first adds C."""
    node = signature.node
    biased = has_bias(signature)
    k = "k&" if biased else "k+"
    first = f"{k} m" if node.integer("transA") else f"m {k}"
    second = "n k" if node.integer("transB") else "k n"
    tensors = [first, second]
    if signature.present(2):
        shape = signature.operand(2).shape
        result = signature.result().shape
        dims = [name if extent == whole else "1" for name, extent, whole in _aligned("mn", shape, result)]
        tensors.append(" ".join(dims) if biased else " ".join("1" for _ in shape))
    return NotationLine(f"{', '.join(tensors)} -> m n")


def has_bias(signature: Signature) -> bool:
    """True if a Gemm adds its third operand."""
    return signature.present(2) and signature.node.number("beta", 1.0) != 0.0


def _aligned(names: str, shape: tuple[int, ...], result: tuple[int, ...]) -> list[tuple[str, int, int]]:
    count = len(shape)
    return list(zip(names[len(names) - count :], shape, result[len(result) - count :], strict=True))


@dataclass(frozen=True, slots=True)
class Equation:
    """An Einsum equation without blanks and with an explicit result; "." stands for an ellipsis."""

    operands: tuple[str, ...]
    result: str

    def __str__(self) -> str:
        return f"{','.join(self.operands)}->{self.result}".replace(".", "...")


def equation_of(signature: Signature) -> Equation:
    """The Einsum equation of a node. Raises ModelError where it is not one."""
    text = signature.node.text("equation").replace(" ", "").replace("...", ".")
    left, arrow, right = text.partition("->")
    operands = tuple(left.split(","))
    letters = [letter for operand in operands for letter in operand if letter != "."]
    if not arrow:
        right = ("." if "." in left else "") + "".join(
            sorted(set(letters) - {x for x in letters if letters.count(x) > 1})
        )
    allowed = all(letter.isascii() and letter.isalpha() for letter in letters)
    fits = len(operands) == len(signature.operands) and all(
        len(word) == len(value.shape) if "." not in word else len(word) - 1 <= len(value.shape)
        for word, value in zip(operands, signature.operands, strict=True)
        if value is not None
    )
    if not allowed or not fits or not set(right) <= {*letters, "."}:
        raise ModelError(f"Einsum has the equation {text!r}", where=repr(signature.node.name))
    return Equation(operands, right)


def einsum(signature: Signature) -> NotationLine:
    """The equation itself: letters absent from the result add up, letters twice in an operand stay whole."""
    equation = equation_of(signature)
    result = signature.result().shape
    lead = len(result) - len(equation.result.replace(".", ""))
    start = equation.result.find(".")
    spread = result[start : start + lead] if lead else ()
    diagonal = {letter for word in equation.operands for letter in word if word.count(letter) > 1}

    def axis(letter: str) -> str:
        mark = "!" if letter in diagonal else "" if letter in equation.result else "+"
        return f"{letter}{mark}"

    def tensor(word: str, shape: tuple[int, ...]) -> str:
        dims: list[str] = []
        hidden = len(shape) - len(word.replace(".", ""))
        for letter in word:
            if letter != ".":
                dims.append(axis(letter))
                continue
            for place, extent in enumerate(shape[len(dims) : len(dims) + hidden], len(spread) - hidden):
                dims.append(f"e{place}" if place >= 0 and extent == spread[place] else "1")
        return " ".join(dims)

    words = [tensor(word, signature.operand(i).shape) for i, word in enumerate(equation.operands)]
    return NotationLine(f"{', '.join(words)} -> {tensor(equation.result, result)}")


def _einsum_flops(signature: Signature, space: Space) -> float:
    return float(space.points * max(len(signature.operands), 1))


def _matmul_integer(signature: Signature) -> NotationLine:
    return _with_scales(signature, (0, 1), "k+")


def _matmul_quantized(signature: Signature) -> NotationLine:
    return _with_scales(signature, (0, 3), "k")


def _with_scales(signature: Signature, factors: tuple[int, int], k: str) -> NotationLine:
    """A product whose other operands are scales and zero points, of which the factors are cut only where all are one
    number for the whole matrix."""
    shapes = [None if value is None else value.shape for value in signature.operands]
    scales = [shape for index, shape in enumerate(shapes) if index not in factors and shape is not None]
    words = batched(
        signature.operand(factors[0]).shape, signature.operand(factors[1]).shape, signature.result().shape, k
    )
    if any(math.prod(shape) > 1 for shape in scales):
        words = [" ".join(name if name == "1" else f"{name.rstrip('+')}!" for name in word.split()) for word in words]
    tensors = ["?" if shape is None else " ".join("1" for _ in shape) for shape in shapes]
    tensors[factors[0]], tensors[factors[1]] = words[:2]
    return NotationLine(f"{', '.join(tensors)} -> {words[2]}")


PRODUCTS = (
    Operator("MatMul", matmul, "matmul", per_point(2.0), 2.0, keeps=("0", "1"), weights=(0, 1)),
    Operator("Gemm", gemm, "matmul", per_point(2.0), 2.0, keeps=("0", "1"), weights=(0, 1)),
    Operator("Einsum", einsum, "matmul", _einsum_flops, 2.0, keeps=("*",), weights=(0, 1, 2)),
    Operator("MatMulInteger", _matmul_integer, "matmul", per_point(2.0), differentiable=False),
    Operator("QLinearMatMul", _matmul_quantized, "matmul", per_point(2.0), differentiable=False),
)
