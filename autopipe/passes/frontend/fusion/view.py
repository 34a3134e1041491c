"""A graph as rules of fusion see it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from autopipe.ir.graph import Constant, DType, Fill, Graph, Node, Value
from autopipe.passes.frontend.elements import number_array
from autopipe.passes.frontend.inference import ConstantFolder

MOST_STEPS = 32
"""Multiplications that are looked back through: a chain of thousands would take the square of its
length.
"""


@dataclass(slots=True)
class MaskedSum:
    """A sum over experts so far: the matrices of each by its number, and what they have in
    common.
    """

    common: tuple[object, ...]
    experts: dict[int, tuple[str, ...]]


class View:
    """Graph as patterns see it: nodes before the current one are already rewritten."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known = ConstantFolder(graph)
        self.readers = Counter(
            (*(name for node in graph.nodes for name in node.inputs if name), *graph.outputs)
        )
        self.writers: dict[str, Node] = {}
        self.made: dict[str, Value] = {}
        """Values that rules have added to those of `graph`."""
        self.constants: dict[str, Constant] = {}
        """Constants that rules have added."""
        self.masks: dict[str, str] = {}
        """Positions hidden by the masks seen so far: see `_mask_kind`."""
        self.sums: dict[str, MaskedSum] = {}
        """Mixtures of experts that are added up so far, by the last sum."""

    def type_of(self, name: str) -> Value:
        return self.made.get(name) or self.graph.type_of(name)

    def add(self, name: str, dtype: DType, shape: tuple[int, ...]) -> str:
        """The name of a new value of this type."""
        while name in self.made or self.graph.has(name):
            name += "_"
        self.made[name] = Value(name, dtype, shape)
        return name

    def shape_constant(self, shape: tuple[int, ...]) -> str:
        """The name of a constant that holds a shape."""
        return self._constant(
            "shape_" + "x".join(map(str, shape)), np.asarray(shape, np.int64), DType.INT64
        )

    def number_constant(self, number: float, dtype: DType) -> str:
        """The name of a constant of one number."""
        return self._constant(f"{dtype.value}_{number!r}", number_array(number, dtype), dtype)

    def _constant(self, key: str, array: np.ndarray, dtype: DType) -> str:
        if key not in self.constants:
            name = self.add(key, dtype, array.shape)
            self.constants[key] = Constant(self.made[name], array)
        return self.constants[key].value.name

    def shape(self, name: str) -> tuple[int, ...]:
        return self.type_of(name).shape

    def made_by(self, name: str, *operators: str) -> Node | None:
        """The node that writes `name` as its first result, if it is one of ONNX's own
        `operators`.
        """
        node = self.writers.get(name)
        if node is None or node.domain or node.op not in operators or node.outputs[0] != name:
            return None
        return node

    def path(self, name: str, *operators: str) -> tuple[Node, ...]:
        """The nodes that make `name`, each of the first operand of the one before; () unless they
        are `operators`.
        """
        found: list[Node] = []
        for operator in operators:
            node = self.made_by(name, *operator.split("|"))
            if node is None:
                return ()
            found.append(node)
            name = node.inputs[0]
        return tuple(found)

    def scalar(self, name: str) -> float | None:
        """The number of a constant of one element."""
        constant = self.graph.constant(name)
        if constant is None or constant.array.size != 1 or constant.array.dtype.kind in "bc":
            return None
        return float(constant.array.reshape(-1)[0])

    def zeros(self, name: str) -> bool:
        """True for a constant of zeros, stored, in its place a tensor filled with them, or spread
        over a shape.
        """
        node = self.made_by(name, "ConstantOfShape", "Expand")
        if node is not None and node.op == "ConstantOfShape":
            return node.number("value") == 0
        held = self.graph.parameter(name)
        if held is not None:
            return not held.trainable and held.storage == Fill(0.0)
        constant = self.graph.constant(name if node is None else node.inputs[0])
        return constant is not None and not constant.array.any()

    def uncast(self, name: str) -> str:
        """The value before casts between floating-point types: half precision is written as a cast
        there and back.
        """
        for _ in range(MOST_STEPS):
            node = self.made_by(name, "Cast")
            if node is None or not all(
                self.type_of(each).dtype.is_floating for each in (node.inputs[0], name)
            ):
                break
            name = node.inputs[0]
        return name

    def scaled(self, name: str) -> tuple[float, str]:
        """A value as coefficient times another, multiplications and divisions by one number taken
        off.
        """
        coefficient = 1.0
        for _ in range(MOST_STEPS):
            node = self.made_by(name, "Mul", "Div")
            if node is None:
                break
            left, right = node.inputs
            number = self.scalar(right)
            if number is None and node.op == "Mul":
                left, number = right, self.scalar(left)
            if number is None or number == 0 or self.shape(left) != self.shape(name):
                break
            coefficient *= number if node.op == "Mul" else 1 / number
            name = left
        return coefficient, name

    def product(self, name: str) -> tuple[float, tuple[str, ...]]:
        """A value as coefficient · f₁ · f₂ ⋯, constants of one element gathered in the coefficient.

        The factors, sorted, are values read more than once or made otherwise.
        """
        coefficient = 1.0
        factors = []
        waiting = [name]
        steps = 0
        while waiting:
            top = waiting.pop()
            steps = steps + 1
            number = self.scalar(top)
            inside = steps <= MOST_STEPS and (top == name or self.readers[top] == 1)
            node = self.made_by(top, "Mul", "Div", "Pow") if inside else None
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

    def sum_with(self, name: str) -> tuple[str, float]:
        """A value as another plus a number; ("", NaN) where it is no such sum."""
        node = self.made_by(name, "Add")
        for value, other in (node.inputs, node.inputs[::-1]) if node is not None else ():
            number = self.scalar(other)
            if number is not None:
                return value, number
        return "", math.nan

    def taken(self, name: str) -> tuple[str, range]:
        """A value, and the places along its last axis that a Slice or a Split takes; all of it for
        any other.
        """
        node = self.writers.get(name)
        everything = name, range(self.shape(name)[-1] if self.shape(name) else 0)
        if node is None or node.domain or node.op not in ("Slice", "Split"):
            return everything
        shape = self.shape(node.inputs[0])
        last = (-1, len(shape) - 1)
        if node.op == "Split":
            first = sum(self.shape(each)[-1] for each in node.outputs[: node.outputs.index(name)])
            found = first, first + self.shape(name)[-1]
            return (node.inputs[0], range(*found)) if node.integer("axis") in last else everything
        numbers = [self.known.array(each) for each in node.inputs[1:]]
        if len(numbers) < 3 or any(each is None or each.size != 1 for each in numbers):
            return everything
        start, end, axis, step = (
            *(int(each.reshape(())) for each in numbers if each is not None),
            1,
        )[:4]
        places = range(*slice(start, end, step).indices(shape[axis])) if axis in last else range(0)
        return (node.inputs[0], places) if axis in last else everything

    def halves(self, first: str, second: str) -> tuple[str, bool]:
        """The value of which two others are halves, or (True) stand in turn along the last axis; ""
        where there is none.
        """
        (source, ones) = self.taken(first)
        (other, twos) = self.taken(second)
        extent = self.shape(source)[-1] if source == other and self.shape(source) else 1
        places = range(extent)
        if extent % 2 == 0 and ones == places[: extent // 2] and twos == places[extent // 2 :]:
            return source, False
        return (
            (source, True)
            if extent % 2 == 0 and (ones, twos) == (places[::2], places[1::2])
            else ("", False)
        )


def near(number: float, expected: float) -> bool:
    """True if a constant is the one meant, as far as a file in half precision can tell."""
    return math.isclose(number, expected, rel_tol=1e-3)
