"""Which values gradients flow through, what backward keeps of each node, and what a split backward leaves to its second
half: the gradients of parameters that cost a product of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopipe.ir.graph import Graph, Node
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.ops import operator_of
from autopipe.ir.schedule import Phase, Schedule
from autopipe.ir.space import Dimension, Windowed
from autopipe.passes.analysis.operators import PRODUCT_KINDS, OpInstance, element_bytes, narrows

if TYPE_CHECKING:
    from autopipe.ir.program import StageCode


@remembered(GRAPHS)
def differentiable_values(graph: Graph) -> frozenset[str]:
    """Values whose gradient a trainable parameter needs: floating, computed from one through differentiable nodes."""
    found = {parameter.value.name for parameter in graph.parameters if parameter.trainable}
    for node in graph.nodes:
        row = operator_of(node)
        if row is not None and row.differentiable and any(name in found for name in node.inputs):
            found.update(name for name in node.outputs if name and graph.type_of(name).dtype.is_floating)
    return frozenset(found)


def split_backwards(graph: Graph, codes: tuple[StageCode, ...], schedule: Schedule) -> tuple[StageCode, ...]:
    """The same stages; where a task computes half a backward, with the nodes whose parameters' gradients can wait."""
    split = {task.stage for order in schedule.tasks for task in order if task.phase is Phase.INPUT_GRADIENT}
    return tuple(replace(code, deferred=_deferred(graph, code)) if code.stage in split else code for code in codes)


def _deferred(graph: Graph, code: StageCode) -> tuple[int, ...]:
    from autopipe.ir.program import Compute  # Costs ask for halves too, and know no programs.

    computed = (each.node for each in code.operations if isinstance(each, Compute))
    return tuple(node for node in computed if waiting_operands(graph, node))


def waiting_operands(graph: Graph, node: int) -> tuple[int, ...]:
    """Positions of the node's operands whose gradients the second half of a split backward computes.

    They are parameters, or views of such, whose gradient costs a product or a lookup of its own (`Operator.weights`).
    A vector is none: its gradient is a sum, cheaper computed than waited for.
    """
    return all_waiting_operands(graph)[node]


@remembered(GRAPHS)
def all_waiting_operands(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The same for all nodes."""
    return tuple(_waiting_at(graph, node) for node in graph.nodes)


def _waiting_at(graph: Graph, node: Node) -> tuple[int, ...]:
    row = operator_of(node)
    if row is None or len(node.outputs) != 1:
        return ()
    places = (place for place in row.weights if place < len(node.inputs))
    return tuple(place for place in places if _is_weight(graph, node.inputs[place]))


def _is_weight(graph: Graph, name: str) -> bool:
    parameter = graph.parameter(viewed(graph, name))
    if parameter is None or not parameter.trainable:
        return False
    return parameter.value.dtype.is_floating and len(parameter.value.shape) > 1


def viewed(graph: Graph, name: str) -> str:
    """The value that a value is, at the end, a view of."""
    return views(graph).get(name, name)


@remembered(GRAPHS)
def views(graph: Graph) -> dict[str, str]:
    """For each value that is a view the one that it is, at the end, a view of."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        row = operator_of(node)
        if row is not None and row.kind == "view":
            source = node.inputs[0]
            found |= dict.fromkeys(filter(None, node.outputs), found.get(source, source))
    return found


_BESIDE = {"mask": 1, "places": 8}
"""Bytes an element of the first result of what is no value of the graph."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor kept from forward to backward.

    Two nodes that keep the same tensor give it the same `key`. `bytes` is its whole size; `dimensions` say, in the
    axes of the node that keeps it, which splits cut it, and `windows` which dimensions, of what extent, it is read
    through windows along.
    """

    key: tuple[str, int]
    bytes: int
    dimensions: tuple[Dimension, ...]
    windows: tuple[tuple[Windowed, int], ...] = ()

    def local_bytes(self, degrees: dict[str, int]) -> int:
        """Bytes on one device of a group that splits the node's axes by `degrees`."""
        if not degrees:
            return self.bytes
        size = self.bytes // math.prod(degrees.get(axis, 1) for dimension in self.dimensions for axis in dimension)
        for window, extent in self.windows:
            degree = degrees.get(window.axis, 1)
            if degree > 1:
                size = size * window.span(window.count // degree) // extent
        return size


@remembered(GRAPHS)
def kept_values(
    graph: Graph, uses: tuple[OpInstance, ...], precision: str = "fp32"
) -> tuple[tuple[SavedTensor, ...], ...]:
    """For each node what backward needs of it, at `precision`.

    Parameters, constants and graph inputs are there anyway and do not count, but the 16-bit copies that autocast makes
    of a product's operands do: one of a trained parameter for all products of a forward, one of anything else for each
    that reads it (PyTorch documentation, "Automatic Mixed Precision package", `cache_enabled`). A view keeps nothing;
    keeping a view keeps what it is a view of. Nodes through which no gradient flows keep nothing.
    """
    keeper = _Keeper(graph, precision, differentiable_values(graph), element_bytes(graph, uses, precision))
    return tuple(keeper.of(node, use) for node, use in zip(graph.nodes, uses, strict=True))


class _Keeper:
    def __init__(self, graph: Graph, precision: str, gradient: frozenset[str], widths: dict[str, int]) -> None:
        self.graph = graph
        self.narrow = narrows(precision)
        self.gradient = gradient
        self.widths = widths
        self.roots: dict[str, str] = {}
        self.free = {value.name for value in graph.inputs}
        self.trained = {each.value.name for each in graph.parameters if each.trainable}
        self.free |= {each.value.name for each in graph.parameters} | {each.value.name for each in graph.constants}

    def of(self, node: Node, use: OpInstance) -> tuple[SavedTensor, ...]:
        """Tensors that one node keeps; nodes must be asked for in order."""
        if use.row.kind == "view":
            source = self.roots.get(node.inputs[0], node.inputs[0])
            self.roots |= {name: source for name in node.outputs if name}
            return ()
        if not use.row.differentiable or self.gradient.isdisjoint(node.inputs):
            return ()
        found: dict[tuple[str, int], SavedTensor] = {}
        for what in use.row.keeps:
            for kept in self._tensors(node, use, what):
                found.setdefault(kept.key, kept)
        return tuple(found.values())

    def _tensors(self, node: Node, use: OpInstance, what: str) -> list[SavedTensor]:
        if what in _BESIDE:
            width, elements = _BESIDE[what], self.graph.type_of(node.outputs[0]).elements
            return [SavedTensor((f"{node.outputs[0]}\0{what}", width), elements * width, use.space.results[0] or ())]
        if what.startswith(">"):
            position = int(what[1:])
            names, dimensions = node.outputs, use.space.results
            return self._tensor(names[position], dimensions[position], (), None) if position < len(names) else []
        positions = range(len(node.inputs)) if what == "*" else [int(what)]
        return [
            kept
            for position in positions
            if position < len(node.inputs) and self._needs(node, use, position)
            for kept in self._tensor(
                node.inputs[position],
                use.space.operands[position],
                use.space.windows_of(position),
                f"{node.outputs[0]}\0{position}" if self._casts(use) else None,
            )
        ]

    def _casts(self, use: OpInstance) -> bool:
        return self.narrow and use.row.kind in PRODUCT_KINDS

    def _needs(self, node: Node, use: OpInstance, position: int) -> bool:
        """A factor is needed for the gradients of the other factors only."""
        if use.row.kind not in ("matmul", "convolution") and use.row.name != "Mul":
            return True
        return any(name in self.gradient for other, name in enumerate(node.inputs) if other != position)

    def _tensor(
        self, name: str, dimensions: tuple[Dimension, ...] | None, windows: tuple[Windowed, ...], cast: str | None
    ) -> list[SavedTensor]:
        """Saved tensors of a value; `cast` names the copy that its reader makes of it, if it makes one."""
        if not name:
            return []
        through = tuple((window, self.graph.type_of(name).shape[window.dimension]) for window in windows)
        root = self.roots.get(name, name)
        value = self.graph.type_of(root)
        width = self.widths[root]
        if cast is not None and value.dtype.is_floating and width > 2:
            return [
                SavedTensor((root if root in self.trained else cast, 2), value.elements * 2, dimensions or (), through)
            ]
        if root in self.free:
            return []
        return [SavedTensor((root, width), value.elements * width, dimensions or (), through)]
