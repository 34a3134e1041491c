"""Which values are parameters: weights, buffers, and what is merely a number in the graph.

ONNX does not say. A floating-point tensor of the file is a weight unless it is a scalar, a running statistic, a table
of angles, or a constant that an exporter lifted out of the graph. A ConstantOfShape node that feeds a slot where
operators take weights is a weight too (the models that ship with onnx are made so), and so is a name that nothing
writes (an export without weights).
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.ops import OPERATORS

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
STATISTICS = frozenset({("BatchNormalization", 3), ("BatchNormalization", 4)})
VIEWS = frozenset({"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Cast"})
"""Operators through which a weight may pass on its way."""
ANGLES = frozenset({"Sin", "Cos"})
ANGLE_STEPS = VIEWS | {"Expand", "Mul", "MatMul", "Concat", "Einsum", "Slice"}
LIFTED = re.compile(r"_?val_\d+|onnx::\w+|(c_)?lifted_tensor\w*|_tensor_constant\d*")
"""Names that torch's exporters give to constants and to what they folded, weights included."""
SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
"""The graph's metadata in which torch's exporter tells parameters from buffers."""
SIGNED = re.compile(r"^\w+: (PARAMETER|BUFFER) target='([^'\n]+)'", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Uses:
    """Who reads each value of a file."""

    readers: Mapping[str, tuple[tuple[onnx.NodeProto, int], ...]]

    @classmethod
    def of(cls, nodes: Iterable[onnx.NodeProto]) -> Uses:
        """Collect the readers: node and position of the operand."""
        readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in nodes:
            for slot, name in enumerate(node.input):
                if name:
                    readers.setdefault(name, []).append((node, slot))
        return cls({name: tuple(found) for name, found in readers.items()})

    def slots(self, name: str, through: frozenset[str] = VIEWS) -> frozenset[tuple[str, int]]:
        """(operator, operand) of every use of a value, seen through the operators `through`."""
        found: set[tuple[str, int]] = set()
        seen, waiting = {name}, [name]
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
        """Whether a value is read where operators take weights."""
        return any(slot in WEIGHT_SLOTS.get(operator, frozenset()) for operator, slot in self.slots(name))

    def is_static(self, name: str) -> bool:
        """Whether an operator must know the value while compiling: Resize its scales."""
        return any(operator in OPERATORS and slot in OPERATORS[operator].static for operator, slot in self.slots(name))


@dataclass(frozen=True, slots=True)
class Roles:
    """Tells parameters from constants among a file's floating-point tensors, and weights from buffers."""

    uses: Uses
    stated: frozenset[str] | None
    """The weights' names where the file itself says (its metadata `autopipe.parameters`)."""
    signed: frozenset[str]
    """Names that torch's exporter says are weights; empty where it says nothing."""
    buffers: frozenset[str]
    """Names that it says are none."""
    frozen: tuple[str, ...]
    """Names that shall not be trained: globs, or regular expressions after `re:`."""

    def is_constant(self, name: str, rank: int, elements: int) -> bool:
        """Whether a floating-point tensor of the file is a number in the graph rather than a parameter."""
        if self.stated is not None:
            return name not in self.stated
        if rank == 0 or self.uses.is_static(name):
            return True
        return bool(LIFTED.fullmatch(name)) and (elements == 1 or not self.uses.is_weight(name))

    def is_trainable(self, name: str) -> bool:
        """Whether a parameter is a weight rather than a buffer."""
        if any(_matches(name, pattern) for pattern in self.frozen):
            return False
        if self.uses.slots(name) & STATISTICS:
            return False  # Whatever the file states: running statistics follow the data, not a gradient.
        if self.stated is not None:
            return name in self.stated
        if name in self.buffers:
            return False
        ends = self.uses.slots(name, ANGLE_STEPS)
        return not ends or not all(operator in ANGLES for operator, _ in ends)


def roles_of(nodes: tuple[onnx.NodeProto, ...], metadata: Mapping[str, str], frozen: tuple[str, ...]) -> Roles:
    """The roles in a file; raises ModelError where its own statement of parameters is not a list of names."""
    signature = SIGNED.findall(metadata.get(SIGNATURE, ""))
    signed = frozenset(name for kind, name in signature if kind == "PARAMETER")
    buffers = frozenset(name for kind, name in signature if kind == "BUFFER")
    return Roles(Uses.of(nodes), _stated(metadata), signed, buffers, frozen)


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], name) is not None
        except re.error as error:
            raise ConfigurationError(f"model.frozen: {pattern!r} is no regular expression: {error}") from error
    return fnmatch.fnmatchcase(name, pattern)


def _stated(metadata: Mapping[str, str]) -> frozenset[str] | None:
    text = metadata.get("autopipe.parameters")
    if text is None:
        return None
    try:
        names = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelError("its metadata 'autopipe.parameters' is no JSON") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError("its metadata 'autopipe.parameters' is no list of names")
    return frozenset(names)
