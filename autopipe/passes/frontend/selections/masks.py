"""Which masks are one: a file writes the same comparison, or the same elements in other dimensions,
again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.graph import DType, Value
from autopipe.passes.frontend.inference import content_of, form_of

if TYPE_CHECKING:
    import onnx

_REWRITTEN = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that leave elements and their order."""
_COMPARED = (
    "And Equal Gather Greater GreaterOrEqual IsNaN Less LessOrEqual Not Or ReduceMax ReduceSum "
    "Slice Xor"
)
_COMPARING = frozenset(_COMPARED.split())
"""Operators that masks are made of, which give the same where they read the same."""
_WHOLE = frozenset({"Ceil", "Floor", "Round"})
_DEPTH = 8
"""Operators that are compared, one behind the other."""


class Masks:
    """Where the masks of a file come from."""

    def __init__(self, nodes: Iterable[onnx.NodeProto]) -> None:
        kinds = _REWRITTEN | _COMPARING | _WHOLE | {"Cast", "Expand", "Mul"}
        self._made = {
            node.output[0]: node
            for node in nodes
            if node.op_type in kinds and len(node.output) == 1
        }
        self._roots: dict[str, str] = {}
        self._same: dict[object, str] = {}

    def broadcast_from(self, name: str) -> str:
        """The value that Expand makes another of; "" for other values."""
        node = self._made.get(name)
        return node.input[0] if node is not None and node.op_type == "Expand" else ""

    def root(
        self,
        name: str,
        types: Mapping[str, Value],
        arrays: Mapping[str, np.ndarray],
        depth: int = _DEPTH,
    ) -> str:
        """The first value of the file whose elements, in their order, are those of `name`: true
        where they are.
        """
        if name not in self._roots:
            self._roots[name] = self._find(name, types, arrays, depth)
        return self._roots[name]

    def number(
        self, name: str, types: Mapping[str, Value], arrays: Mapping[str, np.ndarray]
    ) -> str:
        """The first value of the file that is the same whole number as `name`, in whichever
        type.
        """
        node = self._made.get(name)
        while node is not None and (node.op_type == "Cast" or _hands_on(node, types)):
            source = types.get(node.input[0])
            if source is None or not source.dtype.is_integer:
                break
            name = node.input[0]
            node = self._made.get(name)
        return self.root(name, types, arrays)

    def factor(
        self, name: str, types: Mapping[str, Value], arrays: Mapping[str, np.ndarray]
    ) -> int:
        """A whole number whose multiple the file makes of another one; 1 where it makes none."""
        node = self._seen_through(name, types)
        if node is None or node.op_type != "Mul":
            return 1
        known = [arrays[each] for each in node.input if each in arrays]
        made = [self._seen_through(each, types) for each in node.input if each not in arrays]
        whole = [each for each in node.input if each in types and types[each].dtype.is_integer]
        if (
            len(known) != 1
            or known[0].size != 1
            or not (whole or (made[0] and made[0].op_type in _WHOLE))
        ):
            return 1
        factor = float(known[0].reshape(()))
        return int(factor) if factor.is_integer() and factor >= 1 else 1

    def _seen_through(self, name: str, types: Mapping[str, Value]) -> onnx.NodeProto | None:
        """The node that makes a number, before its type and dimensions were changed."""
        node = self._made.get(name)
        while node is not None and (node.op_type == "Cast" or _hands_on(node, types)):
            node = self._made.get(node.input[0])
        return node

    def _find(
        self, name: str, types: Mapping[str, Value], arrays: Mapping[str, np.ndarray], depth: int
    ) -> str:
        node = self._made.get(name)
        if node is None or not depth:
            return name
        source = types.get(node.input[0])
        handed = node.op_type in _REWRITTEN or (
            node.op_type == "Cast" and source is not None and source.dtype is DType.BOOL
        )
        if handed and source is not None:
            return self.root(node.input[0], types, arrays, depth - 1)
        if node.op_type not in _COMPARING:
            return name
        read = []
        for each in node.input:
            type_ = types.get(each)
            shape = None if type_ is None else type_.shape
            known = arrays.get(each)
            read.append(
                (
                    shape,
                    self.root(each, types, arrays, depth - 1)
                    if known is None
                    else content_of(known),
                )
            )
        return self._same.setdefault((*form_of(node), *read), name)


def _hands_on(node: onnx.NodeProto, types: Mapping[str, Value]) -> bool:
    """True for a node that gives its operand's only number."""
    source = types.get(node.input[0])
    return node.op_type in _REWRITTEN or (
        node.op_type == "Gather" and source is not None and source.elements == 1
    )
