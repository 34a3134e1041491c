"""Types of weights that a file names but does not hold, from the operators that read them.

An export without weights states the types of activations only. What reads a weight and what comes out of it tell the
weight's shape: a product's operand and result, a scale's last dimension. The number of rows of an embedding cannot be
told from its use; it is taken from the logits, the last dimension of an output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Attribute, Value
from autopipe.passes.frontend.elements import attributes_of
from autopipe.passes.frontend.uses import Uses

if TYPE_CHECKING:
    import onnx


MOST_STEPS = 32
"""Transpositions and casts between a weight and the operator that tells its type."""


@dataclass(frozen=True, slots=True)
class MissingWeightTypes:
    """Deduces the types of absent weights."""

    uses: Uses
    type_of: Callable[[str], Value | None]
    """The type of a value as computed so far or as the file states it."""
    outputs: tuple[str, ...]

    def deduced(self, name: str) -> Value:
        """The type of the weight `name`; raises ModelError where its uses do not tell it."""
        readers = self.uses.readers[name]
        for node, slot in readers:
            found = self._from_reader(node, slot)
            if found is not None:
                return Value(name, found.dtype, found.shape)
        node = readers[0][0]
        raise ModelError(
            f"it reads {name!r}, which nothing writes and whose shape cannot be told",
            hint="export with the weights' types in value_info",
            where=f"{node.op_type} {node.name!r}",
        )

    def _from_reader(self, node: onnx.NodeProto, slot: int, steps: int = MOST_STEPS) -> Value | None:
        """The type of operand `slot` of a node, its name meaningless; `steps` operators behind it may be looked at."""
        if not steps:
            return None
        result = self.type_of(node.output[0])
        match node.op_type, slot:
            case "Transpose", 0:
                return self._transposed(node, steps - 1)
            case (("Identity" | "Cast"), 0):
                if result is not None:
                    return result
                found = (self._from_reader(reader, at, steps - 1) for reader, at in self._readers(node))
                return next((type_ for type_ in found if type_ is not None), None)
            case _ if result is None:
                return None
            case (("Mul" | "Add" | "Div" | "Sub"), _):
                return Value("", result.dtype, result.shape[-1:])
            case (("LayerNormalization" | "RMSNormalization"), (1 | 2)):
                axis = _integer(dict(attributes_of(node)), "axis", -1)
                return Value("", result.dtype, result.shape[axis:])
            case (("MatMul" | "Gemm" | "Conv"), _):
                return self._factor(node, slot, result)
            case "Gather", 0:
                return self._table(node, result)
        return None

    def _readers(self, node: onnx.NodeProto) -> tuple[tuple[onnx.NodeProto, int], ...]:
        return self.uses.readers.get(node.output[0], ())

    def _transposed(self, node: onnx.NodeProto, steps: int) -> Value | None:
        for reader, slot in self._readers(node):
            found = self._from_reader(reader, slot, steps)
            if found is None:
                continue
            reverse = tuple(reversed(range(len(found.shape))))
            order = next((tuple(each.ints) for each in node.attribute if each.name == "perm"), reverse)
            shape = [0] * len(found.shape)
            for position, axis in enumerate(order):
                shape[axis] = found.shape[position]
            return Value("", found.dtype, tuple(shape))
        return None

    def _factor(self, node: onnx.NodeProto, slot: int, result: Value) -> Value | None:
        """The weight of a product or convolution: from what it is multiplied with and what comes out."""
        stated = dict(attributes_of(node))
        if slot == 2:
            return Value("", result.dtype, (result.shape[1 if node.op_type == "Conv" else -1],))
        other = self.type_of(node.input[0])
        if slot != 1 or other is None:
            return None
        if node.op_type == "MatMul":
            return Value("", result.dtype, (other.shape[-1], result.shape[-1]))
        if node.op_type == "Gemm":
            inner = other.shape[0 if stated.get("transA") else 1]
            shape = (inner, result.shape[1])
            return Value("", result.dtype, shape[::-1] if stated.get("transB") else shape)
        kernel = stated.get("kernel_shape")
        if not isinstance(kernel, tuple):
            return None
        window = tuple(int(extent) for extent in kernel)
        return Value("", result.dtype, (result.shape[1], other.shape[1] // _integer(stated, "group", 1), *window))

    def _table(self, node: onnx.NodeProto, result: Value) -> Value | None:
        indices = self.type_of(node.input[1])
        if indices is None or _integer(dict(attributes_of(node)), "axis", 0):
            return None
        for name in self.outputs:
            logits = self.type_of(name)
            if logits is not None and logits.dtype.is_floating and len(logits.shape) >= 2:
                return Value("", result.dtype, (logits.shape[-1], *result.shape[len(indices.shape) :]))
        return None


def _integer(stated: dict[str, Attribute], name: str, default: int) -> int:
    found = stated.get(name, default)
    return found if isinstance(found, int) else default
