"""ONNX Runtime's own operators (domain com.microsoft) spelled with ONNX's, where that loses nothing, while reading.

What a spelling says is read like any other part of the file: typed, folded, fused. Operators with a row of their own
are only given one form: biases apart, scales and zero points of blocks as matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Value

if TYPE_CHECKING:
    import onnx

DOMAIN = "com.microsoft"


@dataclass(slots=True)
class Spelling:
    """The nodes that stand for one node of the file, in their order."""

    node: onnx.NodeProto
    operands: tuple[str, ...]
    """Names of values, "" where one is absent."""
    types: Mapping[str, Value]
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def operand(self, index: int) -> str:
        """The name of an operand, "" where it is absent."""
        return self.operands[index] if index < len(self.operands) else ""

    def type(self, index: int) -> Value:
        """The type of an operand; raises ModelError where it is absent."""
        if not self.operand(index):
            raise ModelError(f"it lacks operand {index}", where=f"{self.node.op_type} {self.node.name!r}")
        return self.types[self.operand(index)]

    def shape(self, index: int) -> tuple[int, ...]:
        return self.type(index).shape

    def integer(self, name: str, default: int = 0) -> int:
        return next((each.i for each in self.node.attribute if each.name == name), default)

    def number(self, name: str, default: float) -> float:
        return next((each.f for each in self.node.attribute if each.name == name), default)

    def add(self, operator: str, *operands: str, result: int | None = None, domain: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its first result: that of result `result` of the node, else a new one."""
        import onnx.helper

        own = self.node.output[0] or self.node.name
        name = f"{own}/{len(self.nodes)}" if result is None else self.node.output[result]
        title = f"{self.node.name or self.node.op_type}/{operator}" if self.nodes or result is None else self.node.name
        kept = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(onnx.helper.make_node(operator, operands, [name], name=title, domain=domain, **kept))
        return name

    def own(self, operands: Sequence[str], outputs: Sequence[str]) -> None:
        """Add the node itself with other operands and results."""
        import onnx

        node = onnx.NodeProto()
        node.CopyFrom(self.node)
        del node.input[:], node.output[:]
        node.input.extend(operands)
        node.output.extend(outputs)
        self.nodes.append(node)

    def integers(self, *values: int) -> str:
        """A constant of whole numbers."""
        return self.add("Constant", value_ints=list(values))

    def shaped(self, name: str, *shape: int) -> str:
        return self.add("Reshape", name, self.integers(*shape))


Speller = Callable[[Spelling], None]


def _matmul_nbits(spelling: Spelling) -> None:
    """Scales and unpacked zero points as matrices, the bias added behind."""
    rows = spelling.shape(1)[0]
    operands = [spelling.operand(index) for index in range(5)]
    for index in (2, 3):
        if operands[index] and len(spelling.shape(index)) == 1:
            operands[index] = spelling.shaped(operands[index], rows, spelling.shape(index)[0] // max(rows, 1))
    while not operands[-1]:
        operands.pop()
    bias = spelling.operand(5)
    product = f"{spelling.node.output[0]}/product" if bias else spelling.node.output[0]
    spelling.own(operands, [product])
    if bias:
        spelling.add("Add", product, bias, result=0)


SPELLERS: dict[str, Speller] = {"MatMulNBits": _matmul_nbits}
"""By operator of the domain."""


def is_spelled(node: onnx.NodeProto) -> bool:
    """True if other nodes stand for this one, or it is given one form."""
    return node.domain == DOMAIN and node.op_type in SPELLERS


def spelled_out(
    node: onnx.NodeProto, operands: tuple[str, ...], types: Mapping[str, Value]
) -> tuple[onnx.NodeProto, ...] | None:
    """The nodes that stand for this one; None where it stands for itself. Raises ModelError where its operands are not
    what the operator takes."""
    if not is_spelled(node):
        return None
    spelling = Spelling(node, operands, types)
    try:
        SPELLERS[node.op_type](spelling)
    except (ValueError, IndexError) as error:
        shapes = ", ".join(str(types[name].shape) if name else "absent" for name in operands)
        raise ModelError(f"operands {shapes} do not fit", where=f"{node.op_type} {node.name!r}") from error
    return tuple(spelling.nodes)
