"""Inputs of a stage's tables: its nodes, the readers of each value, and the values gradients flow through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopipe.ir.graph import Graph
from autopipe.ir.problem import Problem
from autopipe.ir.space import Dimension
from autopipe.passes.analysis.gradients import SavedTensor, differentiable_values, kept_values
from autopipe.passes.analysis.operators import OpInstance, element_bytes, sample_axes
from autopipe.passes.spmd.search.configurations import Splits


@dataclass(frozen=True, slots=True)
class StageOptions:
    """Under which terms a stage runs its nodes."""

    allowed: dict[int, tuple[Splits, ...]] = field(default_factory=dict)
    """The configurations of nodes that may not have all."""
    given: frozenset[str] = frozenset()
    """Values that others want of the stage."""
    whole: frozenset[str] = frozenset()
    """Parameters that every device has to hold whole."""
    in_flight: int = 1
    """Micro-batches between forward and backward."""
    recompute: bool = False
    """True if forward is run again for backward."""


NO_TERMS = StageOptions()
"""None but those of the problem."""


@dataclass(frozen=True, slots=True)
class ValueReader:
    """A node that reads a value, and one of the operands' positions where it does."""

    node: int
    position: int


@dataclass(frozen=True, slots=True)
class SharedSave:
    """A value that `node` makes backward keep, as `first` did before it: each device keeps the larger block."""

    first: int
    by_first: SavedTensor
    node: int
    by_node: SavedTensor


@dataclass(frozen=True, slots=True, eq=False)
class StageContext:
    """A stage's nodes on its devices, with all that their costs depend on; by node of the whole graph.

    `readers` of a value are the stage's nodes that read it, each once for each way in which it wants it. `kept` is what
    each node makes backward keep, values at the first node that does; `kept_again` are the other nodes that do.
    """

    problem: Problem
    nodes: tuple[int, ...]
    devices: tuple[int, ...]
    terms: StageOptions
    uses: tuple[OpInstance, ...]
    sample_axes: tuple[str | None, ...]
    gradient: frozenset[str]
    readers: dict[str, tuple[ValueReader, ...]]
    kept: dict[int, tuple[SavedTensor, ...]]
    kept_again: tuple[SharedSave, ...]
    widths: dict[str, int]
    """Bytes an element of each value."""

    @property
    def graph(self) -> Graph:
        """The problem's graph."""
        return self.problem.graph

    def own_parameters(self, node: int) -> dict[int, str]:
        """The parameters, by operand's position, that no other node reads: their layout is the node's choice alone."""
        found: dict[str, int] = {}
        for position, name in enumerate(self.graph.nodes[node].inputs):
            if name and self.graph.parameter(name) is not None and not self.is_shared_parameter(name):
                found.setdefault(name, position)
        return {position: name for name, position in found.items()}

    def is_shared_parameter(self, name: str) -> bool:
        """True if the layout of a parameter is a variable of its own."""
        return len(self.readers[name]) > 1 or name in self.terms.whole


def stage_context(
    problem: Problem, nodes: Sequence[int], devices: tuple[int, ...], terms: StageOptions
) -> StageContext:
    """The ground of `nodes`, ascending, on `devices`."""
    samples = sample_axes(problem.graph)
    everything = kept_values(problem.graph, samples.uses, problem.precision) if problem.train else ()
    kept, kept_again = _first_kept(everything, nodes) if problem.train else ({}, ())
    return StageContext(
        problem=problem,
        nodes=tuple(nodes),
        devices=devices,
        terms=terms,
        uses=samples.uses,
        sample_axes=samples.axes,
        gradient=differentiable_values(problem.graph) if problem.train else frozenset(),
        readers=_readers(problem.graph, samples.uses, nodes),
        kept=kept,
        kept_again=kept_again,
        widths=element_bytes(problem.graph, samples.uses, problem.precision),
    )


def _readers(graph: Graph, uses: tuple[OpInstance, ...], nodes: Sequence[int]) -> dict[str, tuple[ValueReader, ...]]:
    found: dict[str, dict[tuple[int, tuple[Dimension, ...]], ValueReader]] = {}
    for node in nodes:
        for position, (name, words) in enumerate(zip(graph.nodes[node].inputs, uses[node].space.operands, strict=True)):
            if name:
                found.setdefault(name, {}).setdefault((node, words or ()), ValueReader(node, position))
    return {name: tuple(each.values()) for name, each in found.items()}


def _first_kept(
    kept: tuple[tuple[SavedTensor, ...], ...], nodes: Sequence[int]
) -> tuple[dict[int, tuple[SavedTensor, ...]], tuple[SharedSave, ...]]:
    """Tensors that each node is the first to keep, and those that others keep again."""
    seen: dict[tuple[str, int], tuple[int, SavedTensor]] = {}
    found, again = {}, []
    for node in nodes:
        found[node] = tuple(each for each in kept[node] if each.key not in seen)
        again += [SharedSave(*seen[each.key], node, each) for each in kept[node] if each.key in seen]
        seen.update((each.key, (node, each)) for each in found[node])
    return found, tuple(again)
