"""A graph being rewritten from the front: who writes a value, products taken apart, known numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autopipe.ir.graph import Graph, Node, Value
from autopipe.passes.frontend.known import ConstantFolder

MOST_STEPS = 32
"""Multiplications that are looked back through: a chain of thousands would take the square of its length."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """Nodes in place of one node, the last of which writes its result; `values` types what the others write."""

    nodes: tuple[Node, ...]
    values: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class Product:
    """A value as coefficient · f₁ · f₂ ⋯, constants of one element gathered in the coefficient."""

    coefficient: float
    factors: tuple[str, ...]


@dataclass(slots=True)
class View:
    """Graph as patterns see it. Nodes before the current one are already rewritten."""

    graph: Graph
    known: ConstantFolder
    readers: Counter[str]
    writers: dict[str, Node] = field(default_factory=dict)
    made: dict[str, Value] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)
    """Positions hidden by the masks seen so far."""

    @classmethod
    def of(cls, graph: Graph) -> View:
        """A view of `graph` before anything is rewritten."""
        readers = Counter(name for node in graph.nodes for name in node.inputs if name)
        readers.update(graph.outputs)
        return cls(graph, ConstantFolder.of(graph), readers)

    def type_of(self, name: str) -> Value:
        """The type of a value, new ones included."""
        return self.made.get(name) or self.graph.type_of(name)

    def made_by(self, name: str, *operators: str) -> Node | None:
        """The node that writes `name` as its first result, if it is one of ONNX's own `operators`."""
        node = self.writers.get(name)
        if node is None or node.domain or node.op not in operators or node.outputs[0] != name:
            return None
        return node

    def scalar(self, name: str) -> float | None:
        """The number of a constant of one element."""
        constant = self.graph.constant(name)
        if constant is None or constant.array.size != 1 or constant.array.dtype.kind in "bc":
            return None
        return float(constant.array.reshape(-1)[0])

    def uncast(self, name: str) -> str:
        """The value before a cast between floating-point types."""
        node = self.made_by(name, "Cast")
        if node is None:
            return name
        floating = all(self.type_of(each).dtype.is_floating for each in (node.inputs[0], name))
        return node.inputs[0] if floating else name

    def scaled(self, name: str) -> tuple[float, str]:
        """A value as coefficient times another, multiplications and divisions by one number taken off."""
        coefficient = 1.0
        for _ in range(MOST_STEPS):
            node = self.made_by(name, "Mul", "Div")
            if node is None:
                break
            left, right = node.inputs
            number = self.scalar(right)
            if number is None and node.op == "Mul":
                left, number = right, self.scalar(left)
            if number is None or number == 0 or self.type_of(left).shape != self.type_of(name).shape:
                break
            coefficient *= number if node.op == "Mul" else 1 / number
            name = left
        return coefficient, name

    def product(self, name: str) -> Product:
        """A value as a product, whose factors are values read more than once or made otherwise; sorted."""
        coefficient, factors, waiting = 1.0, [], [name]
        steps = 0
        while waiting:
            top, steps = waiting.pop(), steps + 1
            number = self.scalar(top)
            inside = steps <= MOST_STEPS and (top == name or self.readers[top] == 1)
            node = self.made_by(top, "Mul", "Div", "Pow") if inside else None
            if number is not None:
                coefficient *= number
            elif node is None:
                factors.append(top)
            elif node.op == "Mul":
                waiting.extend(node.inputs)
            else:
                operand = self.scalar(node.inputs[1])
                if node.op == "Div" and operand:
                    coefficient /= operand
                    waiting.append(node.inputs[0])
                elif node.op == "Pow" and operand in (2.0, 3.0):
                    factors.extend([node.inputs[0]] * int(operand))
                else:
                    factors.append(top)
        return Product(coefficient, tuple(sorted(factors)))

    def sum_with(self, name: str) -> tuple[str, float] | None:
        """A value as another plus a number."""
        node = self.made_by(name, "Add")
        if node is None:
            return None
        for value, other in (node.inputs, node.inputs[::-1]):
            number = self.scalar(other)
            if number is not None:
                return value, number
        return None

    def numbers(self, name: str) -> np.ndarray | None:
        """The numbers of a value that depends on constants alone."""
        return self.known.array(name)


Rule = Callable[[View, Node], Replacement | None]
"""Looks at a node and what leads to it; gives what to put in its place, or None."""


def near(number: float, expected: float) -> bool:
    """True if a constant is the one meant, as far as a file in half precision can tell."""
    return math.isclose(number, expected, rel_tol=1e-3)
