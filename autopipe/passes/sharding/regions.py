"""Where a cut leads: the nodes that stay cut when one of them is, until partial sums end it; and
constraints on splits.

A product cut by its columns leaves its result cut; what follows stays cut (an activation, the heads
of an attention, the classes of a loss) until a product sums over the cut axis or a loss over its
classes. That is how transformers are split over devices by hand (Shoeybi et al., "Megatron-LM",
2019, section 3), found from iteration spaces alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import are_even_splits
from autopipe.ir.memo import GRAPHS, remembered
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
class Network:
    """A graph on `replicas` groups of devices, each with an equal share of the samples. `weights`
    says, of each value that depends on parameters and constants alone, on which parameters.
    `readers` are the nodes that read each value.
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
        """True if a node computes from parameters and constants alone."""
        return self.graph.nodes[node].outputs[0] in self.weights

    def parameters_of(self, node: int) -> frozenset[str]:
        """The parameters that a node reads, itself or through nodes that read nothing else."""
        names = (name for name in self.graph.nodes[node].inputs if name)
        return frozenset().union(*(self.weights.get(name, frozenset()) for name in names))

    def feeders(self, node: int) -> set[int]:
        """The nodes that compute a node's weights from parameters and constants."""
        found: set[int] = set()
        waiting = [node]
        while waiting:
            for name in self.graph.nodes[waiting.pop()].inputs:
                producer = self.graph.producer(name) if name in self.weights else None
                if producer is not None and producer not in found:
                    found.add(producer)
                    waiting.append(producer)
        return found

    def splits(self, node: int, axis: str, degree: int) -> tuple[Split, ...]:
        """A node's splits: its samples among the replicas, and inside each of them `axis` in
        `degree` parts.
        """
        own = self.samples.axes[node]
        outer = (Split(own, self.replicas),) if own is not None and self.replicas > 1 else ()
        return (*outer, Split(axis, degree))

    def splits_on(self, node: int, axis: str, degree: int) -> bool:
        """True if a replica's `degree` devices can share a node along an axis in equal blocks. A
        node without samples stays whole where there are several replicas: its parts would go over
        all the devices.
        """
        space = self.uses[node].space
        if space.axis(axis).kind is AxisKind.UNSPLITTABLE:
            return False
        if self.replicas > 1 and self.samples.axes[node] in (None, axis):
            return False
        return are_even_splits(space, self.splits(node, axis, degree))


def replicated_network(graph: Graph, replicas: int, samples: SampleAxes | None = None) -> Network:
    return Network(
        graph, samples or sample_axes(graph), replicas, weights_of(graph), graph.consumers()
    )


@remembered(GRAPHS)
def weights_of(graph: Graph) -> dict[str, frozenset[str]]:
    """Each value that depends on parameters and constants alone, with its parameters."""
    weights = {each.value.name: frozenset([each.value.name]) for each in graph.parameters}
    weights |= {each.value.name: frozenset() for each in graph.constants}
    for node in graph.nodes:
        names = [name for name in node.inputs if name]
        if names and all(name in weights for name in names):
            found = frozenset().union(*(weights[name] for name in names))
            weights |= {name: found for name in node.outputs if name}
    return weights


_PRODUCTS = ("matmul", "convolution")


@dataclass(slots=True)
class Region:
    """Nodes with the axis each is cut along, and the kinds of axes whose partial sums end it. It is
    `open` where some node needs a cut value whole; `leaves` are cut values that others read, or the
    model gives.
    """

    axes: dict[int, str]
    ends: set[AxisKind] = field(default_factory=set)
    open: bool = False
    leaves: set[str] = field(default_factory=set)


def seed_axis(network: Network, node: int, degree: int, tables: Set[str]) -> str | None:
    """The axis to begin a region with: rows of a lookup's table that is in `tables`, columns of a
    product's weight.
    """
    use = network.uses[node]
    inputs = network.graph.nodes[node].inputs
    for axis in use.space.axes:
        if not network.splits_on(node, axis.name, degree):
            continue
        if axis.kind is AxisKind.JOINT and use.row.kind == "memory" and inputs[0] in tables:
            return axis.name
        if use.row.kind in _PRODUCTS and axis.kind in (AxisKind.PARALLEL, AxisKind.JOINT):
            # A column indexes the product's weight and none of the values that it is applied to.
            pairs = zip(inputs, use.space.operands, strict=True)
            indexed = [name for name, words in pairs if name and _place(words, axis.name) >= 0]
            if any(map(network.weights.get, indexed)) and all(
                name in network.weights for name in indexed
            ):
                return axis.name
    return None


def grow(
    network: Network, seed: int, axis: str, degree: int, members: Set[int], fixed: dict[int, str]
) -> Region:
    """The region that begins with a node cut along an axis, among `members`. Nodes of `fixed` are
    cut already: a region may end there, where it fits. Normalisations, which would exchange
    statistics of their parts, are left whole.
    """
    graph = network.graph
    region = Region({seed: axis})
    waiting = [seed]
    cut: dict[str, int] = {}  # The dimension in which each value is cut.

    def carry(reader: int) -> None:
        """Cut a reader of cut values along the axis that they have in common, where there is
        one.
        """
        space = network.uses[reader].space
        pairs = zip(graph.nodes[reader].inputs, space.operands, strict=True)
        axes = {_outer(space, words, cut[name]) for name, words in pairs if name in cut}
        common = axes.pop() if len(axes) == 1 else None
        agreed = common is not None and space.axis(common).kind is AxisKind.AGREED
        if common is None or agreed or not network.splits_on(reader, common, degree):
            region.open = True
        elif reader in fixed:
            region.open |= fixed[reader] != common
        elif reader not in region.axes:
            region.axes[reader] = common
            heapq.heappush(waiting, reader)
        elif region.axes[reader] != common:
            region.open = True

    while waiting:
        node = heapq.heappop(waiting)
        use = network.uses[node]
        own = region.axes[node]
        for name, words in zip(graph.nodes[node].outputs, use.space.results, strict=True):
            if not name:
                continue
            place = _place(words, own)
            if (
                place < 0
            ):  # Its result does not show the cut: products add up, with a bias or without.
                sums = use.row.kind in _PRODUCTS and _place(use.space.operands[0], own) >= 0
                region.ends.add(AxisKind.SUM if sums else use.space.axis(own).kind)
                continue
            cut[name] = place
            readers = network.readers.get(name, ())
            if name in graph.outputs or not members >= set(readers):
                region.leaves.add(name)
            for reader in readers:
                if reader in members:
                    carry(reader)
    return region


def _outer(space: Space, words: tuple[tuple[str, ...], ...] | None, place: int) -> str | None:
    """The axis along which a cut dimension is cut: its outermost."""
    extents = space.axis_sizes()
    return next((name for name in (words or ())[place] if extents[name] > 1), None)


def _place(words: tuple[tuple[str, ...], ...] | None, axis: str) -> int:
    """The dimension that an axis indexes; -1 for none."""
    return next((place for place, dimension in enumerate(words or ()) if axis in dimension), -1)


def tensor_splits(
    network: Network,
    nodes: Iterable[int],
    degree: int,
    tables: Set[str],
    pays: Callable[[int], bool],
) -> tuple[tuple[int, Splits], ...]:
    """Splits that share the tables and products of a stage among `degree` devices. A region whose
    end no gathering follows is split as it is. Of others the product alone is, where that `pays`:
    its result is gathered.
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
        region = grow(network, node, axis, degree, members, axes)
        if not region.open:
            axes |= region.axes
        elif pays(node):
            axes[node] = axis
    # The nodes that compute a cut node's weights are cut, too: each device computes its part from
    # its part.
    waiting = sorted(axes)
    while waiting:
        reader = waiting.pop()
        for name, words in zip(
            network.graph.nodes[reader].inputs, network.uses[reader].space.operands, strict=True
        ):
            producer = network.graph.producer(name) if name in network.weights else None
            place = _place(words, axes[reader])
            if producer is None or producer not in members or producer in axes or place < 0:
                continue
            space = network.uses[producer].space
            own = _outer(
                space, space.results[network.graph.nodes[producer].outputs.index(name)], place
            )
            if own is not None and network.splits_on(producer, own, degree):
                axes[producer] = own
                waiting.append(producer)
    return tuple((node, (Split(axes[node], degree),)) for node in sorted(axes))


NodeSplits = tuple[tuple[int, Splits], ...]
"""Splits by node, as a stage holds them."""


def check_samples(problem: Problem, replicas: int, strategy: str, who: str = "replicas") -> None:
    """Raise InfeasibleError unless `replicas` devices, or groups of them, can share a micro-batch
    equally.
    """
    samples = problem.micro_batch_size
    if replicas > 1 and not problem.graph.batch_axes:
        raise InfeasibleError(
            (
                f"{strategy} cannot share samples among {replicas} {who}: no input of the model "
                "carries any"
            ),
            hint=(
                "say which axis of each input counts samples in model.batch_axes, or choose "
                "another strategy"
            ),
        )
    if samples % replicas:
        raise InfeasibleError(
            f"{strategy} cannot share a micro-batch of {samples} "
            f"{plural(samples, 'sample')} equally among {replicas} {who}",
            hint=(
                f"choose a micro-batch size that {replicas} divides, fewer devices, or another "
                "strategy"
            ),
        )


def with_samples_split(
    samples: SampleAxes, nodes: Iterable[int], replicas: int, found: dict[int, Splits]
) -> NodeSplits:
    """The splits `found`, and for the others of `nodes` a split of their samples. Raises
    InfeasibleError, naming the node, where samples cannot be cut into equal blocks.
    """
    others = samples.splits((node for node in nodes if node not in found), replicas)
    return tuple(sorted((*found.items(), *others)))


def one_stage(problem: Problem, splits: NodeSplits) -> Placement:
    """All nodes as one stage on all devices."""
    nodes = tuple(range(len(problem.graph.nodes)))
    devices = tuple(range(problem.cluster.size))
    return Placement(
        (Stage(nodes, devices, problem.micro_batch_size, splits, problem.recomputes_all),)
    )


def group_splits(network: Network, degree: int, nodes: Iterable[int]) -> dict[int, Splits]:
    """Return the splits of those of `nodes` that the `degree` devices of a replica share.

    Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
    Parallelism" (2019), section 3. If the nodes that a split leads to include one that needs a
    value unsharded, nothing of them is split.
    """
    if degree == 1:
        return {}
    members = tuple(nodes)
    tables = frozenset(
        network.graph.nodes[node].inputs[0] for node in members if _looks_up_data(network, node)
    )
    cut = tensor_splits(
        network, members, degree, tables & network.weights.keys(), lambda node: False
    )
    return {node: network.splits(node, split.axis, degree) for node, (split,) in cut}


def _looks_up_data(network: Network, node: int) -> bool:
    """True if a node reads from its first operand at indices that depend on the model's inputs.

    A lookup at constant positions is not one. Samples do not tell the two apart: a micro-batch of
    one sample has no sample axes.
    """
    indices = network.graph.nodes[node].inputs[1:]
    return network.uses[node].row.kind == "memory" and any(
        name and name not in network.weights for name in indices
    )


@remembered(4 * GRAPHS)
def whole_group_splits(graph: Graph, replicas: int, degree: int) -> dict[int, Splits]:
    """The same for all nodes of a graph on `replicas` replicas of `degree` devices."""
    return group_splits(replicated_network(graph, replicas), degree, range(len(graph.nodes)))


Place = TypeVar("Place")


def visited(places: Sequence[Place], chunks: int, wave: bool) -> tuple[Place, ...]:
    """The place of each stage of a chain with `chunks` stages a place. It goes over them again and
    again (Megatron's interleaving), or with `wave` back and forth (Hanayo's).
    """
    order: list[Place] = []
    for chunk in range(chunks):
        order += reversed(places) if wave and chunk % 2 else places
    return tuple(order)


def settled_stages(
    resolved: Sequence[ResolvedConstraint], groups: Sequence[tuple[int, ...]], strategy: str
) -> dict[int, int]:
    """The stage of each node for which a constraint asks for a stage, or for the devices of one of
    `groups`. `strategy` is who makes the stages. Raises ConfigurationError, naming the constraint,
    for stages or devices that there are not, and for a stage that has other devices than are asked
    for.
    """
    found: dict[int, int] = {}
    for each in resolved:
        stages = [each.constraint.stage] if each.constraint.stage is not None else []
        if each.devices is not None:
            mine = [stage for stage, group in enumerate(groups) if set(group) == set(each.devices)]
            if not mine:
                raise ConfigurationError(
                    f"{each} asks for devices {list(each.devices)}, which no stage has",
                    hint=f"the stages have devices {', '.join(str(list(group)) for group in groups)}",
                )
            stages += mine
        for stage in stages:
            if stage >= len(groups) or stage != stages[0]:
                raise ConfigurationError(
                    f"{each} asks for stage {stage}, and {strategy} makes {len(groups)}"
                    if stage >= len(groups)
                    else f"{each} asks for stage {stages[0]} and for the devices of stage {stage}",
                    hint="ask for more stages: --stages"
                    if stage >= len(groups)
                    else "give it one of the two",
                )
            found.update(dict.fromkeys(each.nodes, stage))
    return found


def check_degrees(problem: Problem, fixed: Mapping[int, Splits], placement: Placement) -> None:
    """Raise ConfigurationError for a node that cannot be split as `fixed` says over the devices of
    its stage.
    """
    stage_of = placement.stage_of()
    for node, splits in fixed.items():
        group = len(placement.stages[stage_of[node]].devices)
        if group % math.prod(split.degree for split in splits):
            raise ConfigurationError(
                f"constraints split this node {' '.join(map(str, splits))}, but "
                f"its stage has {group} {plural(group, 'device')}",
                hint="the product of the degrees must divide the number of devices",
                where=repr(problem.graph.nodes[node].name),
            )


def check_constraints_met(problem: Problem, placement: Placement, strategy: str) -> None:
    """Raise ConfigurationError, naming constraint and node, for one that a placement of one
    pipeline does not fulfil. As for strategy manual, a split along an axis asks nothing of nodes
    that do not have it.
    """
    resolved = resolved_constraints(problem)
    if not resolved:
        return
    stage_of = placement.stage_of()
    samples = sample_axes(problem.graph)
    for each in resolved:
        for node in each.nodes:
            number = stage_of[node]
            reason = _difference(each, node, number, placement.stages[number], samples)
            if reason:
                raise ConfigurationError(
                    f"{each} asks for {reason}",
                    hint=f"{strategy} decides for itself; strategy manual follows any constraint",
                    where=repr(problem.graph.nodes[node].name),
                )


def _difference(
    each: ResolvedConstraint, node: int, number: int, stage: Stage, samples: SampleAxes
) -> str:
    """Difference between what a constraint asks for and what a node gets; empty where there is
    none.
    """
    wanted = each.constraint
    if wanted.stage not in (None, number):
        return f"stage {wanted.stage}, and this node is in stage {number}"
    if each.devices is not None and set(each.devices) != set(stage.devices):
        return f"devices {list(each.devices)}, and this node is on {list(stage.devices)}"
    if wanted.split is None:
        return ""
    splits = [
        (samples.axes[node] if axis == BATCH_AXIS else axis, degree)
        for axis, degree in wanted.split
        if degree > 1
    ]
    has = {axis.name for axis in samples.uses[node].space.axes}
    given = [(split.axis, split.degree) for split in stage.splits_of(node)]
    if splits == given or any(axis not in has for axis, _ in splits):
        return ""
    texts = [
        " ".join(f"{axis}:{degree}" for axis, degree in pairs) or "not at all"
        for pairs in (wanted.split, given)
    ]
    return f"split {texts[0]}, and this node is split {texts[1]}"
