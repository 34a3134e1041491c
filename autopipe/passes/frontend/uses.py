"""The nodes that read each value of a file, and the operands of operators that are weights.

A slot is a pair (operator, operand index).
"""

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
"""By operator, the indices of operands that are weights unless they depend on inputs."""
AFFINE_SLOTS = frozenset(
    (name, slot) for name, row in OPERATORS.items() for slot in row.scales_and_biases
)
"""(operator, operand index) of scales, biases and slopes. All elements of such an operand are equal
in a newly initialised layer.
"""
ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div"})
"""Operators that apply a scale or bias in layers for which ONNX has no operator."""
VIEWS = operators_with(lambda row: row.same_elements) | {"Cast", "Transpose"}
"""Operators that only reshape, transpose or cast: they may stand between a weight and the operator
that uses it.
"""
LOOKUP_SLOTS = frozenset((name, 0) for name in operators_with(lambda row: row.lookup))
"""(operator, operand index) of embedding tables."""
GATES = {name: row.gates for name, row in OPERATORS.items() if row.gates}
"""By operator of a recurrent layer, its number of gates: the number of weight rows per hidden
unit.
"""
LIFTED = re.compile(r"_?val_\d+|onnx::\w+|(c_)?lifted_tensor\w*|_tensor_constant\d*")
"""Pattern of the names that PyTorch's exporters make up for constants and for computed tensors.
Such a tensor may still be a weight.
"""


class Uses:
    """The nodes that read each value: `readers` contains (node, operand index) of each use, by the
    name of the value.
    """

    def __init__(self, nodes: Iterable[onnx.NodeProto]) -> None:
        self.readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in nodes:
            for slot, name in enumerate(node.input):
                if name:
                    self.readers.setdefault(name, []).append((node, slot))

    def slots(self, name: str, through: frozenset[str] = VIEWS) -> frozenset[tuple[str, int]]:
        """Return (operator, operand index) of each use of the value `name`. Instead of a use by an
        operator of `through`, the uses of that operator's results are returned.
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
        """True if an operator reads the value `name` as a weight, according to `WEIGHT_SLOTS`."""
        return any(
            slot in WEIGHT_SLOTS.get(operator, frozenset()) for operator, slot in self.slots(name)
        )


def scope_of(node: onnx.NodeProto) -> str:
    """Return the path of the module that contains a node, from the node's name in a file of
    PyTorch's older exporter; "" if the name has no path. Numbers that distinguish repeated calls
    are removed.
    """
    return "/".join(NUMBERED.sub("", each) for each in node.name.split("/")[:-1])
