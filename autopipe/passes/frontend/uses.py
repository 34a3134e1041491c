"""The readers of each value of a file, and the operand slots that hold weights."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autopipe.ir.ops import OPERATORS, operators_with
from autopipe.passes.frontend.signature import NUMBERED

if TYPE_CHECKING:
    import onnx

WEIGHT_SLOTS = {
    name: frozenset(row.layer_weights) for name, row in OPERATORS.items() if row.layer_weights
}
"""By operator, the operands that are weights if they do not depend on the inputs."""
AFFINE_SLOTS = frozenset(
    (name, slot) for name, row in OPERATORS.items() for slot in row.scales_and_biases
)
"""(operator, operand) of scales, biases and slopes. All of their elements are equal in a new
layer.
"""
ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div"})
"""Operators that apply a scale or bias in layers for which ONNX has no operator."""
VIEWS = operators_with(lambda row: row.same_elements) | {"Cast", "Transpose"}
"""Operators that may stand between a weight and the operator that uses it."""
LOOKUP_SLOTS = frozenset((name, 0) for name in operators_with(lambda row: row.lookup))
"""(operator, operand) of embedding tables."""
GATES = {name: row.gates for name, row in OPERATORS.items() if row.gates}
"""Number of gates of recurrent layers: weight rows per hidden unit."""
LIFTED = re.compile(r"_?val_\d+|onnx::\w+|(c_)?lifted_tensor\w*|_tensor_constant\d*")
"""Names that torch's exporters give to constants and to folded values, which may be weights."""


class Uses:
    """The readers of each value among some nodes, as pairs of node and operand index."""

    def __init__(self, nodes: Iterable[onnx.NodeProto]) -> None:
        self.readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in nodes:
            for slot, name in enumerate(node.input):
                if name:
                    self.readers.setdefault(name, []).append((node, slot))

    def slots(self, name: str, through: frozenset[str] = VIEWS) -> frozenset[tuple[str, int]]:
        """Return (operator, operand index) of every use of a value. Operators `through` are
        skipped: the uses of their results count instead.
        """
        found: set[tuple[str, int]] = set()
        seen = {name}
        waiting = [name]
        while waiting:
            for node, slot in self.readers.get(waiting.pop(), ()):
                if node.op_type in through:
                    results = [result for result in node.output if result and result not in seen]
                    seen.update(results)
                    waiting.extend(results)
                else:
                    found.add((node.op_type, slot))
        return frozenset(found)

    def is_weight(self, name: str) -> bool:
        """True if a use of a value is a weight slot."""
        return any(
            slot in WEIGHT_SLOTS.get(operator, frozenset()) for operator, slot in self.slots(name)
        )


def scope_of(node: onnx.NodeProto) -> str:
    """Return the module that a node of PyTorch's TorchScript exporter belongs to, "" if its name
    has no module.
    """
    return "/".join(NUMBERED.sub("", each) for each in node.name.split("/")[:-1])
