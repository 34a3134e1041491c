"""The readers of each value of a file, and the operand slots that hold weights."""

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
"""By operator, the operands that are weights if they do not depend on the inputs."""
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
"""(operator, operand) of scales, biases and slopes. All of their elements are equal in a new
layer.
"""
ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div"})
"""Operators that apply a scale or bias in layers for which ONNX has no operator."""
VIEWS = frozenset({"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Cast"})
"""Operators that may stand between a weight and the operator that uses it."""
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
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
