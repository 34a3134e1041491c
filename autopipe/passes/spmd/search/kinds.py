"""Nodes that cost the same: a model of equal layers has few kinds, and each is worked out once."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopipe.passes.analysis.gradients import SavedTensor
from autopipe.passes.spmd.search.configurations import Splits, configurations
from autopipe.passes.spmd.search.forms import LayoutTable, TensorLayouts
from autopipe.passes.spmd.search.ground import StageContext
from autopipe.passes.spmd.search.lying import MeshPositions
from autopipe.passes.spmd.search.moves import Floats
from autopipe.passes.spmd.search.nodes import Computing, kept_bytes
from autopipe.passes.spmd.search.parameters import Parameters
from autopipe.passes.spmd.search.reducing import Changes


@dataclass(eq=False, slots=True)
class NodeClass:
    """Nodes equal in all that their costs depend on; `node` is the first of them."""

    ground: StageContext
    node: int
    configurations: tuple[Splits, ...]
    forms: LayoutTable
    """Of all kinds together."""
    _forms: dict[tuple[str, int], TensorLayouts] = field(default_factory=dict)

    @property
    def mesh_positions(self) -> MeshPositions:
        """Where axes lie in its configurations."""
        return self.forms.mesh_positions_of(self.configurations)

    def reads(self, position: int) -> TensorLayouts:
        """How its configurations want an operand."""
        return self._form("operand", position)

    def leaves(self, position: int) -> TensorLayouts:
        """How its configurations leave a result."""
        return self._form("result", position)

    def _form(self, what: str, position: int) -> TensorLayouts:
        if (what, position) not in self._forms:
            graph, space = self.ground.graph, self.ground.uses[self.node].space
            make = self.forms.operand if what == "operand" else self.forms.result
            self._forms[what, position] = make(graph, graph.nodes[self.node], position, space, self.configurations)
        return self._forms[what, position]


def node_classes(ground: StageContext) -> tuple[NodeClass, ...]:
    """The kind of each of the ground's nodes."""
    known: dict[Hashable, NodeClass] = {}
    spaces: dict[Hashable, tuple[Splits, ...]] = {}
    forms = LayoutTable(len(ground.devices))
    found = []
    for node in ground.nodes:
        key = _key(ground, node)
        if key not in known:
            known[key] = NodeClass(ground, node, _configurations(ground, node, spaces), forms)
        found.append(known[key])
    return tuple(found)


def _configurations(ground: StageContext, node: int, known: dict[Hashable, tuple[Splits, ...]]) -> tuple[Splits, ...]:
    if node in ground.terms.allowed:
        return ground.terms.allowed[node]
    space, outermost, group = ground.uses[node].space, ground.sample_axes[node], len(ground.devices)
    # Extents matter by the degrees that divide them; where several axes make up a dimension, also by what is left.
    axes = tuple((axis.name, axis.kind, math.gcd(axis.extent, group)) for axis in space.axes)
    tensors = (*space.operands, *space.results)
    mixed = tuple(tensor for tensor in tensors if tensor and any(len(dimension) > 1 for dimension in tensor))
    key = axes, outermost, (mixed, tuple(axis.extent for axis in space.axes)) if mixed else ()
    if key not in known:
        known[key] = configurations(space, group, outermost)
    return known[key]


def _key(ground: StageContext, node: int) -> Hashable:
    """Key of all that the costs of a node depend on."""
    graph = ground.graph
    parameters = (
        (position, found.trainable)
        for position, name in ground.own_parameters(node).items()
        if (found := graph.parameter(name)) is not None
    )
    return (
        id(ground.uses[node]),
        ground.problem.work[node],
        ground.sample_axes[node],
        ground.terms.allowed.get(node),
        tuple(parameters),
        tuple((each.bytes, each.dimensions) for each in ground.kept.get(node, ())),
        tuple((_is_reduced_alone(ground, name), name in ground.gradient) for name in graph.nodes[node].outputs),
    )


def _is_reduced_alone(ground: StageContext, name: str) -> bool:
    """True if shares of a value are added up though no node of the stage reads it."""
    return (
        bool(name)
        and name not in ground.readers
        and not (
            name in ground.terms.given and name not in ground.graph.consumers() and not ground.graph.type_of(name).shape
        )
    )


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Cost of each configuration of a variable."""

    seconds: Floats
    """Of a step."""
    gradients: Floats
    """Of these, to exchange gradients once a step."""
    backward: Floats
    """Of these, one micro-batch's backward."""
    memory: NDArray[np.int64]
    """Bytes on a device."""


def node_class_costs(kind: NodeClass, computing: Computing, parameters: Parameters, changes: Changes) -> Costs:
    """Costs of a node's configurations, each by itself."""
    ground, node = kind.ground, kind.node
    terms, problem = ground.terms, ground.problem
    forward, backward = computing.seconds(node, ground.uses[node], kind.configurations, kind.mesh_positions)
    seconds = forward * (1 + terms.recompute) + backward if problem.train else forward
    for position, name in enumerate(ground.graph.nodes[node].outputs):
        if _is_reduced_alone(ground, name):
            left = kind.leaves(position)
            size = ground.graph.type_of(name).bytes
            seconds = seconds + changes.to_copies(left.layouts, size)[left.of] * times_run(ground, name)
    seconds = seconds * problem.micro_batches
    gradients = np.zeros_like(seconds)
    memory = np.zeros(len(seconds), dtype=np.int64)
    for position, name in ground.own_parameters(node).items():
        form = kind.reads(position)
        held = parameters.holding(name, form.layouts)
        gradients += held.gradient_s[form.of]
        seconds = seconds + held.update_s[form.of]
        memory += held.bytes[form.of]
    if problem.train:
        # What recomputation brings back is that of one micro-batch at a time.
        micro_batches = 1 if terms.recompute else terms.in_flight
        memory += micro_batches * kept_bytes(ground.kept[node], kind.mesh_positions)
    return Costs(seconds + gradients, gradients, backward if problem.train else np.zeros_like(seconds), memory)


def times_run(ground: StageContext, value: str) -> int:
    """How often a micro-batch makes a change of layout of a value: forward, again for backward, and its transpose."""
    return 1 + ground.terms.recompute + (value in ground.gradient)


def passing_bytes(kind: NodeClass) -> NDArray[np.int64]:
    """For each configuration the bytes of gradients of what a node reads and writes (`memory.gradient_workspace`)."""
    ground, node = kind.ground, kind.ground.graph.nodes[kind.node]
    found = np.zeros(len(kind.configurations), dtype=np.int64)
    if not ground.problem.train or ground.uses[kind.node].row.kind == "view":
        return found
    read = {
        name: kind.reads(place) for place, name in enumerate(node.inputs) if ground.graph.producer(name) is not None
    }
    written = {name: kind.leaves(place) for place, name in enumerate(node.outputs) if name}
    for name, form in (*read.items(), *written.items()):
        found += (form.elements * ground.widths[name])[form.of]
    return found


def more_bytes(first: NodeClass, by_first: SavedTensor, other: NodeClass, by_other: SavedTensor) -> NDArray[np.int64]:
    """By how much the block that `other` keeps of a value exceeds that of `first`; [of first, of other]."""
    own = kept_bytes([by_other], other.mesh_positions)
    difference: NDArray[np.int64] = np.maximum(own[None, :] - kept_bytes([by_first], first.mesh_positions)[:, None], 0)
    return difference
