"""Number of operators that PyTorch's older exporter (TorchScript) folded into a tensor. It is
derived from the numbers in tensor names.

The exporter numbers the values of its graph: inputs, parameters, then results of nodes. It
evaluates operators on parameters (folding) in order, and gives each result the next number. If the
number of a folded tensor is one more than the number of the previous folded tensor, exactly one
operator was therefore folded into the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from autopipe.passes.frontend.merged_parameters import NAMESAKE
from autopipe.passes.frontend.uses import LIFTED

if TYPE_CHECKING:
    import onnx

NUMBERED: Final = re.compile(r"onnx::\w+_(\d+)")
"""Pattern of the names of tensors that the exporter computed from parameters (folded). The group is
the number.
"""
WITHOUT_SHAPES: Final = frozenset(
    {
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Neg",
        "Pow",
        "Sqrt",
        "Exp",
        "MatMul",
        "Gemm",
        "Conv",
        "Tanh",
        "Relu",
        "Sigmoid",
        "Erf",
        "Gelu",
        "Softplus",
        "LeakyRelu",
        "Elu",
        "PRelu",
        "LayerNormalization",
        "Softmax",
        "ReduceMean",
        "Constant",
        "Identity",
        "Dropout",
    }
)
"""ONNX operators without operands that an exporter computes from shapes."""
OF_CONSTANT_AXES: Final = frozenset(
    {"Squeeze", "Unsqueeze", "Transpose", "Flatten", "ReduceSum", "ReduceMean"}
)
"""ONNX operators without operands that an exporter computes from shapes, provided that the PyTorch
module gives their axes as constants.
"""


@dataclass(frozen=True)
class FoldNumbers:
    """The numbers in the names of the folded tensors of a file (tensors that the exporter computed
    from parameters), and the order in which nodes read these tensors.
    """

    nodes: Sequence[onnx.NodeProto]
    held: Collection[str]
    """Names of all initializers of the file."""
    inputs: int
    """Number of the graph's inputs."""

    @cached_property
    def _by_number(self) -> dict[int, str]:
        """Names of the folded tensors by their numbers, in ascending order."""
        merged = [
            node.output[0]
            for node in self.nodes
            if node.op_type == "Identity" and node.input[0] in self.held
        ]
        names = {name.removesuffix(NAMESAKE) for name in (*self.held, *merged)}
        found = {int(match[1]): name for name in names if (match := NUMBERED.fullmatch(name))}
        return dict(sorted(found.items()))

    @cached_property
    def _first_readers(self) -> dict[str, int]:
        """Position of the first node that reads each value. An Identity is not counted; the readers
        of its result are.
        """
        found: dict[str, int] = {}
        for position, node in enumerate(self.nodes):
            for name in node.input if node.op_type != "Identity" else ():
                found.setdefault(name, position)
        for node in self.nodes:
            if node.op_type == "Identity" and node.output[0] in found:
                position = found[node.output[0]]
                found[node.input[0]] = min(position, found.get(node.input[0], position))
        return found

    def count_operators(self, name: str) -> int | None:
        """Return the number of operators that were folded into the tensor `name`; None if the
        numbers do not determine it.

        The count is the difference to the number of the previous folded tensor, if no other value
        can have a number in between. For the first folded tensor, the expected number assumes that
        every folded tensor is the result of one operator on one parameter. A larger number is only
        conclusive if no node has operands that are computed from shapes.
        """
        match = NUMBERED.fullmatch(name)
        if match is None:
            return None
        number = int(match[1])
        before = max((each for each in self._by_number if each < number), default=None)
        if before is None:
            more = number - self._expected_value_count()
            is_counted = all(
                node.op_type in WITHOUT_SHAPES | OF_CONSTANT_AXES for node in self.nodes
            )
            return 1 + max(more, 0) if not more or is_counted else None
        distance = number - before
        # If the distance exceeds 1, folded shapes of a Reshape or Split between the readers of the
        # two tensors may also use up numbers. The distance is then valid only if there is no such
        # node.
        if distance == 1 or self._is_next_fold(self._by_number[before], name):
            return distance
        return None

    def _is_next_fold(self, before: str, name: str) -> bool:
        """True if no node between the first reader of the tensor `before` and the first reader of
        the tensor `name` has operands that an exporter computes from shapes. False if the readers
        are not in this order.
        """
        first = self._first_readers.get(before)
        last = self._first_readers.get(name)
        if first is None or last is None or first >= last:
            return False
        return all(node.op_type in WITHOUT_SHAPES for node in self.nodes[first + 1 : last])

    def _expected_value_count(self) -> int:
        """Return the expected number of values in the exporter's graph: inputs, named tensors and
        results of nodes, plus one parameter and one result for each folded tensor.
        """
        named = [name for name in self.held if not LIFTED.fullmatch(name)]
        results = [
            name
            for node in self.nodes
            if node.op_type != "Identity"
            for name in node.output
            if name
        ]
        return self.inputs + len(named) + 2 * len(self._by_number) + len(results)
