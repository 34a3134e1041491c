"""The graph that fusion rules match against, with helpers that recognise parts of patterns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopipe.ir.graph import DType, Fill, Graph, Node
from autopipe.passes.frontend.elements import scalar_array
from autopipe.passes.frontend.inference import ConstantFolder
from autopipe.passes.frontend.rewriter import GraphEdit

MAX_STEPS = 32
"""Maximum number of nodes that a helper walks back. Without a limit, rules would take O(n²) on a
chain of n multiplications.
"""


@dataclass(slots=True)
class PartialMixture:
    """A mixture of experts (a sum over experts) of which the terms of some experts are matched so
    far.
    """

    common: tuple[object, ...]
    """The values and settings that all experts of the mixture must share."""
    experts: dict[int, tuple[str, ...]]
    """The names of the matrices of each expert, by the expert's number."""


class View(GraphEdit):
    """A graph, and the values that rules add to it. Rules are applied to the nodes in order, so the
    nodes before the current one are replaced already.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.known = ConstantFolder(graph)
        self.readers = Counter(
            (*(name for node in graph.nodes for name in node.inputs if name), *graph.outputs)
        )
        """How often each value is read; an output of the graph counts as one read."""
        self.writers: dict[str, Node] = {}
        """The node that writes each value, after the replacements so far."""
        self.masks: dict[str, str] = {}
        """Results of `scores.kind_of_mask`, by mask."""
        self.sums: dict[str, PartialMixture] = {}
        """Mixtures of experts of which some experts are matched, by the name of the sum so far."""
        self._shared: dict[str, str] = {}

    def array(self, name: str) -> np.ndarray | None:
        """Return the data of a value that depends on no input and no parameter; None for other
        values, and if computing the data would be too expensive.
        """
        return self.known.array(name)

    def shape_constant(self, shape: tuple[int, ...]) -> str:
        """Return the name of a constant int64 vector with the sizes of `shape`. Equal shapes share
        one constant.
        """
        key = "shape_" + "x".join(map(str, shape))
        return self._constant(key, lambda: np.asarray(shape, np.int64), DType.INT64)

    def number_constant(self, number: float, dtype: DType) -> str:
        """Return the name of a scalar constant. Equal numbers of one type share one constant."""
        key = f"{dtype.value}_{number!r}"
        return self._constant(key, lambda: scalar_array(number, dtype), dtype)

    def _constant(self, key: str, array: Callable[[], np.ndarray], dtype: DType) -> str:
        """Return the name of the constant that was added under `key`; the first call adds it with
        the data that `array` returns.
        """
        if key not in self._shared:
            self._shared[key] = self.constant(key, array(), dtype)
        return self._shared[key]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.type_of(name).shape

    def producer_of(self, name: str, *operators: str) -> Node | None:
        """Return the node that writes `name` as its first result, if its operator is one of the
        standard ONNX `operators`; otherwise None.
        """
        node = self.writers.get(name)
        if node is None or node.domain or node.op not in operators or node.outputs[0] != name:
            return None
        return node

    def producer_chain(self, name: str, *operators: str) -> tuple[Node, ...]:
        """Return the chain of nodes that ends at the value `name`, last node first: each node after
        the first writes the first operand of the node before it in the tuple.

        `operators` has the operator of each node, or alternatives joined by "|". () if a node has
        another operator.
        """
        found: list[Node] = []
        for operator in operators:
            node = self.producer_of(name, *operator.split("|"))
            if node is None:
                return ()
            found.append(node)
            name = node.inputs[0]
        return tuple(found)

    def scalar(self, name: str) -> float | None:
        """Return the number that a constant of one element has; None for other values, and for
        booleans and complex numbers.
        """
        constant = self.graph.constant(name)
        if constant is None or constant.array.size != 1 or constant.array.dtype.kind in "bc":
            return None
        return float(constant.array.reshape(-1)[0])

    def is_zero(self, name: str) -> bool:
        """True if all elements of a value are known to be 0: the value is a constant, a frozen
        parameter filled with zeros, the result of ConstantOfShape, or an expanded constant.
        """
        node = self.producer_of(name, "ConstantOfShape", "Expand")
        if node is not None and node.op == "ConstantOfShape":
            return node.number("value") == 0
        parameter = self.graph.parameter(name)
        if parameter is not None:
            return not parameter.trainable and parameter.storage == Fill(0.0)
        constant = self.graph.constant(name if node is None else node.inputs[0])
        return constant is not None and not constant.array.any()

    def skip_casts(self, name: str) -> str:
        """Return the name of the value before casts between floating-point types, which exports of
        half-precision models contain; `name` if there are none.
        """
        for _ in range(MAX_STEPS):
            node = self.producer_of(name, "Cast")
            if node is None or not all(
                self.type_of(each).dtype.is_floating for each in (node.inputs[0], name)
            ):
                break
            name = node.inputs[0]
        return name

    def split_scale(self, name: str) -> tuple[float, str]:
        """Return (c, x) with value = c · x, where c collects multiplications and divisions by
        constants of one element; (1, `name`) if there are none.
        """
        coefficient = 1.0
        for _ in range(MAX_STEPS):
            node = self.producer_of(name, "Mul", "Div")
            if node is None:
                break
            left, right = node.inputs
            number = self.scalar(right)
            if number is None and node.op == "Mul":
                number = self.scalar(left)
                left = right
            if number is None or number == 0 or self.shape(left) != self.shape(name):
                break
            coefficient *= number if node.op == "Mul" else 1 / number
            name = left
        return coefficient, name

    def split_factors(self, name: str) -> tuple[float, tuple[str, ...]]:
        """Return (c, factors) with value = c · factor₁ · factor₂ ⋯. Constants of one element are
        collected in c; the names of the other factors are sorted.

        Squares and cubes (Pow) count as repeated factors. An inner product that is read more than
        once is one factor.
        """
        coefficient = 1.0
        factors = []
        waiting = [name]
        steps = 0
        while waiting:
            top = waiting.pop()
            steps = steps + 1
            number = self.scalar(top)
            inside = steps <= MAX_STEPS and (top == name or self.readers[top] == 1)
            node = self.producer_of(top, "Mul", "Div", "Pow") if inside else None
            operand = self.scalar(node.inputs[1]) if node is not None else None
            if number is not None:
                coefficient *= number
            elif node is not None and node.op == "Mul":
                waiting.extend(node.inputs)
            elif node is not None and node.op == "Div" and operand:
                coefficient /= operand
                waiting.append(node.inputs[0])
            elif node is not None and node.op == "Pow" and operand in (2.0, 3.0):
                factors.extend([node.inputs[0]] * int(operand))
            else:
                factors.append(top)
        return coefficient, tuple(sorted(factors))

    def split_addend(self, name: str) -> tuple[str, float]:
        """Return (x, c) if the value `name` is x + c for a constant c of one element; otherwise
        ("", NaN).
        """
        node = self.producer_of(name, "Add")
        for value, other in (node.inputs, node.inputs[::-1]) if node is not None else ():
            number = self.scalar(other)
            if number is not None:
                return value, number
        return "", math.nan

    def slice_source(self, name: str) -> tuple[str, range]:
        """Return (source, indices) with value = source[..., indices], if a Slice or Split along the
        last axis writes the value; otherwise the value itself and all indices of its last axis.
        """
        node = self.writers.get(name)
        everything = name, range(self.shape(name)[-1] if self.shape(name) else 0)
        if node is None or node.domain or node.op not in ("Slice", "Split"):
            return everything
        shape = self.shape(node.inputs[0])
        last_axis = (-1, len(shape) - 1)
        if node.op == "Split":
            if node.integer("axis") not in last_axis:
                return everything
            before = node.outputs[: node.outputs.index(name)]
            first = sum(self.shape(each)[-1] for each in before)
            return node.inputs[0], range(first, first + self.shape(name)[-1])
        operands = [self.array(each) for each in node.inputs[1:]]
        if len(operands) < 3 or any(each is None or each.size != 1 for each in operands):
            return everything
        numbers = [int(each.reshape(())) for each in operands if each is not None]
        start, end, axis, step = (*numbers, 1)[:4]
        if axis not in last_axis:
            return everything
        return node.inputs[0], range(*slice(start, end, step).indices(shape[axis]))

    def halved_source(self, first: str, second: str) -> tuple[str, bool]:
        """Return (x, interleaved): the value x of which `first` and `second` are the two halves
        along the last axis, or, if interleaved is true, the elements at even and at odd indices. x
        is "" if there is no such value.
        """
        (source, first_indices) = self.slice_source(first)
        (other, second_indices) = self.slice_source(second)
        size = self.shape(source)[-1] if source == other and self.shape(source) else 1
        if size % 2:
            return "", False
        indices = range(size)
        found = first_indices, second_indices
        if found == (indices[: size // 2], indices[size // 2 :]):
            return source, False
        return (source, True) if found == (indices[::2], indices[1::2]) else ("", False)


def is_near(number: float, expected: float) -> bool:
    """True if `number` equals `expected` within a relative difference of 0.001, which allows for
    constants of half-precision files.
    """
    return math.isclose(number, expected, rel_tol=1e-3)
