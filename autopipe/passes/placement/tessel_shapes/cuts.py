"""A run of nodes cut into stages that take equally long.

Tables and heads that are too large for one device's share: what M and NN share among all devices.

A model in a line of parts, those that all devices share and the chains between them.

Chains cut anew where a device's memory does not hold its stages.

Input of the shapes: a problem's graph with its uses, its line of blocks and the seconds of each node.

A shape before its chains are cut: which devices share what, and which go over a chain's stages one by one.

Nodes as a stage: on one device, or shared among several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster, Device
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import even_degree_hint
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.placement import Placement, Stage, recomputed_nodes
from autopipe.ir.problem import Problem, Work
from autopipe.ir.space import AxisKind
from autopipe.passes.analysis.chain import Chain, make_chain
from autopipe.passes.analysis.operators import uses_of
from autopipe.passes.cost.communication import all_gather
from autopipe.passes.cost.memory_check import device_memory, in_flight, least_memory
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.sharding.regions import Network, grow, seed_axis, tensor_splits, weights_of

_MOST_BLOCKS = 768
"""Places to cut that are considered: time grows with their square."""


@dataclass(frozen=True, slots=True)
class CostedModel(Network):
    """The network of a problem.

    `seconds` are those of forward and backward of each whole node, on average over kinds of devices, `on_kind` those on
    each kind.
    """

    cluster: Cluster
    seconds: NDArray[np.float64]
    on_kind: dict[Device, NDArray[np.float64]]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.cluster.size

    @property
    def share(self) -> float:
        """Half a device's equal share of all: what has less is small."""
        return 0.5 / self.devices

    def weighs(self, nodes: Iterable[int]) -> float:
        """Seconds of nodes."""
        return float(self.seconds[list(nodes)].sum())


def costed_model(problem: Problem) -> CostedModel:
    """The model of a problem: one for all shapes, and for problems that differ in what costs nothing."""
    return _costed(problem.graph, problem.work, problem.cluster, problem.precision, problem.train)


@remembered(GRAPHS)
def _costed(graph: Graph, work: tuple[Work, ...], cluster: Cluster, precision: str, train: bool) -> CostedModel:
    on_kind = {}
    for device in cluster.kinds:
        forward, backward = node_seconds(work, device, precision)
        on_kind[device] = forward + (backward if train else 0.0)
    seconds = np.mean(list(on_kind.values()), axis=0)
    return CostedModel(graph, uses_of(graph), weights_of(graph), graph.consumers(), cluster, seconds, on_kind)


@remembered(GRAPHS)
def whole_line(model: CostedModel) -> Chain:
    """The nodes as a line of blocks."""
    return line_around(model, ())


def line_around(model: CostedModel, together: Iterable[Iterable[int]]) -> Chain:
    """The same with each of the sets of `together` in one block."""
    return make_chain(model.graph, model.seconds, _MOST_BLOCKS, tuple(map(tuple, together)))


_ROUNDING = 1e-9
"""Share of a sum of seconds that rounding may be off by."""

_Floats = NDArray[np.float64]
Stages = tuple[tuple[int, ...], ...]
"""The nodes of each stage, ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class CutLine:
    """A run of nodes in blocks, between which it may be cut, and what tells where."""

    blocks: Stages
    seconds: _Floats
    """Of each block, on average over kinds of devices."""
    on_kind: dict[Device, _Floats]
    crossing: _Floats
    """For each place between two blocks, and 0 at both ends, the seconds of sending what crosses it."""
    sizes: _Floats
    """Bytes of the parameters that each block is the first to read."""

    def even(self, count: int) -> Stages:
        """`count` runs of blocks whose slowest is fastest, with the time that messages take at either end."""
        return self._cut([self.seconds] * count, [np.inf] * count)

    def even_on(self, kinds: Sequence[Device], room: Sequence[float]) -> Stages:
        """The same for a run on each of some devices; none has more bytes of parameters than there is room for.

        Raises InfeasibleError where the blocks are too few or the room is.
        """
        return self._cut([self.on_kind[kind] for kind in kinds], room)

    def _cut(self, seconds: Sequence[_Floats], room: Sequence[float]) -> Stages:
        count = len(room)
        if len(self.blocks) < count:
            raise InfeasibleError(
                f"{len(self.blocks)} operators cannot be cut into {count} stages",
                hint="take fewer devices or fewer chunks",
            )
        stops = best_stops(seconds, self.crossing, self.sizes, room)
        if not stops:
            raise InfeasibleError(f"{count} stages have no room for their parameters", hint="use more devices")
        runs = zip([0, *stops[:-1]], stops, strict=True)
        return tuple(tuple(sorted(node for block in self.blocks[start:stop] for node in block)) for start, stop in runs)


@remembered(GRAPHS)
def line_of(model: CostedModel, chain: Chain, nodes: Sequence[int]) -> CutLine:
    """Nodes of `nodes` in each block of a chain."""
    groups: dict[int, list[int]] = {}
    for node in nodes:
        groups.setdefault(int(chain.block_of[node]), []).append(node)
    blocks = tuple(tuple(sorted(groups[block])) for block in sorted(groups))
    on_kind = {
        kind: np.array([float(seconds[list(block)].sum()) for block in blocks])
        for kind, seconds in model.on_kind.items()
    }
    seconds = np.array([model.weighs(block) for block in blocks])
    return CutLine(blocks, seconds, on_kind, _crossing_seconds(model, blocks), _parameter_bytes(model, blocks))


def _crossing_seconds(model: CostedModel, blocks: Stages) -> _Floats:
    """`CutLine.crossing` of some blocks."""
    graph, recomputed = model.graph, recomputed_nodes(model.graph)
    link = model.cluster.slowest_link(range(model.devices))
    place = {node: index for index, block in enumerate(blocks) for node in block}
    change = np.zeros(len(blocks) + 2)
    for node in place.keys() - recomputed:
        for name in graph.nodes[node].outputs:
            last = max((place[reader] for reader in model.readers.get(name, ()) if reader in place), default=0)
            if last > place[node]:
                price = link.seconds(graph.type_of(name).bytes)
                change[place[node] + 1] += price
                change[last + 1] -= price
    crossing: _Floats = np.cumsum(change)[: len(blocks) + 1]
    crossing[[0, -1]] = 0.0
    return crossing


def _parameter_bytes(model: CostedModel, blocks: Stages) -> _Floats:
    """`CutLine.sizes` of some blocks."""
    seen: set[str] = set()
    found = np.zeros(len(blocks))
    for index, block in enumerate(blocks):
        read = {name for node in block for name in model.graph.nodes[node].inputs if model.graph.parameter(name)} - seen
        found[index] = sum(model.graph.type_of(name).bytes for name in read)
        seen |= read
    return found


def best_stops(
    seconds: Sequence[_Floats],
    crossing: _Floats,
    sizes: _Floats,
    room: Sequence[float],
) -> list[int]:
    """Where each of the runs ends, one for each entry of `room`, which no run's sum of `sizes` exceeds.

    The largest sum of a run's own `seconds` is least, what crosses its ends counted with it. [] where there is no
    answer. A run that takes longer than the slowest of an answer that is known cannot be part of the best, so that few
    starts are looked at for each end.
    """
    places = np.arange(len(crossing))
    width = _most_blocks(seconds, crossing, sizes, room)
    ends, size = _before(crossing, width, 0.0), _sums(sizes, width)
    best = np.full(len(places), np.inf)
    best[0] = 0.0
    chosen = []
    costs: dict[tuple[int, float], _Floats] = {}
    for own, most in zip(seconds, room, strict=True):
        key = id(own), most
        if key not in costs:
            whole = _sums(own, width) + crossing[:, None] + ends
            costs[key] = np.where(size > most, np.inf, whole)
        reached = np.maximum(_before(best, width, np.inf), costs[key])
        start = reached.argmin(axis=1)
        best = reached[places, start]
        chosen.append(start + places - width)
    if not np.isfinite(best[-1]):
        return []
    stops = [len(places) - 1]
    for start in reversed(chosen[1:]):
        stops.append(int(start[stops[-1]]))
    return stops[::-1]


def _most_blocks(
    seconds: Sequence[_Floats],
    crossing: _Floats,
    sizes: _Floats,
    room: Sequence[float],
) -> int:
    """The most blocks that a run can have which is no slower than the slowest of runs with equal work."""
    blocks, count = len(sizes), len(room)
    done = np.concatenate(([0.0], np.cumsum(np.sum(seconds, axis=0))))
    spread = np.searchsorted(done, done[-1] * np.arange(1, count + 1) / count)
    stops = [0]
    for stage, stop in enumerate(spread):
        stops.append(min(max(int(stop), stops[-1] + 1), blocks - count + 1 + stage))
    stops[-1] = blocks
    runs = list(itertools.pairwise(stops))
    held = np.concatenate(([0.0], np.cumsum(sizes)))
    if any(held[stop] - held[start] > most for (start, stop), most in zip(runs, room, strict=True)):
        return blocks
    slowest = max(
        float(own[start:stop].sum() + crossing[start] + crossing[stop])
        for own, (start, stop) in zip(seconds, runs, strict=True)
    )
    found = 1
    for own in {id(each): each for each in seconds}.values():
        done = np.concatenate(([0.0], np.cumsum(own)))
        first = np.searchsorted(done, done - slowest * (1 + _ROUNDING) - _ROUNDING * done[-1])
        found = max(found, int((np.arange(blocks + 1) - first).max()))
    return found


def _before(figures: _Floats, width: int, none: float) -> _Floats:
    """At [b, j] entry b - width + j; `none` before the first."""
    return np.lib.stride_tricks.sliding_window_view(np.concatenate((np.full(width, none), figures)), width)[:-1]


def _sums(figures: _Floats, width: int) -> _Floats:
    """At [b, j] the sum from entry b - width + j to b - 1; infinite where there is no such start."""
    done = np.concatenate(([0.0], np.cumsum(figures)))
    found: _Floats = done[:, None] - _before(done, width, -np.inf)
    return found


def stage_of(problem: Problem, nodes: Sequence[int], devices: tuple[int, ...]) -> Stage:
    """A stage whose nodes no device shares."""
    recompute = problem.train and problem.recompute == "full"
    return Stage(tuple(sorted(nodes)), devices, problem.micro_batch_size, recompute=recompute)


def stage_of_several(
    problem: Problem, model: CostedModel, nodes: Sequence[int], devices: tuple[int, ...], tables: frozenset[str]
) -> Stage:
    """A stage whose devices share `tables` and the products for which that saves more than gathering costs."""
    stage, degree = stage_of(problem, nodes, devices), len(devices)
    if degree == 1:
        return stage
    gather = all_gather(model.cluster, devices)

    def pays(node: int) -> bool:
        size = sum(model.graph.type_of(name).bytes for name in model.graph.nodes[node].outputs if name)
        return float(model.seconds[node]) * (1 - 1 / degree) > 2 * gather.seconds(size)

    return replace(stage, splits=tensor_splits(model, nodes, degree, tables, pays))


@dataclass(frozen=True, slots=True, eq=False)
class StageRow:
    """A line on a row of devices: a stage on each, in their order."""

    line: CutLine
    devices: tuple[int, ...]
    pipeline: int = 0


Outline = tuple[Stage | StageRow, ...]


def with_chains_cut(problem: Problem, outline: Outline, room: Sequence[float]) -> Placement:
    """The stages, those of rows even, with no more bytes of parameters than there is `room` for on each device.

    Raises InfeasibleError where a line has too few operators or no room.
    """
    stages: list[Stage] = []
    for part in outline:
        if isinstance(part, Stage):
            stages.append(part)
            continue
        kinds = [problem.cluster.devices[device] for device in part.devices]
        runs = part.line.even_on(kinds, [room[device] for device in part.devices])
        own = (stage_of(problem, run, (device,)) for run, device in zip(runs, part.devices, strict=True))
        stages += (replace(stage, pipeline=part.pipeline) for stage in own)
    return Placement(tuple(stages))


_ATTEMPTS = 8


def with_chains_that_fit(problem: Problem, outline: Outline) -> Placement:
    """The stages of an outline, with chains cut anew as long as memory does not hold them.

    Of those found, the one that exceeds memory least under any schedule, then under 1F1B. Raises InfeasibleError where
    a chain has too few operators.
    """
    room = (math.inf,) * problem.cluster.size
    placement = with_chains_cut(problem, outline, room)
    found = []
    for _ in range(_ATTEMPTS):
        weighed = _recomputed(problem, placement)
        least, usual = _excess(problem, weighed)
        found.append(((_most(least), _most(usual)), placement))
        lighter = _less_room(problem, weighed, room, least if _most(least) else usual)
        if lighter == room:
            break
        try:
            room, placement = lighter, with_chains_cut(problem, outline, lighter)
        except InfeasibleError:
            break
    return min(found, key=lambda each: each[0])[1]


def _excess(problem: Problem, placement: Placement) -> tuple[list[int], list[int]]:
    """Bytes by which each device's need exceeds its memory, under any schedule and under 1F1B; below 0 if it fits."""
    costs = stage_costs(problem, placement)
    limits = [problem.memory_of(device) for device in range(problem.cluster.size)]
    needs = least_memory(problem, placement, costs), device_memory(problem, placement, costs)
    least, usual = ([need - limit for need, limit in zip(each, limits, strict=True)] for each in needs)
    return least, usual


def _recomputed(problem: Problem, placement: Placement) -> Placement:
    """The placement as it is where memory is scarce."""
    if not problem.train or problem.recompute != "auto":
        return placement
    return Placement(tuple(replace(stage, recompute=True) for stage in placement.stages))


def _most(excess: list[int]) -> int:
    return max(0, *excess)


def _less_room(problem: Problem, placement: Placement, room: tuple[float, ...], excess: list[int]) -> tuple[float, ...]:
    """Less room on devices that are too full.

    Of what such a device's own stages hold, their parameters give up the part by which memory is exceeded.
    """
    if not _most(excess):
        return room
    costs, counts = stage_costs(problem, placement), in_flight(problem, placement)
    found = list(room)
    for device, over in enumerate(excess):
        own = [index for index, stage in enumerate(placement.stages) if stage.devices == (device,)]
        held = sum(costs[index].memory_bytes(counts[index]) for index in own)
        if held > over > 0:
            largest = max(costs[index].parameter_bytes for index in own)
            found[device] = min(found[device], largest * (1 - over / held))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class SharedLookup:
    """A lookup in a large table, or a head over many classes, with all nodes that stay cut with it."""

    table: str
    node: int
    nodes: frozenset[int]


@remembered(GRAPHS)
def large_tables(model: CostedModel, at_least_one: bool) -> frozenset[str]:
    """Tables that lookups read and weights of heads, those with more than half a device's share of all parameters.

    With `at_least_one` and none so large, the largest that a lookup reads and all others half as large or more.
    """
    graph = model.graph
    total = sum(each.value.bytes for each in graph.parameters)
    looked_up = {name for names in _all_looked_up(model) for name in names}
    classes = {name for names in _all_heads(model) for name in names}
    sizes = {name: graph.type_of(name).bytes for name in sorted(looked_up | classes)}
    least = model.share * total
    if at_least_one and looked_up and not any(size >= least for size in sizes.values()):
        least = max(sizes[name] for name in looked_up) / 2
    return frozenset(name for name, size in sizes.items() if size >= least)


def wide_nodes(model: CostedModel, tables: frozenset[str], degree: int) -> tuple[SharedLookup, ...]:
    """The lookups and heads that read one of `tables`, in order.

    Raises InfeasibleError, naming the table, where `degree` devices cannot share one equally.
    """
    everything = frozenset(range(len(model.graph.nodes)))
    looked_up, heads = _all_looked_up(model), _all_heads(model)
    found = []
    for node in sorted(everything):
        read = sorted((looked_up[node] | heads[node]) & tables)
        if not read:
            continue
        axis = seed_axis(model, node, degree, tables)
        if axis is None:
            raise _uneven(model, node, read[0], degree)
        region = grow(model, node, axis, degree, everything, {})
        cut = frozenset({node}) if region.open else frozenset(region.axes)
        found.append(SharedLookup(read[0], node, cut | model.feeders(node)))
    return tuple(found)


@remembered(GRAPHS)
def _all_looked_up(model: CostedModel) -> tuple[frozenset[str], ...]:
    return tuple(_looked_up(model, node) for node in range(len(model.graph.nodes)))


@remembered(GRAPHS)
def _all_heads(model: CostedModel) -> tuple[frozenset[str], ...]:
    return tuple(_heads(model, node) for node in range(len(model.graph.nodes)))


def _looked_up(model: CostedModel, node: int) -> frozenset[str]:
    """The table that a node looks rows up in."""
    use, inputs = model.uses[node], model.graph.nodes[node].inputs
    joint = any(axis.kind is AxisKind.JOINT for axis in use.space.axes)
    if not joint or use.row.kind != "memory" or model.graph.parameter(inputs[0]) is None:
        return frozenset()
    return frozenset([inputs[0]])


def _heads(model: CostedModel, node: int) -> frozenset[str]:
    """The weights of a product whose columns are classes: they end in a softmax or a loss, or leave the model."""
    if model.is_weight(node) or not model.parameters_of(node):
        return frozenset()
    axis = seed_axis(model, node, 1, frozenset())
    if axis is None:
        return frozenset()
    region = grow(model, node, axis, 1, frozenset(range(len(model.graph.nodes))), {})
    ends_in_classes = AxisKind.JOINT in region.ends or bool(region.leaves)
    return model.parameters_of(node) if ends_in_classes and not region.open else frozenset()


def _uneven(model: CostedModel, node: int, table: str, degree: int) -> InfeasibleError:
    space = model.uses[node].space
    column = seed_axis(model, node, 1, frozenset([table]))
    extent = space.axis(column).extent if column else 0
    return InfeasibleError(
        f"{degree} devices cannot share the {extent} rows of {table!r} equally",
        hint=even_degree_hint(extent, degree),
        where=repr(model.graph.nodes[node].name),
    )


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Nodes that stand together; `shared` where they are split over all devices."""

    nodes: tuple[int, ...]
    shared: bool


def line_of_parts(model: CostedModel, chain: Chain, wide: Sequence[SharedLookup]) -> tuple[ModelPart, ...]:
    """The line's parts in order: lookups and heads with all that stands between their nodes, and chains between them.

    A chain with less than half a device's share of the work at either end joins the shared part beside it.
    """
    place = {node: index for index, node in enumerate(chain.order)}
    shared = [False] * len(chain.order)
    for each in wide:
        places = [place[node] for node in each.nodes]
        for index in range(min(places), max(places) + 1):
            shared[index] = True
    parts: list[ModelPart] = []
    for node, is_shared in zip(chain.order, shared, strict=True):
        if parts and parts[-1].shared is is_shared:
            parts[-1] = ModelPart((*parts[-1].nodes, node), is_shared)
        else:
            parts.append(ModelPart((node,), is_shared))
    return _without_scraps(model, parts)


def hoisted(model: CostedModel, parts: Sequence[ModelPart], wide: Sequence[SharedLookup]) -> tuple[ModelPart, ...]:
    """The same with all lookups that read inputs alone in the first part, so that one chain is left behind them."""
    early = {node for each in wide if _reads_inputs(model, each) for node in each.nodes}
    late = {node for each in wide for node in each.nodes} - early
    merged = [ModelPart(tuple(sorted(early)), True)]
    for part in parts:
        nodes = tuple(node for node in part.nodes if node not in early)
        shared = not late.isdisjoint(nodes)
        if nodes and merged[-1].shared is shared:
            merged[-1] = ModelPart((*merged[-1].nodes, *nodes), shared)
        elif nodes:
            merged.append(ModelPart(nodes, shared))
    return _without_scraps(model, [part for part in merged if part.nodes])


def _reads_inputs(model: CostedModel, wide: SharedLookup) -> bool:
    """True if a lookup depends on nothing that the model computes from other parameters."""
    nodes = wide.nodes | recomputed_nodes(model.graph)
    known = {value.name for value in model.graph.inputs} | model.weights.keys()
    known |= {name for node in nodes for name in model.graph.nodes[node].outputs}
    return all(name in known for node in wide.nodes for name in model.graph.nodes[node].inputs if name)


def _without_scraps(model: CostedModel, parts: Sequence[ModelPart]) -> tuple[ModelPart, ...]:
    """The parts, chains of little work joined to their neighbour: at the end to what comes before, else to the next."""
    least = model.share * float(model.seconds.sum())
    found: list[ModelPart] = []
    carried: tuple[int, ...] = ()
    for part in parts:
        small = not part.shared and model.weighs(part.nodes) < least
        if small and found and part is parts[-1]:
            found[-1] = ModelPart((*found[-1].nodes, *part.nodes), found[-1].shared)
        elif small and part is not parts[-1]:
            carried += part.nodes
        elif found and found[-1].shared is part.shared:
            found[-1] = ModelPart((*found[-1].nodes, *carried, *part.nodes), part.shared)
            carried = ()
        else:
            found.append(ModelPart((*carried, *part.nodes), part.shared))
            carried = ()
    return tuple(found)
