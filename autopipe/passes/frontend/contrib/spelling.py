"""A node of the file spelled with others: their names, and the few forms that most spellings
have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Value
from autopipe.passes.frontend.elements import renamed

if TYPE_CHECKING:
    import onnx

_SLICED_BY_OPERANDS = 10
_CLIPPED_BY_OPERANDS = 11
"""The opsets since which operands, not attributes, tell a Slice's and a Clip's bounds."""


@dataclass(slots=True)
class Spelling:
    """The nodes that stand for one node of the file, in their order."""

    node: onnx.NodeProto
    operands: tuple[str, ...]
    """Names of values, "" where one is absent."""
    types: Mapping[str, Value]
    opset: int
    """The file's, in whose terms nodes are written."""
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def operand(self, index: int) -> str:
        """The name of an operand, "" where it is absent."""
        return self.operands[index] if index < len(self.operands) else ""

    def type(self, index: int) -> Value:
        """The type of an operand; raises ModelError where it is absent."""
        if not self.operand(index):
            raise ModelError(
                f"it lacks operand {index}", where=f"{self.node.op_type} {self.node.name!r}"
            )
        return self.types[self.operand(index)]

    def shape(self, index: int) -> tuple[int, ...]:
        return self.type(index).shape

    def integer(self, name: str, default: int = 0) -> int:
        return next((each.i for each in self.node.attribute if each.name == name), default)

    def number(self, name: str, default: float) -> float:
        return next((each.f for each in self.node.attribute if each.name == name), default)

    def add(
        self,
        operator: str,
        *operands: str,
        result: int | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node and return the name of its first result: that of result `result` of the node,
        else a new one.
        """
        import onnx.helper

        own = self.node.output[0] or self.node.name
        name = f"{own}/{len(self.nodes)}" if result is None else self.node.output[result]
        title = (
            f"{self.node.name or self.node.op_type}/{operator}"
            if self.nodes or result is None
            else self.node.name
        )
        kept = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(
            onnx.helper.make_node(operator, operands, [name], name=title, domain=domain, **kept)
        )
        return name

    def own(self, operands: Sequence[str], outputs: Sequence[str]) -> None:
        """Add the node itself with other operands and results."""
        self.nodes.append(renamed(self.node, operands, outputs))

    def integers(self, *values: int) -> str:
        """A constant of whole numbers."""
        return self.add("Constant", value_ints=list(values))

    def sliced(self, name: str, start: int, stop: int, axis: int, result: int | None = None) -> str:
        """The elements from `start` up to `stop` along an axis."""
        if self.opset < _SLICED_BY_OPERANDS:
            return self.add("Slice", name, result=result, starts=[start], ends=[stop], axes=[axis])
        return self.add("Slice", name, *map(self.integers, (start, stop, axis)), result=result)

    def clipped(self, name: str, low: float, high: float, result: int | None = None) -> str:
        if self.opset < _CLIPPED_BY_OPERANDS:
            return self.add("Clip", name, result=result, min=low, max=high)
        bounds = (self.add("Constant", value_float=value) for value in (low, high))
        return self.add("Clip", name, *bounds, result=result)

    def shaped(self, name: str, *shape: int) -> str:
        return self.add("Reshape", name, self.integers(*shape))

    def attributes(self, *left_out: str) -> dict[str, Any]:
        """The node's attributes, but for some."""
        import onnx.helper

        return {
            each.name: onnx.helper.get_attribute_value(each)
            for each in self.node.attribute
            if each.name not in left_out
        }

    def text(self, name: str, default: str = "") -> str:
        return next(
            (each.s.decode(errors="replace") for each in self.node.attribute if each.name == name),
            default,
        )

    def moved(self, name: str, rank: int, *, last: bool, result: int | None = None) -> str:
        """A value whose channels are moved from axis 1 to the last, or from there to axis 1."""
        order = [0, *range(2, rank), 1] if last else [0, rank - 1, *range(1, rank - 1)]
        return self.add("Transpose", name, perm=order, result=result)

    def dequantized(self, index: int) -> str:
        """Operand `index`, followed by its scale and zero point, as floating-point numbers."""
        return self.add(
            "DequantizeLinear", *filter(None, map(self.operand, range(index, index + 3)))
        )

    def quantize(self, name: str, index: int) -> None:
        """Make the node's result of a value, its scale and zero point operands from `index` on."""
        self.add(
            "QuantizeLinear",
            name,
            *filter(None, (self.operand(index), self.operand(index + 1))),
            result=0,
        )
