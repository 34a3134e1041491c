"""Placements: the stages of a plan with their nodes and devices, and the splits of the nodes over
the devices of a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from autopipe.ir.codec import (
    AsList,
    Count,
    CustomCodec,
    Index,
    NonEmpty,
    OmitDefault,
    Record,
    decode,
    encode_as,
)
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.ops import operator_of
from autopipe.ir.words import plural


@dataclass(frozen=True, slots=True)
class Split:
    """A split of one axis of a node's iteration space into `degree` equal parts, one per device."""

    axis: str
    degree: Count

    def __str__(self) -> str:
        return f"{self.axis}:{self.degree}"


Splits = tuple[Annotated[Split, AsList()], ...]
_MAX_NODES = 10_000_000


def node_ranges(nodes: Iterable[int]) -> list[list[int]]:
    """Return ascending indices as half-open ranges: [0, 1, 2, 5] becomes [[0, 3], [5, 6]]."""
    ranges: list[list[int]] = []
    for node in nodes:
        if ranges and ranges[-1][1] == node:
            ranges[-1][1] = node + 1
        else:
            ranges.append([node, node + 1])
    return ranges


def devices_text(devices: Sequence[int]) -> str:
    """Return device indices as text with ranges, such as `0-3,8`. If the indices are not ascending,
    each is listed individually.
    """
    if list(devices) != sorted(devices):
        return ",".join(map(str, devices))
    parts = node_ranges(devices)
    return ",".join(
        str(first) if last == first + 1 else f"{first}-{last - 1}" for first, last in parts
    )


def _read_nodes(record: Record) -> tuple[int, ...]:
    """Return the indices in the ranges of a document; the inverse of `node_ranges`."""
    nodes: list[int] = []
    for each in record.items():
        ends = tuple(decode(end, Index) for end in each.items())
        if len(ends) != 2 or not ends[0] < ends[1] <= _MAX_NODES:
            each.reject("a range of nodes: the first node, and the node after the last")
        nodes += range(*ends)
    return tuple(nodes)


def _write_splits(splits: tuple[tuple[int, Splits], ...]) -> list[dict[str, object]]:
    """Return the splits of all nodes for a document: one entry per distinct combination of splits,
    with the ranges of its nodes.
    """
    equal: dict[Splits, list[int]] = {}
    for node, split in splits:
        equal.setdefault(split, []).append(node)
    return [
        {"split": encode_as(split, Splits), "nodes": node_ranges(sorted(nodes))}
        for split, nodes in equal.items()
    ]


def _read_splits(record: Record) -> tuple[tuple[int, Splits], ...]:
    """Return pairs (node, splits), sorted by node; the inverse of `_write_splits`."""
    found: dict[int, Splits] = {}
    for each in record.items():
        found.update(dict.fromkeys(_read_nodes(each.at("nodes")), each.get("split", Splits)))
    return tuple(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: nodes that run as one task on a group of devices."""

    written: ClassVar = (
        "devices",
        "micro_batch_size",
        "recompute",
        "pipeline",
        "nodes",
        "splits",
        "gathers",
        "holds_copies",
    )
    nodes: Annotated[tuple[int, ...], CustomCodec(node_ranges, _read_nodes)]
    """Ascending indices of the nodes in the graph."""
    devices: Annotated[tuple[Index, ...], NonEmpty]
    micro_batch_size: Count
    """Number of samples of one forward of the stage."""
    splits: Annotated[tuple[tuple[int, Splits], ...], CustomCodec(_write_splits, _read_splits)] = ()
    """Pairs (node, splits) for the nodes that are split over the devices of the stage. Splits are
    in order from the outermost to the innermost over `devices`. If the product of the degrees is
    smaller than the number of devices, each part is computed by several consecutive devices.
    """
    recompute: bool = False
    """True if backward computes the forward again instead of using saved values."""
    pipeline: Index = 0
    """Index of the pipeline to which the stage belongs."""
    gathers: Annotated[tuple[str, ...], OmitDefault()] = ()
    """Names of values of other stages that arrive in slices: each replica receives one slice, and
    gets the other slices from the other replicas (Narayanan et al., "Efficient Large-Scale Language
    Model Training on GPU Clusters Using Megatron-LM", 2021, section 4.1).
    """
    holds_copies: Annotated[bool, OmitDefault()] = False
    """True if a recomputing stage holds the 16-bit copies of its parameters from one micro-batch to
    the next.
    """
    _splits: dict[int, tuple[Split, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_splits", dict(self.splits))

    def splits_of(self, node: int) -> tuple[Split, ...]:
        """Return the splits of a node; () if each device of the stage computes the full node."""
        return self._splits.get(node, ())


@dataclass(frozen=True, slots=True)
class SplitProof:
    """Proven quality of the splits that a search chose, by the search's cost function."""

    cost: float
    lower_bound: float
    """Lower bound of the cost of all possible splits of these stages."""
    optimal: bool
    """True if no other splits have a lower cost, except for rounding errors."""
    unit: str = "s"

    @property
    def gap(self) -> float:
        """(cost - lower bound) / cost; 0 if the splits are optimal."""
        return 0.0 if self.optimal or not self.cost else 1 - self.lower_bound / self.cost


@dataclass(frozen=True, slots=True)
class Placement:
    """The stages of a plan with their devices. They form a directed acyclic graph, whose edges
    `stage_edges` returns.

    Usually there is one pipeline, and its stages partition the nodes of the graph. With p
    pipelines, such as the two directions of Chimera, the stages of each pipeline partition the
    nodes, and micro-batch m runs on pipeline m mod p.
    """

    written: ClassVar = ("stages", "notes", "options")
    stages: Annotated[tuple[Stage, ...], NonEmpty]
    proof: SplitProof | None = field(default=None, compare=False)
    notes: Annotated[tuple[str, ...], OmitDefault()] = field(default=(), compare=False)
    """Notes of the strategy for the user, one line each."""
    options: Annotated[tuple[tuple[str, int | str], ...], OmitDefault()] = field(
        default=(), compare=False
    )
    """Names and values of the options that the user left open and the strategy chose, except
    degrees of parallelism.
    """

    @property
    def devices(self) -> int:
        """Number of devices up to the one with the largest index that a stage uses."""
        return 1 + max(device for stage in self.stages for device in stage.devices)

    @property
    def pipelines(self) -> int:
        """Number of pipelines."""
        return 1 + max((stage.pipeline for stage in self.stages), default=0)

    @property
    def length(self) -> int:
        """Number of stages of each pipeline."""
        return len(self.stages) // self.pipelines

    def stage_of(self, pipeline: int = 0) -> dict[int, int]:
        """Return the index of the stage of each node in a pipeline, by the index of the node."""
        return {
            node: index
            for index, stage in enumerate(self.stages)
            if stage.pipeline == pipeline
            for node in stage.nodes
        }

    def verify(self, graph: Graph) -> None:
        """Raise InfeasibleError unless the stages of each pipeline partition the nodes, each stage
        has distinct devices, and each edge leads to a stage with a larger index.
        """
        for pipeline in range(self.pipelines):
            seen: dict[int, int] = {}
            for index, stage in (
                (index, each) for index, each in enumerate(self.stages) if each.pipeline == pipeline
            ):
                if not stage.devices or len(set(stage.devices)) != len(stage.devices):
                    raise InfeasibleError(
                        f"stage {index} lists the devices {stage.devices}, expected one or more "
                        "different devices"
                    )
                for node in stage.nodes:
                    if node in seen:
                        raise InfeasibleError(
                            f"node {graph.nodes[node].name!r} is in stages {seen[node]} and "
                            f"{index}, expected one stage"
                        )
                    seen[node] = index
            missing = [
                node.name for position, node in enumerate(graph.nodes) if position not in seen
            ]
            if missing:
                where = f" of pipeline {pipeline}" if self.pipelines > 1 else ""
                raise InfeasibleError(
                    f"{len(missing)} {plural(len(missing), 'node is', 'nodes are')} in no "
                    f"stage{where}, first {missing[0]!r}"
                )
        for source, target in stage_edges(graph, self):
            if source > target:
                raise InfeasibleError(f"stage {target} reads a value of the later stage {source}")


_CHEAP_KINDS = frozenset({"view", "memory", "elementwise", "reduction"})


@memoize(MAX_CACHED_GRAPHS)
def recomputed_nodes(graph: Graph) -> frozenset[int]:
    """Return the indices of the nodes that each stage computes for itself if it reads their values,
    such as masks and positions.

    This is cheaper than sending their values. The nodes depend only on cheap operators and on data
    inputs, which each rank can read. They do not depend on parameters, so they have no gradient.
    """
    found: set[int] = set()
    for index, node in enumerate(graph.nodes):
        row = operator_of(node)
        if row is None or row.kind not in _CHEAP_KINDS:
            continue
        producers = [graph.producer(name) for name in node.inputs if name]
        if any(name and graph.parameter(name) is not None for name in node.inputs):
            continue
        if all(producer is None or producer in found for producer in producers):
            found.add(index)
    return frozenset(found)


def crossing_values(graph: Graph, placement: Placement) -> Iterator[tuple[str, int, int]]:
    """Yield each distinct (value, producing stage, consuming stage) with two different stages, in
    topological order per pipeline. Values of `recomputed_nodes`, and values that these nodes read,
    are excluded.
    """
    recomputed = recomputed_nodes(graph)
    for pipeline in range(placement.pipelines):
        stage_of = placement.stage_of(pipeline)
        seen: set[tuple[str, int]] = set()
        for index, sources in enumerate(graph.sources()):
            for name, producer in sources if index not in recomputed else ():
                source = stage_of[producer]
                target = stage_of[index]
                if source != target and producer not in recomputed and (name, target) not in seen:
                    seen.add((name, target))
                    yield name, source, target


def stage_edges(graph: Graph, placement: Placement) -> tuple[tuple[int, int], ...]:
    """Return the distinct pairs (producing stage, consuming stage) with values that cross,
    sorted.
    """
    return tuple(
        sorted({(source, target) for _, source, target in crossing_values(graph, placement)})
    )
