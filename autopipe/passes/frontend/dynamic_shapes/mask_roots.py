"""Finds masks of a file that have equal elements. Exporters write one comparison, or one mask with
other dimensions, several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.graph import DType, Value
from autopipe.ir.ops import operators_with
from autopipe.passes.frontend.inference import cached_content, node_key

if TYPE_CHECKING:
    import onnx

_VIEWS = operators_with(lambda row: row.same_elements)
"""Operators that keep all elements and their row-major order."""
_MASK_OPERATORS = operators_with(lambda row: row.mask) | {
    "Gather",
    "ReduceMax",
    "ReduceSum",
    "Slice",
}
"""Operators from which files compute masks. With equal operands they give equal results."""
_ROUNDING = frozenset({"Ceil", "Floor", "Round"})
_MAX_DEPTH = 8
"""Maximum number of nodes before a mask that are compared with other nodes of the file."""


class MaskRoots:
    """Finds values of a file with equal elements, among masks and among integers that bound a
    Range. It records the nodes that produce these values.
    """

    def __init__(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """`nodes` are all nodes of the file."""
        operators = _VIEWS | _MASK_OPERATORS | _ROUNDING | {"Cast", "Expand", "Mul"}
        self._producers = {
            node.output[0]: node
            for node in nodes
            if node.op_type in operators and len(node.output) == 1
        }
        self._roots: dict[str, str] = {}
        self._first_equal: dict[object, str] = {}

    def source_of_expand(self, name: str) -> str:
        """Return the name of the operand of the Expand that produces the value `name`; "" if no
        Expand does.
        """
        node = self._producers.get(name)
        return node.input[0] if node is not None and node.op_type == "Expand" else ""

    def root(
        self,
        name: str,
        types: Mapping[str, Value],
        arrays: Mapping[str, np.ndarray],
        depth: int = _MAX_DEPTH,
    ) -> str:
        """Return the root of the value `name`: the first value found in the file whose elements, in
        row-major order, are equal. It can be `name` itself. At most `depth` nodes before the value
        are followed.

        `types` has the types of static values, and `arrays` the elements of those that are known
        before running.
        """
        if name not in self._roots:
            self._roots[name] = self._find_root(name, types, arrays, depth)
        return self._roots[name]

    def integer_root(
        self, name: str, types: Mapping[str, Value], arrays: Mapping[str, np.ndarray]
    ) -> str:
        """Return the first value found in the file that is equal to the integer `name`; it can have
        another integer type or shape. `types` has the types of static values, and `arrays` the
        elements of those that are known before running.
        """
        node = self._producers.get(name)
        while node is not None and (node.op_type == "Cast" or _is_single_element(node, types)):
            source = types.get(node.input[0])
            if source is None or not source.dtype.is_integer:
                break
            name = node.input[0]
            node = self._producers.get(name)
        return self.root(name, types, arrays)

    def known_divisor(
        self, name: str, types: Mapping[str, Value], arrays: Mapping[str, np.ndarray]
    ) -> int:
        """Return a positive integer that is known to divide the scalar `name`, because the file
        computes it as the product of that constant and an integer; 1 if it is no such product.
        """
        node = self._producer_of_scalar(name, types)
        if node is None or node.op_type != "Mul":
            return 1
        known = [arrays[each] for each in node.input if each in arrays]
        producers = [
            self._producer_of_scalar(each, types) for each in node.input if each not in arrays
        ]
        has_integer_type = any(
            each in types and types[each].dtype.is_integer for each in node.input
        )
        if len(known) != 1 or known[0].size != 1:
            return 1
        if not has_integer_type and not (producers[0] and producers[0].op_type in _ROUNDING):
            return 1
        factor = float(known[0].reshape(()))
        return int(factor) if factor.is_integer() and factor >= 1 else 1

    def _producer_of_scalar(self, name: str, types: Mapping[str, Value]) -> onnx.NodeProto | None:
        """Return the node that computes the scalar `name`. Casts, views, and gathers from an
        operand with a single element are skipped: the node before them is returned. None if its
        operator is not one that computes masks or bounds of a Range.
        """
        node = self._producers.get(name)
        while node is not None and (node.op_type == "Cast" or _is_single_element(node, types)):
            node = self._producers.get(node.input[0])
        return node

    def _find_root(
        self, name: str, types: Mapping[str, Value], arrays: Mapping[str, np.ndarray], depth: int
    ) -> str:
        """Return the root of the value `name`: the first value found in the file whose elements, in
        row-major order, are equal. The node that produces `name`, and up to `depth` nodes before
        it, are compared with the nodes seen so far.
        """
        node = self._producers.get(name)
        if node is None or not depth:
            return name
        source = types.get(node.input[0])
        keeps_elements = node.op_type in _VIEWS or (
            node.op_type == "Cast" and source is not None and source.dtype is DType.BOOL
        )
        if keeps_elements and source is not None:
            return self.root(node.input[0], types, arrays, depth - 1)
        if node.op_type not in _MASK_OPERATORS:
            return name
        operands = []
        for each in node.input:
            known = arrays.get(each)
            content = (
                self.root(each, types, arrays, depth - 1)
                if known is None
                else cached_content(known)
            )
            operands.append((types[each].shape if each in types else None, content))
        return self._first_equal.setdefault((*node_key(node), *operands), name)


def _is_single_element(node: onnx.NodeProto, types: Mapping[str, Value]) -> bool:
    """True if the node is a view of its operand (all elements in row-major order), or gathers from
    an operand with one element.
    """
    source = types.get(node.input[0])
    is_only_element = node.op_type == "Gather" and source is not None and source.elements == 1
    return node.op_type in _VIEWS or is_only_element
