"""Who reads each value of a file, and where operators take weights."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autopipe.passes.frontend.signature import NUMBERED

if TYPE_CHECKING:
    import onnx

WEIGHT_SLOTS: dict[str, frozenset[int]] = {
    "Conv": frozenset({1, 2}),
    "ConvTranspose": frozenset({1, 2}),
    "Gemm": frozenset({0, 1, 2}),
    "MatMul": frozenset({0, 1}),
    "Einsum": frozenset({0, 1}),
    "BatchNormalization": frozenset({1, 2, 3, 4}),
    "InstanceNormalization": frozenset({1, 2}),
    "GroupNormalization": frozenset({1, 2}),
    "LayerNormalization": frozenset({1, 2}),
    "RMSNormalization": frozenset({1}),
    "PRelu": frozenset({1}),
    "LSTM": frozenset({1, 2, 3, 7}),
    "GRU": frozenset({1, 2, 3}),
    "RNN": frozenset({1, 2, 3}),
    "Gather": frozenset({0}),
}
"""Operands that are weights where they do not depend on the inputs."""
AFFINE_SLOTS = frozenset(
    {
        ("Conv", 2),
        ("ConvTranspose", 2),
        ("Gemm", 2),
        ("BatchNormalization", 1),
        ("BatchNormalization", 2),
    }
    | {
        (f"{kind}Normalization", slot)
        for kind in ("Instance", "Group", "Layer", "RMS")
        for slot in (1, 2)
    }
    | {("PRelu", 1)}
)
"""Operands that hold scales, offsets and slopes: equal numbers there are those of a new layer."""
ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div"})
"""Operators that spell such a scale or offset where a layer has no operator of its own."""
VIEWS = frozenset({"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Cast"})
"""Operators through which a weight may pass on its way."""
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
"""Recurrent layers, by the rows of their weights for each hidden unit."""
LIFTED = re.compile(r"_?val_\d+|onnx::\w+|(c_)?lifted_tensor\w*|_tensor_constant\d*")
"""Names that torch's exporters give to constants and to what they folded, weights included."""


class Uses:
    """Who reads each value of some nodes: node and position of the operand."""

    def __init__(self, nodes: Iterable[onnx.NodeProto]) -> None:
        self.readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in nodes:
            for slot, name in enumerate(node.input):
                if name:
                    self.readers.setdefault(name, []).append((node, slot))

    def slots(self, name: str, through: frozenset[str] = VIEWS) -> frozenset[tuple[str, int]]:
        """(operator, operand) of every use of a value, seen through the operators `through`."""
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
        """True if a value is read where operators take weights."""
        return any(
            slot in WEIGHT_SLOTS.get(operator, frozenset()) for operator, slot in self.slots(name)
        )


def scope_of(node: onnx.NodeProto) -> str:
    """The module that a node of the older exporter is a part of; "" for an Identity, which is in
    none.
    """
    return "/".join(NUMBERED.sub("", each) for each in node.name.split("/")[:-1])
