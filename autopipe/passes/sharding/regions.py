"""Tensor-parallel regions (Megatron), splits of samples, and checks of constraints on splits.

If a matmul is split by the columns of its weight, its result is sharded. The operators that follow
can stay sharded along activations, attention heads or the classes of a loss. The region ends at a
matmul that sums over the sharded axis, or at a loss that sums over its classes. Shoeybi et al.
("Megatron-LM", 2019, section 3) split transformers like this by hand; here the splits follow from
the iteration spaces of the operators.
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
    resolve_constraints,
)
from autopipe.passes.analysis.operators import OpInstance, SampleAxes, sample_axes
from autopipe.passes.sharding.configurations import Splits


@dataclass(frozen=True, slots=True)
class ReplicatedGraph:
    """A graph on `replicas` groups of devices. Each group is a replica, which computes an equal
    fraction of the samples.

    weights: the result of `weight_values`. It contains the values that depend only on parameters
    and constants.
    readers: the nodes that read each value.
    """

    graph: Graph
    samples: SampleAxes
    replicas: int
    weights: dict[str, frozenset[str]]
    readers: dict[str, tuple[int, ...]]

    @property
    def uses(self) -> tuple[OpInstance, ...]:
        """The operator and iteration space of each node."""
        return self.samples.uses

    def is_weight(self, node: int) -> bool:
        """True if the results of the node depend only on parameters and constants."""
        return self.graph.nodes[node].outputs[0] in self.weights

    def parameters_of(self, node: int) -> frozenset[str]:
        """Return the names of the parameters that the node reads directly, or through nodes whose
        results depend only on parameters and constants.
        """
        names = (name for name in self.graph.nodes[node].inputs if name)
        return frozenset().union(*(self.weights.get(name, frozenset()) for name in names))

    def weight_producers(self, node: int) -> set[int]:
        """Return the nodes that compute operands of `node` from parameters and constants only,
        directly or through each other.
        """
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
        """Return splits of a node, outermost first: its samples over the replicas, if the node has
        a sample axis and there are several replicas, and inside each replica `axis` over `degree`
        devices.
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

        With several replicas, two cases are False: a node without a sample axis, because its split
        would extend over all replicas, and a split along the sample axis itself.
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
    """Return `graph` on `replicas` groups of devices that divide the samples. `samples` is the
    result of `sample_axes` for `graph`; if None, it is computed.
    """
    return ReplicatedGraph(
        graph, samples or sample_axes(graph), replicas, weight_values(graph), graph.consumers()
    )


@memoize(MAX_CACHED_GRAPHS)
def weight_values(graph: Graph) -> dict[str, frozenset[str]]:
    """Return the values that depend only on parameters and constants: for each of them, the names
    of the parameters on which it depends.
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
    """A tensor-parallel region: nodes that are split together, so that values between them stay
    sharded.

    axes: the split axis of each node, by node index.
    ends: kinds of the split axes of nodes with a result that the split axis does not index. The
    region ends at such a result, for example at the partial sums of a matmul (kind SUM).
    open: True if a node that reads a sharded value of the region cannot be split accordingly, so
    that the value must be gathered.
    leaves: sharded values that the model outputs or that nodes outside of the considered nodes
    read.
    """

    axes: dict[int, str]
    ends: set[AxisKind] = field(default_factory=set)
    open: bool = False
    leaves: set[str] = field(default_factory=set)


def seed_axis(network: ReplicatedGraph, node: int, degree: int, tables: Set[str]) -> str | None:
    """Return the axis along which `node` is split over `degree` devices if it starts a region, or
    None if it cannot start one.

    The axis indexes either the rows of an embedding table whose name is in `tables`, or the columns
    of the weight of a matmul or convolution.
    """
    use = network.uses[node]
    inputs = network.graph.nodes[node].inputs
    for axis in use.space.axes:
        if not network.splits_on(node, axis.name, degree):
            continue
        if axis.kind is AxisKind.JOINT and use.row.kind == "memory" and inputs[0] in tables:
            return axis.name
        if use.row.kind in _MATMULS and axis.kind in (AxisKind.PARALLEL, AxisKind.JOINT):
            # An axis that indexes only operands computed from parameters and constants counts the
            # columns of a weight. An axis that also indexes activations is skipped, because it
            # would require sharded activations.
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
    """Return the region that starts with node `seed`, split along `axis` over `degree` devices.

    The region extends in topological order to the nodes of `members` that read its sharded values.
    The nodes in `fixed` belong to other regions and are split along the given axes. The region
    stops at such a node; it is open if the node's axis does not fit. A normalisation whose
    statistics would have to be reduced over the devices (axis kind AGREED) is not split, which
    also makes the region open.
    """
    graph = network.graph
    region = Region({seed: axis})
    pending = [seed]
    sharded_dimension: dict[str, int] = {}
    """For each sharded value, the position of the dimension along which it is sharded."""

    def extend_to(reader: int) -> None:
        """Add `reader` to the region, split along the one axis that indexes the sharded dimension
        of all its sharded operands. A node of another region is not added. The region becomes open
        if no such axis exists, or if the node is split otherwise or cannot be split along the axis.
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
                # The split axis does not index the result, so the result is not sharded and the
                # region ends here. For a matmul, an axis that indexes its first operand is summed
                # over, so the result is a partial sum regardless of the kind of the axis.
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
    """Return the outermost axis of size above 1 that indexes dimension `dimension` of a tensor, or
    None if there is none. `dimensions` are the axes of each dimension, outer to inner.
    """
    sizes = space.axis_sizes()
    return next((name for name in (dimensions or ())[dimension] if sizes[name] > 1), None)


def _dimension_of(dimensions: tuple[tuple[str, ...], ...] | None, axis: str) -> int:
    """Return the position of the dimension of a tensor that `axis` indexes, or -1 if it indexes no
    dimension. `dimensions` are the axes of each dimension; None is an absent tensor.
    """
    return next(
        (position for position, dimension in enumerate(dimensions or ()) if axis in dimension), -1
    )


def tensor_parallel_splits(
    network: ReplicatedGraph,
    nodes: Iterable[int],
    degree: int,
    tables: Set[str],
    pays: Callable[[int], bool],
) -> tuple[tuple[int, Splits], ...]:
    """Return (node, splits) pairs that split embeddings and matmuls of `nodes`, and the nodes
    between them, over `degree` devices.

    A region whose sharded values need no gather is split as a whole. Of an open region, only the
    first node is split, and only if `pays` returns True for this node; its result is then gathered.
    Nodes that compute the weights of a split node are split accordingly. `tables` are the names of
    embedding tables that may be split by rows.
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
    # Also split the nodes that compute the weights of split nodes. Otherwise each device would
    # compute a full weight and use only its shard.
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


def check_samples_divide(
    problem: Problem, replicas: int, strategy: str, who: str = "replicas"
) -> None:
    """Raise InfeasibleError unless the samples of a micro-batch can be divided evenly among
    `replicas` replicas. `strategy` and `who`, a word for the replicas, are part of the message.
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


def with_sample_splits(
    samples: SampleAxes, nodes: Iterable[int], replicas: int, found: dict[int, Splits]
) -> NodeSplits:
    """Return (node, splits) pairs in ascending order of nodes: the splits `found`, and for each
    other node of `nodes` with a sample axis a split of its samples over `replicas` devices.

    Raise InfeasibleError with the node's name if its samples cannot be split evenly.
    """
    others = samples.splits((node for node in nodes if node not in found), replicas)
    return tuple(sorted((*found.items(), *others)))


def single_stage_placement(problem: Problem, splits: NodeSplits) -> Placement:
    """Return a placement with one stage that runs all nodes on all devices, with the given splits
    of nodes.
    """
    nodes = tuple(range(len(problem.graph.nodes)))
    devices = tuple(range(problem.cluster.size))
    return Placement(
        (Stage(nodes, devices, problem.micro_batch_size, splits, problem.recomputes_all),)
    )


def megatron_splits(
    network: ReplicatedGraph, degree: int, nodes: Iterable[int]
) -> dict[int, Splits]:
    """Return, by node, the tensor-parallel splits of `nodes` over the `degree` devices of each
    replica; {} if `degree` is 1. Nodes outside of tensor-parallel regions are omitted.

    The rules are those of Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language
    Models Using Model Parallelism" (2019), section 3. Only regions whose sharded values need no
    gather are split (`tensor_parallel_splits`).
    """
    if degree == 1:
        return {}
    members = tuple(nodes)
    tables = frozenset(
        network.graph.nodes[node].inputs[0] for node in members if _gathers_at_inputs(network, node)
    )
    splits_of = tensor_parallel_splits(
        network, members, degree, tables & network.weights.keys(), lambda node: False
    )
    return {node: network.splits(node, split.axis, degree) for node, (split,) in splits_of}


def _gathers_at_inputs(network: ReplicatedGraph, node: int) -> bool:
    """True if `node` copies elements of its first operand and another operand, the indices, depends
    on the inputs of the model.

    A gather at constant indices does not count. The sample axis of the node cannot serve as this
    test, because in a micro-batch of one sample no node has a sample axis.
    """
    indices = network.graph.nodes[node].inputs[1:]
    return network.uses[node].row.kind == "memory" and any(
        name and name not in network.weights for name in indices
    )


@memoize(4 * MAX_CACHED_GRAPHS)
def graph_megatron_splits(graph: Graph, replicas: int, degree: int) -> dict[int, Splits]:
    """Return, by node, the tensor-parallel splits of all nodes of `graph` on `replicas` replicas of
    `degree` devices each (`megatron_splits`).
    """
    return megatron_splits(replicated_graph(graph, replicas), degree, range(len(graph.nodes)))


Group = TypeVar("Group")


StageStyle = Literal["loop", "v"]
"""Order in which consecutive stages use the groups of devices if each group has several stages.
With two stages per group, `loop` is 0 1 2 0 1 2 (interleaving of Megatron-LM) and `v` is 0 1 2 2 1
0 (Hanayo).
"""
STYLE_MARK = FormerKey("wave", ((True, "v"), (False, "loop")))
"""Annotation of an option `style`, which was `wave: true` or `wave: false` in the previous
release. With it, the former key is still accepted.
"""


def stage_groups(
    groups: Sequence[Group], stages_per_rank: int, style: StageStyle
) -> tuple[Group, ...]:
    """Return the group of devices of each stage, in the order of the stages, if each of `groups`
    has `stages_per_rank` stages. With style `v`, every second pass through the groups is in reverse
    order; with `loop`, all passes are in the order of `groups`.
    """
    order: list[Group] = []
    for visit in range(stages_per_rank):
        order += reversed(groups) if style == "v" and visit % 2 else groups
    return tuple(order)


def constrained_stages(
    resolved: Sequence[ResolvedConstraint], groups: Sequence[tuple[int, ...]], strategy: str
) -> dict[int, int]:
    """Return, by node, the stage to which a constraint assigns the node, either by the index of the
    stage or by its devices. Other nodes are omitted.

    `groups` are the devices of each stage. `strategy` is the subject of error messages. Raise
    ConfigurationError, with the constraint, if its stage does not exist, if its devices are not
    exactly those of a stage, or if its stage and its devices are two different stages.
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
    """Raise ConfigurationError if the product of the degrees of a node's splits in `fixed` does not
    divide the number of devices of the node's stage.
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
    """Raise ConfigurationError, with the constraint and the node, if `placement` violates a
    constraint of the problem. The placement must have a single pipeline.

    A constraint that splits an axis that a node does not have is ignored for this node, as by
    strategy `manual`. `strategy` is part of the message.
    """
    resolved = resolve_constraints(problem)
    if not resolved:
        return
    stage_of = placement.stage_of()
    samples = sample_axes(problem.graph)
    for each in resolved:
        for node in each.nodes:
            stage = stage_of[node]
            reason = _constraint_difference(each, node, stage, placement.stages[stage], samples)
            if reason:
                raise ConfigurationError(
                    f"{each} requires {reason}",
                    hint=f"use strategy manual, because {strategy} does not support this "
                    "constraint",
                    where=repr(problem.graph.nodes[node].name),
                )


def _constraint_difference(
    each: ResolvedConstraint, node: int, number: int, stage: Stage, samples: SampleAxes
) -> str:
    """Return, as the end of an error message, what the constraint `each` requires of `node` and how
    the node is placed instead; '' if the constraint is met.

    The node is in stage `stage`, whose index is `number`.
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
