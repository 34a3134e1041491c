"""Types of what one node writes, and its numbers where all it reads is known: ONNX's own inference and evaluator.

Both are asked once for each distinct use, since layers of a model repeat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Value
from autopipe.ir.ops import OPERATORS
from autopipe.passes.frontend.effort import MOST_OPERATIONS, Budget, operations_of
from autopipe.passes.frontend.elements import dtype_of, shape_of, tensor_of, type_proto
from autopipe.passes.frontend.evaluate import told_by_formula
from autopipe.passes.frontend.rules import told_by_rule

if TYPE_CHECKING:
    import onnx

Type = Value
"""A value whose name does not matter."""
Operand = tuple[Value | None, np.ndarray | None]
"""Type and numbers of an operand; (None, None) where it is absent, no numbers where they are not known."""

KNOWN_LIMIT = 4096
"""Elements up to which an operand's numbers are shown to shape inference: those that tell shapes are few."""
_HASHED = 4
"""Elements that are looked up in the time of one operation."""
RANDOM = frozenset(row.name for row in OPERATORS.values() if row.random)
"""Operators whose result is drawn anew each time: nothing is known of it, and two equal nodes give different ones."""


@dataclass(frozen=True, slots=True)
class Inference:
    """Shape inference and evaluation under the operator sets of one file."""

    opsets: tuple[tuple[str, int], ...]
    _types: dict[object, tuple[Value | None, ...]] = field(default_factory=dict, repr=False, compare=False)
    operations: Budget = field(default_factory=lambda: Budget(MOST_OPERATIONS), repr=False, compare=False)
    _results: dict[object, tuple[np.ndarray, ...] | None] = field(default_factory=dict, repr=False, compare=False)

    def types(self, node: onnx.NodeProto, operands: tuple[Operand, ...]) -> tuple[Value | None, ...]:
        """Types of the results, None for those that are absent or cannot be told.

        The node's operands are named by position in what is inferred, so names in `operands` do not matter. Raises
        ModelError where the operands' shapes do not fit the operator.
        """
        key = (*_form(node), _key(operands))
        if key not in self._types:
            self._types[key] = self._infer(_anonymous(node), operands, f"{node.op_type} {node.name!r}")
        return self._types[key]

    def evaluate(
        self, node: onnx.NodeProto, operands: tuple[np.ndarray | None, ...], types: Sequence[Value | None]
    ) -> tuple[np.ndarray, ...] | None:
        """The numbers of results of these `types`; None where the evaluator cannot tell them, or takes too long."""
        if not self.operations.takes(sum(each.size for each in operands if each is not None) // _HASHED):
            return None
        parts = tuple(None if each is None else (each.dtype.str, each.shape, _content(each)) for each in operands)
        key = (*_form(node), parts)
        if key not in self._results:
            affordable = self.operations.takes(operations_of(node, operands, types))
            self._results[key] = self._run(_anonymous(node), operands) if affordable else None
        return self._results[key]

    def _infer(self, node: onnx.NodeProto, operands: tuple[Operand, ...], where: str) -> tuple[Value | None, ...]:
        import onnx
        import onnx.checker
        import onnx.defs
        import onnx.shape_inference

        opsets = dict(self.opsets)
        nothing: tuple[Value | None, ...] = (None,) * len(node.output)
        told = told_by_rule(node, tuple(value for value, _ in operands), where)
        if told is not None:
            for value in filter(None, told):
                shape_of(value.shape, where)
            return told
        try:
            schema = onnx.defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain)
        except onnx.defs.SchemaError:
            return nothing
        named = zip(node.input, operands, strict=True)
        known = [(name, value, array) for name, (value, array) in named if name and value is not None]
        try:
            found = onnx.shape_inference.infer_node_outputs(
                schema,
                node,
                {name: type_proto(value) for name, value, _ in known},
                {
                    name: tensor_of(array, value.dtype)
                    for name, value, array in known
                    if array is not None and array.size <= KNOWN_LIMIT
                },
                opset_imports=[onnx.OperatorSetIdProto(domain=name, version=version) for name, version in self.opsets],
            )
        except onnx.shape_inference.InferenceError as error:
            shapes = ", ".join(str(value.shape) for _, value, _ in known)
            reason = str(error).strip().splitlines()[-1].strip()
            raise ModelError(f"the shapes {shapes} do not fit: {reason}", where=where) from error
        except onnx.checker.ValidationError as error:
            raise ModelError(f"not a valid use: {str(error).splitlines()[0]}", where=where) from error
        except (RuntimeError, ValueError, KeyError):
            return nothing
        return tuple(_static(found[name], where) if name in found else None for name in node.output)

    def _run(self, node: onnx.NodeProto, operands: tuple[np.ndarray | None, ...]) -> tuple[np.ndarray, ...] | None:
        with np.errstate(all="ignore"):
            results = told_by_formula(node, operands) or self._evaluated(node, operands)
        if results is None:
            return None
        arrays = [np.ascontiguousarray(result).reshape(np.shape(result)) for result in results]
        return tuple(arrays) if all(array.dtype.kind in "biufcV" for array in arrays) else None

    def _evaluated(self, node: onnx.NodeProto, operands: tuple[np.ndarray | None, ...]) -> Sequence[np.ndarray] | None:
        """Evaluate a node by ONNX's own evaluator, which loads every operator there is."""
        from onnx.reference import ReferenceEvaluator

        feeds = {name: array for name, array in zip(node.input, operands, strict=True) if name and array is not None}
        try:
            found = ReferenceEvaluator(node, opsets=dict(self.opsets)).run(None, feeds)
        except Exception:  # noqa: BLE001 - the evaluator raises anything; a node it cannot take is simply not folded
            return None
        return [*found]


def _content(array: np.ndarray) -> bytes:
    """The bytes of an array, or what tells them from others."""
    content = array.tobytes()
    return content if len(content) <= KNOWN_LIMIT else hashlib.sha256(content).digest()


def _form(node: onnx.NodeProto) -> tuple[object, ...]:
    """Signature of a node, but for the names of its values: which of them are equal, and which are absent."""
    places: dict[str, int] = {}
    operands = tuple(places.setdefault(name, len(places)) if name else None for name in node.input)
    attributes = tuple(sorted(each.SerializeToString(deterministic=True) for each in node.attribute))
    return node.domain, node.op_type, operands, tuple(map(bool, node.output)), attributes


def _anonymous(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node with values named by position (one name for one value) and nothing else that tells it from its like."""
    import onnx

    names: dict[str, str] = {}
    found = onnx.NodeProto(op_type=node.op_type, domain="" if node.domain == "ai.onnx" else node.domain)
    found.input.extend(names.setdefault(name, f"i{len(names)}") if name else "" for name in node.input)
    found.output.extend(f"o{index}" if name else "" for index, name in enumerate(node.output))
    found.attribute.extend(sorted(node.attribute, key=lambda each: each.name))
    return found


def _key(operands: tuple[Operand, ...]) -> object:
    return tuple(
        None
        if value is None
        else (value.dtype, value.shape, array.tobytes() if array is not None and array.size <= KNOWN_LIMIT else None)
        for value, array in operands
    )


def _static(found: onnx.TypeProto, where: str) -> Value | None:
    if not found.HasField("tensor_type"):
        raise ModelError("sequences, optional values and maps are not supported", where=where)
    tensor = found.tensor_type
    if not tensor.HasField("shape") or any(not dimension.HasField("dim_value") for dimension in tensor.shape.dim):
        return None
    shape = shape_of([dimension.dim_value for dimension in tensor.shape.dim], where)
    if any(extent < 0 for extent in shape):
        return None
    return Value("", dtype_of(tensor.elem_type, where), shape)
