"""Strategy `tessel_shapes`: placements with the shapes V, X, M, NN and K of Tessel.

Lin et al., "Tessel: boosting distributed execution of large DNN models via flexible schedule
search", HPCA 2024, sections II and VI. An outline lists the parts of a model: parts that all
devices compute together, and chains, whose stages have one device each. The chains are partitioned
so that their stages take equally long. If the memory of a device does not suffice, they are
partitioned again with tighter limits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster, Device
from autopipe.ir.codec import FormerKey
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import even_degree_hint
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.placement import Placement, Stage, recomputed_nodes
from autopipe.ir.problem import NodeCost, Problem
from autopipe.ir.space import AxisKind
from autopipe.ir.words import plural
from autopipe.passes.analysis.chain import Chain, make_chain, range_sums
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.communication import all_gather
from autopipe.passes.cost.memory_check import (
    check_operators,
    device_memory,
    may_share_stage,
    micro_batches_in_flight,
    minimum_device_memory,
    with_required_recomputation,
)
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.partition.chain_cut import (
    best_run_ends,
    crossing_seconds,
    even_run_ends,
    limit_runs_to_memory,
    run_lengths,
)
from autopipe.passes.schedule.device_order import best_group_order
from autopipe.passes.sharding.regions import (
    STYLE_MARK,
    ReplicatedGraph,
    StageStyle,
    grow_region,
    seed_axis,
    stage_groups,
    tensor_parallel_splits,
    weight_values,
)

_MAXIMUM_BLOCKS = 768
"""Maximum number of blocks of a chain. The time of a partition grows with the square of this
number.
"""
_ATTEMPTS = 8
"""Maximum number of partitions of an outline's chains that are tried to fit into memory."""

_Floats = NDArray[np.float64]
Nodes = tuple[int, ...]
Stages = tuple[Nodes, ...]
"""For each stage: its nodes, ascending."""


@dataclass(frozen=True, slots=True)
class CostedModel(ReplicatedGraph):
    """The graph of a problem with the seconds of its nodes.

    `seconds` contains, for each unsplit node, the seconds of forward and backward, averaged over
    the device types. `on_kind` contains them for each device type.
    """

    cluster: Cluster
    seconds: _Floats
    on_kind: dict[Device, _Floats]
    precision: str

    @property
    def devices(self) -> int:
        """Number of devices of the cluster."""
        return self.cluster.size

    @property
    def small_fraction(self) -> float:
        """The fraction of the whole model below which a part counts as small: 1 / (2 · number of
        devices).
        """
        return 0.5 / self.devices

    @property
    def small_seconds(self) -> float:
        """The seconds below which a part of the model counts as small."""
        return self.small_fraction * float(self.seconds.sum())

    def seconds_of(self, nodes: Iterable[int]) -> float:
        """Return the sum of the seconds of `nodes`."""
        return float(self.seconds[list(nodes)].sum())


def costed_model(problem: Problem) -> CostedModel:
    """Return the costed model of a problem. Problems that differ only in fields that do not affect
    costs share one object.
    """
    return _make_costed_model(
        problem.graph, problem.work, problem.cluster, problem.precision, problem.train
    )


@memoize(MAX_CACHED_GRAPHS)
def _make_costed_model(
    graph: Graph, work: tuple[NodeCost, ...], cluster: Cluster, precision: str, train: bool
) -> CostedModel:
    """Return the costed model, from the fields of a problem that affect it."""
    on_kind = {}
    for device in cluster.kinds:
        forward, backward = node_seconds(work, device, precision)
        on_kind[device] = forward + (backward if train else 0.0)
    seconds = np.mean(list(on_kind.values()), axis=0)
    readers = graph.consumers()
    return CostedModel(
        graph,
        sample_axes(graph),
        1,
        weight_values(graph),
        readers,
        cluster,
        seconds,
        on_kind,
        precision,
    )


@memoize(MAX_CACHED_GRAPHS)
def model_chain(model: CostedModel, together: Stages = ()) -> Chain:
    """Return all nodes as a chain of blocks. The nodes of each tuple in `together` are in one
    block.
    """
    return make_chain(model.graph, model.seconds, _MAXIMUM_BLOCKS, together)


@dataclass(frozen=True, slots=True, eq=False)
class PartitionableChain:
    """A chain of blocks of nodes that can be partitioned between blocks, with the costs of all
    contiguous ranges of blocks.
    """

    blocks: Stages
    lengths: dict[Device | None, tuple[_Floats, _Floats]]
    """For each device type, and for None (the average over the types): the seconds of each block,
    and a matrix [a, b] with the seconds of blocks a to b-1 plus the communication at both ends.
    """
    sizes: _Floats
    """For each block: bytes of the parameters that no earlier block reads."""

    def partition_evenly(
        self, kinds: Sequence[Device | None], capacity: Sequence[float] = ()
    ) -> Stages:
        """Partition the chain into one contiguous range of blocks for each of the device types
        `kinds` (None: the average over the types), so that the slowest range takes the least time.
        Return the nodes of each range.

        If `capacity` is given, it contains the maximum bytes of parameters of each range. Raise
        InfeasibleError if there are too few blocks or the capacities are too small.
        """
        count = len(kinds)
        if len(self.blocks) < count:
            raise InfeasibleError(
                f"{len(self.blocks)} {plural(len(self.blocks), 'operator')} "
                f"cannot be partitioned into {count} {plural(count, 'stage')}",
                hint="use fewer devices, or decrease strategy.stages_per_rank",
            )
        known = even_run_ends(np.sum([self.lengths[kind][0] for kind in kinds], axis=0), count)
        lengths = [self.lengths[kind][1] for kind in kinds]
        if min(capacity, default=math.inf) < math.inf:
            lengths = limit_runs_to_memory(lengths, range_sums(self.sizes), capacity)
        stops = best_run_ends(lengths, known)
        if not stops:
            raise InfeasibleError(
                f"the parameters do not fit into the memory of {count} {plural(count, 'stage')}",
                hint="use more devices",
            )
        between = itertools.pairwise([0, *stops])
        return tuple(
            tuple(sorted(itertools.chain(*self.blocks[start:stop]))) for start, stop in between
        )


@memoize(MAX_CACHED_GRAPHS)
def node_chain(model: CostedModel, chain: Chain, nodes: Sequence[int]) -> PartitionableChain:
    """Return `nodes` as a chain, with one block for the nodes of each block of `chain`."""
    groups: dict[int, list[int]] = {}
    for node in nodes:
        groups.setdefault(int(chain.block_of[node]), []).append(node)
    blocks = tuple(tuple(sorted(groups[block])) for block in sorted(groups))
    place = {node: index for index, block in enumerate(blocks) for node in block}
    link = model.cluster.slowest_link(range(model.devices))
    crossing = crossing_seconds(model.graph, model.precision, place, len(blocks), link)
    lengths: dict[Device | None, tuple[_Floats, _Floats]] = {}
    for kind, seconds in ((None, model.seconds), *model.on_kind.items()):
        own = np.array([float(seconds[list(block)].sum()) for block in blocks])
        lengths[kind] = own, run_lengths(own, crossing, crossing)
    sizes = np.zeros(len(blocks))
    for parameter in model.graph.parameters:
        readers = [
            place[node] for node in model.readers.get(parameter.value.name, ()) if node in place
        ]
        if readers:
            sizes[min(readers)] += parameter.value.bytes
    return PartitionableChain(blocks, lengths, sizes)


def make_unsplit_stage(problem: Problem, nodes: Sequence[int], devices: tuple[int, ...]) -> Stage:
    """Return a stage whose nodes are not split."""
    return Stage(
        tuple(sorted(nodes)), devices, problem.micro_batch_size, recompute=problem.recomputes_all
    )


def make_split_stage(
    problem: Problem,
    model: CostedModel,
    nodes: Sequence[int],
    devices: tuple[int, ...],
    tables: frozenset[str],
) -> Stage:
    """Return a stage whose devices split the parameters `tables`: embedding tables and head weights
    (weights of the matmuls that compute logits). They also split the matmuls for which a split
    saves more time than the gather of the result costs.
    """
    stage = make_unsplit_stage(problem, nodes, devices)
    degree = len(devices)
    if degree == 1:
        return stage
    gather = all_gather(model.cluster, devices)

    def split_pays_off(node: int) -> bool:
        """True if a split of the node saves more time than the gathers of its result in forward and
        backward cost.
        """
        size = sum(
            model.graph.type_of(name).bytes for name in model.graph.nodes[node].outputs if name
        )
        return float(model.seconds[node]) * (1 - 1 / degree) > 2 * gather.seconds(size)

    return replace(
        stage, splits=tensor_parallel_splits(model, nodes, degree, tables, split_pays_off)
    )


@dataclass(frozen=True, slots=True, eq=False)
class StageRow:
    """A chain on a row of devices: it has one stage on each entry of `devices`, in order. A device
    may occur several times.
    """

    line: PartitionableChain
    devices: tuple[int, ...]
    pipeline: int = 0


Outline = tuple[Stage | StageRow, ...]
"""The parts of a placement: finished stages, and chains that are not partitioned into stages yet.
"""


def place_even_chains(problem: Problem, outline: Outline, capacity: Sequence[float]) -> Placement:
    """Return the placement of an outline in which the stages of each chain take about equally long.
    An outline contains finished stages, and chains that are not partitioned into stages yet.

    `capacity` contains, for each device, the maximum number of bytes of parameters of a stage.
    Raise InfeasibleError if a chain has too few operators or the capacities are too small.
    """
    stages: list[Stage] = []
    for part in outline:
        if isinstance(part, Stage):
            stages.append(part)
            continue
        kinds = [problem.cluster.devices[device] for device in part.devices]
        runs = part.line.partition_evenly(kinds, [capacity[device] for device in part.devices])
        own = (
            make_unsplit_stage(problem, run, (device,))
            for run, device in zip(runs, part.devices, strict=True)
        )
        stages += (replace(stage, pipeline=part.pipeline) for stage in own)
    return Placement(tuple(stages))


def place_fitting_chains(problem: Problem, outline: Outline) -> Placement:
    """Return the placement of an outline: finished stages, and chains that are not partitioned into
    stages yet. While memory does not suffice, the chains are partitioned again with smaller
    capacities for parameters.

    Of all placements that were tried, the one with the smallest excess over the memory is returned:
    first the excess under any schedule counts, then the excess under 1F1B. Raise InfeasibleError if
    a chain has too few operators.
    """
    capacity = (math.inf,) * problem.cluster.size
    placement = place_even_chains(problem, outline, capacity)
    found = []
    for _ in range(_ATTEMPTS):
        excess, lighter = _excess_and_capacity(problem, placement, capacity)
        found.append((excess, placement))
        if lighter == capacity:
            break
        try:
            capacity = lighter
            placement = place_even_chains(problem, outline, lighter)
        except InfeasibleError:
            break
    return min(found, key=lambda each: each[0])[1]


def _excess_and_capacity(
    problem: Problem, placement: Placement, capacity: tuple[float, ...]
) -> tuple[tuple[int, int], tuple[float, ...]]:
    """Return ((excess under any schedule, excess under 1F1B), capacities).

    The excess is the number of bytes by which the fullest device exceeds its memory, at least 0. If
    a device exceeds its memory, its new capacity for parameters is the number of parameter bytes of
    its largest stage, reduced by the fraction of its stages' memory that is in excess. Stages are
    assumed to recompute if it is permitted, because memory is scarce.
    """
    if problem.train and problem.recompute == "auto":
        placement = Placement(tuple(replace(stage, recompute=True) for stage in placement.stages))
    costs = stage_costs(problem, placement)
    needs = (
        minimum_device_memory(problem, placement, costs),
        device_memory(problem, placement, costs),
    )
    least, usual = (
        [need - problem.memory_of(device) for device, need in enumerate(each)] for each in needs
    )
    most = max(0, *least), max(0, *usual)
    if not any(most):
        return most, capacity
    counts = micro_batches_in_flight(problem, placement)
    found = list(capacity)
    for device, over in enumerate(least if most[0] else usual):
        own = [index for index, stage in enumerate(placement.stages) if stage.devices == (device,)]
        held = sum(costs[index].memory_bytes(counts[index]) for index in own)
        if held > over > 0:
            largest = max(costs[index].parameter_bytes for index in own)
            found[device] = min(found[device], largest * (1 - over / held))
    return most, tuple(found)


@dataclass(frozen=True, slots=True)
class SharedTableNodes:
    """A gather from a large embedding table, or a head (the matmul that computes logits) over many
    classes, together with all nodes that stay sharded with it.
    """

    table: str
    nodes: frozenset[int]


@memoize(MAX_CACHED_GRAPHS)
def large_tables(model: CostedModel, at_least_one: bool) -> frozenset[str]:
    """Return the names of the large embedding tables and head weights (weights of the matmuls that
    compute logits). A table is large if it has at least 1 / (2 · number of devices) of the bytes of
    all parameters.

    If there is no large table and `at_least_one` is True, return the largest embedding table, and
    all tables that are at least half as large.
    """
    graph = model.graph
    looked_up, classes = (frozenset[str]().union(*each) for each in _tables_read(model))
    sizes = {name: graph.type_of(name).bytes for name in sorted(looked_up | classes)}
    least = model.small_fraction * sum(each.value.bytes for each in graph.parameters)
    if at_least_one and looked_up and not any(size >= least for size in sizes.values()):
        least = max(sizes[name] for name in looked_up) / 2
    return frozenset(name for name, size in sizes.items() if size >= least)


def shared_table_nodes(
    model: CostedModel, tables: frozenset[str], degree: int
) -> tuple[SharedTableNodes, ...]:
    """Return the gathers from one of `tables`, and the heads (matmuls that compute logits) that
    multiply by one of them, in the order of the graph. Each is returned with all nodes that stay
    sharded with it.

    Raise InfeasibleError, with the name of the table, if `degree` devices cannot split it evenly.
    """
    everything = frozenset(range(len(model.graph.nodes)))
    found = []
    for node, (looked_up, weights) in enumerate(zip(*_tables_read(model), strict=True)):
        read = sorted((looked_up | weights) & tables)
        if not read:
            continue
        axis = seed_axis(model, node, degree, tables)
        if axis is None:
            space = model.uses[node].space
            column = seed_axis(model, node, 1, frozenset([read[0]]))
            size = space.axis(column).size if column else 0
            raise InfeasibleError(
                f"{degree} {plural(degree, 'device')} cannot evenly split the {size} "
                f"{plural(size, 'row')} of the embedding table {read[0]!r}",
                hint=even_degree_hint(size, degree),
                where=repr(model.graph.nodes[node].name),
            )
        region = grow_region(model, node, axis, degree, everything, {})
        cut = frozenset({node}) if region.open else frozenset(region.axes)
        found.append(SharedTableNodes(read[0], cut | model.weight_producers(node)))
    return tuple(found)


@memoize(MAX_CACHED_GRAPHS)
def _tables_read(
    model: CostedModel,
) -> tuple[tuple[frozenset[str], ...], tuple[frozenset[str], ...]]:
    """Return (tables, weights).

    tables: for each node, the embedding tables from which it gathers rows.
    weights: for each node, the weights by which it multiplies if it is a head (a matmul that
    computes logits), otherwise none.
    """
    looked_up = []
    heads = []
    for node, (use, each) in enumerate(zip(model.uses, model.graph.nodes, strict=True)):
        joint = any(axis.kind is AxisKind.JOINT for axis in use.space.axes)
        is_lookup = (
            joint and use.row.kind == "memory" and model.graph.parameter(each.inputs[0]) is not None
        )
        looked_up.append(frozenset(each.inputs[:1] if is_lookup else ()))
        heads.append(model.parameters_of(node) if _is_head(model, node) else frozenset())
    return tuple(looked_up), tuple(heads)


def _is_head(model: CostedModel, node: int) -> bool:
    """True for a matmul whose columns are classes: its result reaches a softmax or a loss over the
    columns, or is an output of the model.
    """
    axis = (
        None
        if model.is_weight(node) or not model.parameters_of(node)
        else seed_axis(model, node, 1, frozenset())
    )
    if axis is None:
        return False
    region = grow_region(model, node, axis, 1, frozenset(range(len(model.graph.nodes))), {})
    return not region.open and (AxisKind.JOINT in region.ends or bool(region.leaves))


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Nodes that belong together. `shared` is true if all devices compute them together, and false
    for a chain.
    """

    nodes: tuple[int, ...]
    shared: bool


def chain_parts(
    model: CostedModel, chain: Chain, wide: Sequence[SharedTableNodes]
) -> tuple[ModelPart, ...]:
    """Return the parts of the chain, in order. `wide` contains gathers from large embedding tables
    and large heads (matmuls that compute logits), each with the nodes that stay sharded with it.

    A shared part, which all devices compute together, contains the nodes of some elements of
    `wide`, and all nodes of the chain between the first and last node of each element. All other
    nodes form chains. A chain of little work (`CostedModel.small_seconds`) joins an adjacent shared
    part.
    """
    place = {node: index for index, node in enumerate(chain.order)}
    shared: set[int] = set()
    for each in wide:
        places = [place[node] for node in each.nodes]
        shared.update(range(min(places), max(places) + 1))
    return _merge_parts(
        model, (ModelPart((node,), index in shared) for node, index in place.items())
    )


def move_gathers_first(
    model: CostedModel, parts: Sequence[ModelPart], wide: Sequence[SharedTableNodes]
) -> tuple[ModelPart, ...]:
    """Return the parts, after all elements of `wide` that depend only on inputs of the model were
    moved to the first part.

    `wide` contains gathers from large embedding tables and large heads (matmuls that compute
    logits). The gathers usually depend on inputs only, so one chain remains between gathers and
    heads.
    """
    nodes = model.graph.nodes
    again = recomputed_nodes(model.graph)
    free = {value.name for value in model.graph.inputs} | model.weights.keys()
    early: set[int] = set()
    for each in wide:
        # The nodes can be first if they read only inputs, parameters, their own results, and values
        # that each stage computes locally.
        made = {name for node in each.nodes | again for name in nodes[node].outputs}
        if all(
            name in made or name in free
            for node in each.nodes
            for name in nodes[node].inputs
            if name
        ):
            early |= each.nodes
    late = {node for each in wide for node in each.nodes} - early
    left = (tuple(node for node in part.nodes if node not in early) for part in parts)
    behind = (ModelPart(own, not late.isdisjoint(own)) for own in left)
    return _merge_parts(model, (ModelPart(tuple(sorted(early)), True), *behind))


def _merge_parts(model: CostedModel, parts: Iterable[ModelPart]) -> tuple[ModelPart, ...]:
    """Return the non-empty parts, after consecutive parts of the same kind were merged.

    A chain of little work (`CostedModel.small_seconds`) joins an adjacent part: the next one, or
    the previous one at the end of the model.
    """
    runs = itertools.groupby((part for part in parts if part.nodes), key=attrgetter("shared"))
    whole = [
        ModelPart(tuple(node for part in run for node in part.nodes), shared)
        for shared, run in runs
    ]
    found: list[ModelPart] = []
    carried: Nodes = ()
    for part in whole:
        small = not part.shared and model.seconds_of(part.nodes) < model.small_seconds
        if small and part is not whole[-1]:
            carried += part.nodes
            continue
        before = (
            found.pop()
            if found and (small or found[-1].shared is part.shared)
            else ModelPart((), part.shared)
        )
        found.append(ModelPart((*before.nodes, *carried, *part.nodes), before.shared))
        carried = ()
    return tuple(found)


def find_join(model: CostedModel, order: tuple[int, ...]) -> Stages | None:
    """Return the nodes of each branch, and last all remaining nodes, which follow the join of the
    branches. Return None if there is no join.

    The join is the first node of the graph that reads several large branches. A branch is large if
    it has at least 1 / (2 · number of devices) of all work, and at least half of the work of the
    largest branch. (So the first layer of a decoder is not a branch next to the encoder.) Values
    computed from parameters only, masks and positions do not connect branches.
    """
    graph = model.graph
    apart = recomputed_nodes(graph) | {
        node for node in range(len(graph.nodes)) if model.is_weight(node)
    }
    component: dict[int, list[int]] = {}
    # Seconds of the nodes of each component. The key is the `id` of the list of the component's
    # nodes.
    work: dict[int, float] = {}
    for node in sorted(set(range(len(graph.nodes))) - apart):
        producers = [graph.producer(name) for name in graph.nodes[node].inputs if name]
        met = {
            id(component[each]): component[each]
            for each in producers
            if each is not None and each in component
        }
        most = max((work[each] for each in met), default=0.0)
        large = [
            nodes for each, nodes in met.items() if work[each] >= max(model.small_seconds, most / 2)
        ]
        if len(large) > 1:
            return _branch_nodes(model, order, sorted(map(sorted, large)), apart)
        joined = (
            next(iter(met.values()))
            if len(met) == 1
            else [each for nodes in met.values() for each in nodes]
        )
        work[id(joined)] = sum(work[each] for each in met) + float(model.seconds[node])
        joined.append(node)
        component |= dict.fromkeys(joined if len(met) > 1 else [node], joined)
    return None


def _branch_nodes(
    model: CostedModel, order: tuple[int, ...], branches: list[list[int]], apart: Set[int]
) -> Stages:
    """Return the nodes of each branch, and last all other nodes. Each of the nodes `apart` (masks,
    positions, weights) joins the first branch that reads it, or the other nodes if no branch does.
    """
    home = {node: index for index, nodes in enumerate(branches) for node in nodes}
    rest = len(branches)
    for node in reversed(order):
        if node not in home:
            names = [name for name in model.graph.nodes[node].outputs if name]
            homes = [home[reader] for name in names for reader in model.readers.get(name, ())]
            home[node] = min(homes, default=rest) if node in apart else rest
    return tuple(
        tuple(sorted(node for node, index in home.items() if index == each))
        for each in range(rest + 1)
    )


def divide_devices(weights: Sequence[float], devices: int) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each part: consecutive devices, at least one for each part. One after
    the other, each further device is given to the part with the most work per device. `weights`
    contains the work of each part.
    """
    counts = [1] * len(weights)
    for _ in range(devices - len(weights)):
        counts[max(range(len(weights)), key=lambda part: weights[part] / counts[part])] += 1
    starts = [sum(counts[:part]) for part in range(len(weights))]
    return tuple(
        tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True)
    )


_SHAPES = ("auto", "v", "x", "m", "nn", "k")


@dataclass(frozen=True, slots=True)
class TesselShapes:
    """Place a model in the shape of a V, X, M, NN or K, which are the placements of Tessel."""

    shape: str = "auto"
    """`v`: a chain of stages. `x`: two chains in opposite directions over the devices, with two
    copies of the parameters. `m`: large embedding tables and heads (matmuls that compute logits)
    are split over all devices, and the chain between them has one device per stage. `nn`: like `m`,
    with a second embedding that divides the chain, as between encoder and decoder. `k`: parallel
    branches have separate devices, and the nodes after their join are split over all devices.
    `auto`: the first of nn, m and k for which the model has the required parts, otherwise v.
    """
    stages_per_rank: Annotated[int, FormerKey("chunks")] = 1
    """Number of stages that each device has in a chain."""
    style: Annotated[StageStyle, STYLE_MARK] = "loop"
    """Order in which consecutive stages of a chain visit the devices. With three devices, `loop` is
    0 1 2 0 1 2, and `v` is 0 1 2 2 1 0.
    """

    name: ClassVar[str] = "tessel_shapes"

    def division(self, graph: Graph) -> Division:
        """Return `Division.MANY`: a pipeline is kept busy by many micro-batches."""
        return Division.MANY

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for options that are out of range, or if the problem has
        constraints. Raise InfeasibleError for a model without operators.
        """
        if self.shape.lower() not in _SHAPES:
            raise ConfigurationError(
                f"shape {self.shape!r} is unknown",
                hint=f"set strategy.shape to one of {', '.join(_SHAPES)}",
                where="strategy",
            )
        if self.stages_per_rank < 1:
            raise ConfigurationError(
                f"stages_per_rank is {self.stages_per_rank}, expected at least 1",
                hint="set strategy.stages_per_rank to at least 1",
                where="strategy",
            )
        if problem.constraints:
            raise ConfigurationError(
                "tessel_shapes does not support constraints",
                hint="use strategy manual, which follows all constraints",
                where="constraints",
            )
        check_operators(problem)

    def run(self, problem: Problem) -> Placement:
        """Return the placement with the shape of option `shape`.

        Raise InfeasibleError if the model does not have the parts of the shape, if memory does not
        suffice, or if devices of different types would share a part in the shapes m, nn and k.
        """
        return best_group_order(problem, self._place)

    def _place(self, problem: Problem) -> Placement:
        """Return the placement for one order of the cluster's device groups: the order in
        `problem`. Raise as `run` does.
        """
        model = costed_model(problem)
        shape = self.shape.lower()
        outline = None
        if shape == "auto":
            shape = "v"
            for each in ("nn", "m", "k") if may_share_stage(problem, range(model.devices)) else ():
                # Use the first shape for which the model has the parts and the devices suffice.
                with suppress(InfeasibleError):
                    found = self._make_outline(problem, model, each, only_large=True)
                    place_even_chains(problem, found, (math.inf,) * model.devices)
                    outline = found
                    shape = each
                    break
        placed = place_fitting_chains(problem, outline or self._make_outline(problem, model, shape))
        placement = with_required_recomputation(problem, placed)
        return (
            replace(placement, options=(("shape", shape),))
            if self.shape.lower() == "auto"
            else placement
        )

    def _make_outline(
        self, problem: Problem, model: CostedModel, shape: str, only_large: bool = False
    ) -> Outline:
        """Return the outline of the model in shape `shape`: finished stages, and chains that are
        not partitioned into stages yet.

        With `only_large`, raise InfeasibleError unless the shape is worthwhile. Shapes M and NN are
        worthwhile for large embedding tables or heads, and shape K if most work after the join of
        the branches can be split.
        """
        if shape == "k":
            return tuple(self._outline_around_join(problem, model, only_large))
        if shape in ("m", "nn"):
            return tuple(self._outline_around_tables(problem, model, shape, only_large))
        if shape == "x" and model.devices < 2:
            raise InfeasibleError(
                "shape x requires at least 2 devices, but the cluster has 1",
                hint="set strategy.shape: v",
            )
        line = model_chain(model)
        devices = tuple(range(model.devices))
        down = self._make_chain(model, line, line.order, devices)
        return (
            (down,)
            if shape == "v"
            else (
                down,
                replace(self._make_chain(model, line, line.order, devices[::-1]), pipeline=1),
            )
        )

    def _outline_around_tables(
        self, problem: Problem, model: CostedModel, shape: str, only_large: bool
    ) -> Iterator[Stage | StageRow]:
        """Yield the parts of the outline for shapes M and NN: stages on all devices that split
        large embedding tables and heads (matmuls that compute logits), and chains between them.

        With `only_large`, only large tables count; otherwise the largest embedding table counts if
        none is large. Raise InfeasibleError if the model does not have these parts.
        """
        tables = large_tables(model, at_least_one=not only_large)
        wide = shared_table_nodes(model, tables, model.devices)
        if not wide:
            raise InfeasibleError(
                (
                    f"shape {shape} splits large embedding tables over all devices, but the "
                    "model lacks large tables"
                ),
                hint="set strategy.shape: v",
            )
        line = model_chain(model, tuple(tuple(each.nodes) for each in wide))
        parts = chain_parts(model, line, wide)
        if shape == "m":
            parts = move_gathers_first(model, parts, wide)
        chains = [part for part in parts if not part.shared]
        wanted = {"m": 1, "nn": 2}[shape]
        if len(chains) != wanted:
            names = ", ".join(sorted({repr(each.table) for each in wide}))
            raise InfeasibleError(
                f"shape {shape} requires {wanted} {plural(wanted, 'chain')} of operators between "
                f"large embedding tables, but the model with tables {names} has {len(chains)}",
                hint="set strategy.shape: " + {1: "m", 2: "nn"}.get(len(chains), "v"),
            )
        if wanted > model.devices:
            raise InfeasibleError(
                f"shape {shape} requires at least {wanted} {plural(wanted, 'device')}, but the "
                f"cluster has {model.devices}"
            )
        everyone = tuple(range(model.devices))
        groups = iter(
            divide_devices([model.seconds_of(part.nodes) for part in chains], model.devices)
        )
        for part in parts:
            if part.shared:
                yield make_split_stage(problem, model, part.nodes, everyone, tables)
            else:
                yield self._make_chain(model, line, part.nodes, next(groups))

    def _outline_around_join(
        self, problem: Problem, model: CostedModel, only_shared: bool
    ) -> Iterator[Stage | StageRow]:
        """Yield the parts of the outline for shape K: branches on separate devices, then the
        remaining nodes over all devices.

        Raise InfeasibleError if the model has no branches or more branches than there are devices.
        With `only_shared`, raise it also if most of the remaining work cannot be split.
        """
        line = model_chain(model)
        found = find_join(model, line.order)
        if found is None or len(found) - 1 > model.devices:
            count = (
                "0"
                if found is None
                else f"{len(found) - 1} for {model.devices} {plural(model.devices, 'device')}"
            )
            raise InfeasibleError(
                "shape k requires branches on at least one device each, but the number of "
                f"branches is {count}",
                hint="set strategy.shape: v",
            )
        *branches, rest = found
        tables = large_tables(model, at_least_one=False)
        last = make_split_stage(problem, model, rest, tuple(range(model.devices)), tables)
        work = model.seconds_of(rest)
        shared = model.seconds_of(node for node, _ in last.splits)
        if only_shared and shared < work / 2 and work >= model.small_seconds:
            raise InfeasibleError(
                f"{model.devices} {plural(model.devices, 'device')} cannot split the nodes after "
                "the join of the branches, so shape k is not possible"
            )
        groups = divide_devices([model.seconds_of(branch) for branch in branches], model.devices)
        for branch, devices in zip(branches, groups, strict=True):
            yield self._make_chain(model, line, branch, devices)
        yield last

    def _make_chain(
        self, model: CostedModel, line: Chain, nodes: tuple[int, ...], devices: tuple[int, ...]
    ) -> StageRow:
        """Return `nodes` as a chain on `devices`, with `stages_per_rank` stages per device in the
        order of option `style`.
        """
        return StageRow(
            node_chain(model, line, nodes),
            stage_groups(devices, self.stages_per_rank, self.style),
        )
