"""Tensor-parallel regions (Megatron), splits of samples, and checks of constraints on splits.

If a matmul is split by the columns of its weight, its result is sharded. The operators that follow
can stay sharded (activations, attention heads, the classes of a loss), until a matmul sums over the
sharded axis or a loss over its classes. This is how Shoeybi et al. ("Megatron-LM", 2019, section 3)
split transformers by hand; here it follows from the iteration spaces alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from autopipe.ir.codec import FormerKey
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import are_even_splits
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.space import AxisKind, Space
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import (
    BATCH_AXIS,
    ResolvedConstraint,
    resolved_constraints,
)
from autopipe.passes.analysis.operators import OpInstance, SampleAxes, sample_axes
from autopipe.passes.sharding.configurations import Splits


@dataclass(frozen=True, slots=True)
class ReplicatedGraph:
    """A graph on `replicas` groups of devices, each of which computes an equal fraction of the
    samples.

    `weights` contains each value that depends on parameters and constants alone, with the names of
    these parameters. `readers` are the nodes that read each value.
    """

    graph: Graph
    samples: SampleAxes
    replicas: int
    weights: dict[str, frozenset[str]]
    readers: dict[str, tuple[int, ...]]

    @property
    def uses(self) -> tuple[OpInstance, ...]:
        return self.samples.uses

    def is_weight(self, node: int) -> bool:
        """True if the node computes from parameters and constants alone."""
        return self.graph.nodes[node].outputs[0] in self.weights

    def parameters_of(self, node: int) -> frozenset[str]:
        """Return the names of the parameters that the node reads, directly or through nodes that
        compute weights.
        """
        names = (name for name in self.graph.nodes[node].inputs if name)
        return frozenset().union(*(self.weights.get(name, frozenset()) for name in names))

    def feeders(self, node: int) -> set[int]:
        """Return the nodes that compute the weights of `node` from parameters and constants."""
        found: set[int] = set()
        pending = [node]
        while pending:
            for name in self.graph.nodes[pending.pop()].inputs:
                producer = self.graph.producer(name) if name in self.weights else None
                if producer is not None and producer not in found:
                    found.add(producer)
                    pending.append(producer)
        return found

    def splits(self, node: int, axis: str, degree: int) -> tuple[Split, ...]:
        """Return the node's splits: its samples over the replicas if it has samples, and inside
        each replica `axis` into `degree` parts.
        """
        sample_axis = self.samples.axes[node]
        outer = (
            (Split(sample_axis, self.replicas),)
            if sample_axis is not None and self.replicas > 1
            else ()
        )
        return (*outer, Split(axis, degree))

    def splits_on(self, node: int, axis: str, degree: int) -> bool:
        """True if the `degree` devices of a replica can split the node evenly along `axis`.

        With several replicas, the result is False for a node without samples, because its split
        would extend over all replicas, and for the sample axis itself.
        """
        space = self.uses[node].space
        if space.axis(axis).kind is AxisKind.UNSPLITTABLE:
            return False
        if self.replicas > 1 and self.samples.axes[node] in (None, axis):
            return False
        return are_even_splits(space, self.splits(node, axis, degree))


def replicated_graph(
    graph: Graph, replicas: int, samples: SampleAxes | None = None
) -> ReplicatedGraph:
    """Return `graph` with `replicas` replicas. `samples` is its `sample_axes` if the
    caller has it.
    """
    return ReplicatedGraph(
        graph, samples or sample_axes(graph), replicas, weights_of(graph), graph.consumers()
    )


@memoize(MAX_CACHED_GRAPHS)
def weights_of(graph: Graph) -> dict[str, frozenset[str]]:
    """Return each value that depends on parameters and constants alone, with the names of these
    parameters.
    """
    weights = {each.value.name: frozenset([each.value.name]) for each in graph.parameters}
    weights |= {each.value.name: frozenset() for each in graph.constants}
    for node in graph.nodes:
        names = [name for name in node.inputs if name]
        if names and all(name in weights for name in names):
            parameters = frozenset().union(*(weights[name] for name in names))
            weights |= {name: parameters for name in node.outputs if name}
    return weights


_MATMULS = ("matmul", "convolution")
"""Kinds of operators whose weight can be split by columns."""


@dataclass(slots=True)
class Region:
    """Nodes that are split together, with the axis of each.

    `ends` are the kinds of the axes whose partial sums end the region. `open` is true if some node
    at its border needs a sharded value unsharded. `leaves` are the sharded values that nodes
    outside the region read or that the model outputs.
    """

    axes: dict[int, str]
    ends: set[AxisKind] = field(default_factory=set)
    open: bool = False
    leaves: set[str] = field(default_factory=set)


def seed_axis(network: ReplicatedGraph, node: int, degree: int, tables: Set[str]) -> str | None:
    """Return the axis along which a region that starts at `node` is split, or None if the node
    cannot start one.

    The axis is one of: the rows of an embedding table whose name is in `tables`; the columns of the
    weight of a matmul or convolution.
    """
    use = network.uses[node]
    inputs = network.graph.nodes[node].inputs
    for axis in use.space.axes:
        if not network.splits_on(node, axis.name, degree):
            continue
        if axis.kind is AxisKind.JOINT and use.row.kind == "memory" and inputs[0] in tables:
            return axis.name
        if use.row.kind in _MATMULS and axis.kind in (AxisKind.PARALLEL, AxisKind.JOINT):
            # An axis of columns indexes the weight and none of the activations.
            pairs = zip(inputs, use.space.operands, strict=True)
            indexed = [
                name
                for name, dimensions in pairs
                if name and _dimension_of(dimensions, axis.name) >= 0
            ]
            if any(map(network.weights.get, indexed)) and all(
                name in network.weights for name in indexed
            ):
                return axis.name
    return None


def grow_region(
    network: ReplicatedGraph,
    seed: int,
    axis: str,
    degree: int,
    members: Set[int],
    fixed: dict[int, str],
) -> Region:
    """Return the region that starts with node `seed` split along `axis`.

    The region extends to the nodes of `members` that read sharded values, in topological order. The
    nodes in `fixed` are already split along the given axes: the region may end at one whose axis
    fits, and is open otherwise. A normalisation that would exchange statistics (axis kind AGREED)
    is not split, which makes the region open.
    """
    graph = network.graph
    region = Region({seed: axis})
    pending = [seed]
    sharded_dimension: dict[str, int] = {}
    """The dimension along which each value is sharded."""

    def extend_to(reader: int) -> None:
        """Add `reader` to the region along the axis that its sharded operands have in common, if
        there is one.
        """
        space = network.uses[reader].space
        pairs = zip(graph.nodes[reader].inputs, space.operands, strict=True)
        axes = {
            _outermost_axis(space, dimensions, sharded_dimension[name])
            for name, dimensions in pairs
            if name in sharded_dimension
        }
        common = axes.pop() if len(axes) == 1 else None
        agreed = common is not None and space.axis(common).kind is AxisKind.AGREED
        if common is None or agreed or not network.splits_on(reader, common, degree):
            region.open = True
        elif reader in fixed:
            region.open |= fixed[reader] != common
        elif reader not in region.axes:
            region.axes[reader] = common
            heapq.heappush(pending, reader)
        elif region.axes[reader] != common:
            region.open = True

    while pending:
        node = heapq.heappop(pending)
        use = network.uses[node]
        node_axis = region.axes[node]
        for name, dimensions in zip(graph.nodes[node].outputs, use.space.results, strict=True):
            if not name:
                continue
            dimension = _dimension_of(dimensions, node_axis)
            if dimension < 0:
                # The result is not sharded: it is a partial sum, or a joint operator's.
                sums = (
                    use.row.kind in _MATMULS
                    and _dimension_of(use.space.operands[0], node_axis) >= 0
                )
                region.ends.add(AxisKind.SUM if sums else use.space.axis(node_axis).kind)
                continue
            sharded_dimension[name] = dimension
            readers = network.readers.get(name, ())
            if name in graph.outputs or not members >= set(readers):
                region.leaves.add(name)
            for reader in readers:
                if reader in members:
                    extend_to(reader)
    return region


def _outermost_axis(
    space: Space, dimensions: tuple[tuple[str, ...], ...] | None, dimension: int
) -> str | None:
    """Return the outermost axis of size above 1 in dimension `dimension` of a tensor, or None if
    there is none.
    """
    sizes = space.axis_sizes()
    return next((name for name in (dimensions or ())[dimension] if sizes[name] > 1), None)


def _dimension_of(dimensions: tuple[tuple[str, ...], ...] | None, axis: str) -> int:
    """Return the position of the dimension that `axis` indexes, or -1 if none does."""
    return next(
        (position for position, dimension in enumerate(dimensions or ()) if axis in dimension), -1
    )


def tensor_splits(
    network: ReplicatedGraph,
    nodes: Iterable[int],
    degree: int,
    tables: Set[str],
    pays: Callable[[int], bool],
) -> tuple[tuple[int, Splits], ...]:
    """Return splits of a stage's embeddings and matmuls over `degree` devices, and of the nodes
    between them.

    A region that ends without a gather is split as a whole. Of an open region, only the first node
    is split, if `pays` returns True for it: its result is then gathered. Nodes that compute the
    weights of a split node are split accordingly.
    """
    members = frozenset(nodes)
    axes: dict[int, str] = {}
    for node in sorted(members):
        axis = (
            None
            if node in axes or network.is_weight(node)
            else seed_axis(network, node, degree, tables)
        )
        if axis is None:
            continue
        region = grow_region(network, node, axis, degree, members, axes)
        if not region.open:
            axes |= region.axes
        elif pays(node):
            axes[node] = axis
    # Split the nodes that compute the weights of split nodes, so that each device computes its
    # shard of a weight from shards.
    pending = sorted(axes)
    while pending:
        reader = pending.pop()
        for name, dimensions in zip(
            network.graph.nodes[reader].inputs, network.uses[reader].space.operands, strict=True
        ):
            producer = network.graph.producer(name) if name in network.weights else None
            dimension = _dimension_of(dimensions, axes[reader])
            if producer is None or producer not in members or producer in axes or dimension < 0:
                continue
            space = network.uses[producer].space
            producer_axis = _outermost_axis(
                space, space.results[network.graph.nodes[producer].outputs.index(name)], dimension
            )
            if producer_axis is not None and network.splits_on(producer, producer_axis, degree):
                axes[producer] = producer_axis
                pending.append(producer)
    return tuple((node, (Split(axes[node], degree),)) for node in sorted(axes))


NodeSplits = tuple[tuple[int, Splits], ...]
"""(node, splits) pairs, as in `Stage.splits`."""


def check_samples(problem: Problem, replicas: int, strategy: str, who: str = "replicas") -> None:
    """Raise InfeasibleError unless `replicas` devices or groups can split a micro-batch evenly.
    `who` names them in the message.
    """
    samples = problem.micro_batch_size
    if replicas > 1 and not problem.graph.batch_axes:
        raise InfeasibleError(
            (
                f"{strategy} cannot split samples over {replicas} {who} because the model's "
                "inputs lack a batch axis"
            ),
            hint=(
                "set model.batch_axes to the batch axis of each input, or choose another strategy"
            ),
        )
    if samples % replicas:
        raise InfeasibleError(
            f"{strategy} cannot split a micro-batch of {samples} "
            f"{plural(samples, 'sample')} evenly over {replicas} {who}",
            hint=(
                f"choose a micro-batch size that is a multiple of {replicas}, fewer devices, or "
                "another strategy"
            ),
        )


def with_samples_split(
    samples: SampleAxes, nodes: Iterable[int], replicas: int, found: dict[int, Splits]
) -> NodeSplits:
    """Return the splits `found`, and for each other node of `nodes` a split of its samples over
    `replicas`.

    Raise InfeasibleError with the node's name if its samples cannot be split evenly.
    """
    others = samples.splits((node for node in nodes if node not in found), replicas)
    return tuple(sorted((*found.items(), *others)))


def one_stage(problem: Problem, splits: NodeSplits) -> Placement:
    """Return a placement with one stage that runs all nodes on all devices."""
    nodes = tuple(range(len(problem.graph.nodes)))
    devices = tuple(range(problem.cluster.size))
    return Placement(
        (Stage(nodes, devices, problem.micro_batch_size, splits, problem.recomputes_all),)
    )


def group_splits(network: ReplicatedGraph, degree: int, nodes: Iterable[int]) -> dict[int, Splits]:
    """Return the tensor-parallel splits of `nodes` over the `degree` devices of each replica; {} if
    `degree` is 1.

    The rules are those of Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language
    Models Using Model Parallelism" (2019), section 3. Only regions that end without a gather are
    split (`tensor_splits`).
    """
    if degree == 1:
        return {}
    members = tuple(nodes)
    tables = frozenset(
        network.graph.nodes[node].inputs[0] for node in members if _looks_up_data(network, node)
    )
    splits_of = tensor_splits(
        network, members, degree, tables & network.weights.keys(), lambda node: False
    )
    return {node: network.splits(node, split.axis, degree) for node, (split,) in splits_of}


def _looks_up_data(network: ReplicatedGraph, node: int) -> bool:
    """True if a node gathers from its first operand at indices that depend on the model's inputs.

    A gather at constant indices does not count. Sample axes cannot distinguish the two: a
    micro-batch of one sample has none.
    """
    indices = network.graph.nodes[node].inputs[1:]
    return network.uses[node].row.kind == "memory" and any(
        name and name not in network.weights for name in indices
    )


@memoize(4 * MAX_CACHED_GRAPHS)
def graph_group_splits(graph: Graph, replicas: int, degree: int) -> dict[int, Splits]:
    """Return `group_splits` of all nodes of `graph`, on `replicas` replicas of `degree` devices
    each.
    """
    return group_splits(replicated_graph(graph, replicas), degree, range(len(graph.nodes)))


Group = TypeVar("Group")


StageStyle = Literal["loop", "v"]
"""Order in which the stages of a chain visit the groups: `loop` is 0 1 2 0 1 2 (interleaving of
Megatron-LM), `v` is 0 1 2 2 1 0 (Hanayo).
"""
STYLE_MARK = FormerKey("wave", ((True, "v"), (False, "loop")))
"""Mark of an option `style`, which was `wave: true` or `wave: false` in the previous release."""


def devices_of_chain(
    groups: Sequence[Group], stages_per_rank: int, style: StageStyle
) -> tuple[Group, ...]:
    """Return the group of each stage of a chain that has `stages_per_rank` stages per group."""
    order: list[Group] = []
    for visit in range(stages_per_rank):
        order += reversed(groups) if style == "v" and visit % 2 else groups
    return tuple(order)


def constrained_stages(
    resolved: Sequence[ResolvedConstraint], groups: Sequence[tuple[int, ...]], strategy: str
) -> dict[int, int]:
    """Return the stage of each node that a constraint assigns to a stage, or to the devices of a
    stage.

    `groups` are the devices of each stage. `strategy` is the subject of error messages. Raise
    ConfigurationError with the constraint for a stage that does not exist, for devices that are not
    those of one stage, and for two different stages.
    """
    found: dict[int, int] = {}
    for each in resolved:
        stages = [each.constraint.stage] if each.constraint.stage is not None else []
        if each.devices is not None:
            matching = [
                stage for stage, group in enumerate(groups) if set(group) == set(each.devices)
            ]
            if not matching:
                raise ConfigurationError(
                    f"{each} requires devices {list(each.devices)}, but no stage uses exactly "
                    "these devices",
                    hint="choose the devices of one stage: "
                    + ", ".join(str(list(group)) for group in groups),
                )
            stages += matching
        for stage in stages:
            if stage >= len(groups) or stage != stages[0]:
                raise ConfigurationError(
                    f"{each} requires stage {stage}, but {strategy} has "
                    f"{len(groups)} {plural(len(groups), 'stage')}"
                    if stage >= len(groups)
                    else f"{each} requires stage {stages[0]} and the devices of stage {stage}",
                    hint="increase the number of stages: --stages"
                    if stage >= len(groups)
                    else "remove `stage` or `devices` from the constraint",
                )
            found.update(dict.fromkeys(each.nodes, stage))
    return found


def check_degrees(problem: Problem, fixed: Mapping[int, Splits], placement: Placement) -> None:
    """Raise ConfigurationError if the degrees of a node in `fixed` do not divide the number of
    devices of its stage.
    """
    stage_of = placement.stage_of()
    for node, splits in fixed.items():
        group = len(placement.stages[stage_of[node]].devices)
        if group % math.prod(split.degree for split in splits):
            raise ConfigurationError(
                f"constraints require the splits {' '.join(map(str, splits))}, whose product of "
                f"degrees does not divide the {group} {plural(group, 'device')} of the node's "
                "stage",
                hint="choose degrees whose product divides the number of devices",
                where=repr(problem.graph.nodes[node].name),
            )


def check_constraints_met(problem: Problem, placement: Placement, strategy: str) -> None:
    """Raise ConfigurationError, with constraint and node, if a placement of one pipeline violates a
    constraint.

    A required split along an axis that a node does not have is ignored for that node, as strategy
    `manual` does.
    """
    resolved = resolved_constraints(problem)
    if not resolved:
        return
    stage_of = placement.stage_of()
    samples = sample_axes(problem.graph)
    for each in resolved:
        for node in each.nodes:
            stage = stage_of[node]
            reason = _difference(each, node, stage, placement.stages[stage], samples)
            if reason:
                raise ConfigurationError(
                    f"{each} requires {reason}",
                    hint=f"use strategy manual, because {strategy} does not support this "
                    "constraint",
                    where=repr(problem.graph.nodes[node].name),
                )


def _difference(
    each: ResolvedConstraint, node: int, number: int, stage: Stage, samples: SampleAxes
) -> str:
    """Return the difference between what a constraint requires and the node's placement, or '' if
    the constraint is met.
    """
    wanted = each.constraint
    if wanted.stage not in (None, number):
        return f"stage {wanted.stage}, but this node is in stage {number}"
    if each.devices is not None and set(each.devices) != set(stage.devices):
        return f"devices {list(each.devices)}, but this node is on {list(stage.devices)}"
    if wanted.split is None:
        return ""
    splits = [
        (samples.axes[node] if axis == BATCH_AXIS else axis, degree)
        for axis, degree in wanted.split
        if degree > 1
    ]
    axes = {axis.name for axis in samples.uses[node].space.axes}
    actual = [(split.axis, split.degree) for split in stage.splits_of(node)]
    if splits == actual or any(axis not in axes for axis, _ in splits):
        return ""
    texts = [
        " ".join(f"{axis}:{degree}" for axis, degree in pairs) or "none"
        for pairs in (wanted.split, actual)
    ]
    return f"split {texts[0]}, but this node has split {texts[1]}"
