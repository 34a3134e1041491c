"""Tessel's shapes as a strategy: what of the model goes over all devices, what on one each, and in
which order.

Lin et al., "Tessel: boosting distributed execution of large DNN models via flexible schedule
search", HPCA 2024, sections II and VI. An outline says which devices share what, and which go over
a chain's stages one by one; its chains are then cut so that their stages take equally long, and
anew where a device's memory does not hold them.
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
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.placement import Placement, Stage, recomputed_nodes
from autopipe.ir.problem import Problem, Work
from autopipe.ir.space import AxisKind
from autopipe.ir.words import plural
from autopipe.passes.analysis.chain import Chain, make_chain, range_sums
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.communication import all_gather
from autopipe.passes.cost.memory_check import (
    check_operators,
    device_memory,
    fitted,
    in_flight,
    least_memory,
    may_share,
)
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.partition.chain_cut import (
    best_stops,
    crossing_seconds,
    even_stops,
    run_lengths,
    within_memory,
)
from autopipe.passes.schedule.device_order import best_order
from autopipe.passes.sharding.regions import (
    STYLE_MARK,
    ReplicatedGraph,
    StageStyle,
    devices_of_chain,
    grow_region,
    seed_axis,
    tensor_splits,
    weights_of,
)

_MOST_BLOCKS = 768
"""Places to cut that are considered: time grows with their square."""
_ATTEMPTS = 8
"""Cuts of a shape's chains that are tried where memory is short."""

_Floats = NDArray[np.float64]
Nodes = tuple[int, ...]
Stages = tuple[Nodes, ...]
"""The nodes of each stage, ascending."""


@dataclass(frozen=True, slots=True)
class CostedModel(ReplicatedGraph):
    """The network of a problem.

    `seconds` are those of forward and backward of each whole node, on average over kinds of
    devices, `on_kind` those on each kind.
    """

    cluster: Cluster
    seconds: _Floats
    on_kind: dict[Device, _Floats]
    precision: str

    @property
    def devices(self) -> int:
        return self.cluster.size

    @property
    def share(self) -> float:
        """Half a device's equal share of all: what has less is small."""
        return 0.5 / self.devices

    @property
    def least_s(self) -> float:
        return self.share * float(self.seconds.sum())

    def weighs(self, nodes: Iterable[int]) -> float:
        return float(self.seconds[list(nodes)].sum())


def costed_model(problem: Problem) -> CostedModel:
    """The model of a problem: one for all shapes, and for problems that differ in what costs
    nothing.
    """
    return _costed(problem.graph, problem.work, problem.cluster, problem.precision, problem.train)


@remembered(GRAPHS)
def _costed(
    graph: Graph, work: tuple[Work, ...], cluster: Cluster, precision: str, train: bool
) -> CostedModel:
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
        weights_of(graph),
        readers,
        cluster,
        seconds,
        on_kind,
        precision,
    )


@remembered(GRAPHS)
def line_around(model: CostedModel, together: Stages = ()) -> Chain:
    """The nodes as a line of blocks, each of the sets of `together` in one block."""
    return make_chain(model.graph, model.seconds, _MOST_BLOCKS, together)


@dataclass(frozen=True, slots=True, eq=False)
class CutLine:
    """A run of nodes in blocks, between which it may be cut, and what tells where."""

    blocks: Stages
    lengths: dict[Device | None, tuple[_Floats, _Floats]]
    """On each kind of devices, and (None) on average over them: the seconds of each block; and at
    [a, b] those of blocks a to b - 1, with messages at either end.
    """
    sizes: _Floats
    """Bytes of the parameters that each block is the first to read."""

    def even(self, kinds: Sequence[Device | None], room: Sequence[float] = ()) -> Stages:
        """A run of blocks for each of some kinds of devices; the slowest is fastest.

        Where `room` is given, none has more bytes of parameters than there is room for. Raises
        InfeasibleError where the blocks are too few or the room is.
        """
        count = len(kinds)
        if len(self.blocks) < count:
            raise InfeasibleError(
                f"{len(self.blocks)} {plural(len(self.blocks), 'operator')} "
                f"cannot be cut into {count} {plural(count, 'stage')}",
                hint="take fewer devices, or lower strategy.stages_per_rank",
            )
        known = even_stops(np.sum([self.lengths[kind][0] for kind in kinds], axis=0), count)
        lengths = [self.lengths[kind][1] for kind in kinds]
        if min(room, default=math.inf) < math.inf:
            lengths = within_memory(lengths, range_sums(self.sizes), room)
        stops = best_stops(lengths, known)
        if not stops:
            raise InfeasibleError(
                f"{count} {plural(count, 'stage has', 'stages have')} no room for their parameters",
                hint="use more devices",
            )
        between = itertools.pairwise([0, *stops])
        return tuple(
            tuple(sorted(itertools.chain(*self.blocks[start:stop]))) for start, stop in between
        )


@remembered(GRAPHS)
def line_of(model: CostedModel, chain: Chain, nodes: Sequence[int]) -> CutLine:
    """Nodes of `nodes` in each block of a chain."""
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
    return CutLine(blocks, lengths, sizes)


def stage_of(problem: Problem, nodes: Sequence[int], devices: tuple[int, ...]) -> Stage:
    """A stage whose nodes no device shares."""
    return Stage(
        tuple(sorted(nodes)), devices, problem.micro_batch_size, recompute=problem.recomputes_all
    )


def stage_of_several(
    problem: Problem,
    model: CostedModel,
    nodes: Sequence[int],
    devices: tuple[int, ...],
    tables: frozenset[str],
) -> Stage:
    """A stage whose devices share `tables` and the products for which that saves more than
    gathering costs.
    """
    stage = stage_of(problem, nodes, devices)
    degree = len(devices)
    if degree == 1:
        return stage
    gather = all_gather(model.cluster, devices)

    def pays(node: int) -> bool:
        size = sum(
            model.graph.type_of(name).bytes for name in model.graph.nodes[node].outputs if name
        )
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
    """The stages, those of rows even, with no more bytes of parameters than there is `room` for on
    each device.

    Raises InfeasibleError where a line has too few operators or no room.
    """
    stages: list[Stage] = []
    for part in outline:
        if isinstance(part, Stage):
            stages.append(part)
            continue
        kinds = [problem.cluster.devices[device] for device in part.devices]
        runs = part.line.even(kinds, [room[device] for device in part.devices])
        own = (
            stage_of(problem, run, (device,))
            for run, device in zip(runs, part.devices, strict=True)
        )
        stages += (replace(stage, pipeline=part.pipeline) for stage in own)
    return Placement(tuple(stages))


def with_chains_that_fit(problem: Problem, outline: Outline) -> Placement:
    """The stages of an outline, with chains cut anew as long as memory does not hold them.

    Of those found, the one that exceeds memory least under any schedule, then under 1F1B. Raises
    InfeasibleError where a chain has too few operators.
    """
    room = (math.inf,) * problem.cluster.size
    placement = with_chains_cut(problem, outline, room)
    found = []
    for _ in range(_ATTEMPTS):
        excess, lighter = _weighed(problem, placement, room)
        found.append((excess, placement))
        if lighter == room:
            break
        try:
            room = lighter
            placement = with_chains_cut(problem, outline, lighter)
        except InfeasibleError:
            break
    return min(found, key=lambda each: each[0])[1]


def _weighed(
    problem: Problem, placement: Placement, room: tuple[float, ...]
) -> tuple[tuple[int, int], tuple[float, ...]]:
    """Bytes by which the fullest device is over its memory, under any schedule and under 1F1B; and
    less room for parameters on devices that are too full.

    Of what such a device's own stages hold, their parameters give up the part by which memory is
    exceeded. Stages recompute where they may: memory is scarce.
    """
    if problem.train and problem.recompute == "auto":
        placement = Placement(tuple(replace(stage, recompute=True) for stage in placement.stages))
    costs = stage_costs(problem, placement)
    needs = least_memory(problem, placement, costs), device_memory(problem, placement, costs)
    least, usual = (
        [need - problem.memory_of(device) for device, need in enumerate(each)] for each in needs
    )
    most = max(0, *least), max(0, *usual)
    if not any(most):
        return most, room
    counts = in_flight(problem, placement)
    found = list(room)
    for device, over in enumerate(least if most[0] else usual):
        own = [index for index, stage in enumerate(placement.stages) if stage.devices == (device,)]
        held = sum(costs[index].memory_bytes(counts[index]) for index in own)
        if held > over > 0:
            largest = max(costs[index].parameter_bytes for index in own)
            found[device] = min(found[device], largest * (1 - over / held))
    return most, tuple(found)


@dataclass(frozen=True, slots=True)
class SharedLookup:
    """A lookup in a large table, or a head over many classes, with all nodes that stay cut with
    it.
    """

    table: str
    nodes: frozenset[int]


@remembered(GRAPHS)
def large_tables(model: CostedModel, at_least_one: bool) -> frozenset[str]:
    """Tables that lookups read and weights of heads, those with more than half a device's share of
    all parameters.

    With `at_least_one` and none so large, the largest that a lookup reads and all others half as
    large or more.
    """
    graph = model.graph
    looked_up, classes = (frozenset[str]().union(*each) for each in _tables_read(model))
    sizes = {name: graph.type_of(name).bytes for name in sorted(looked_up | classes)}
    least = model.share * sum(each.value.bytes for each in graph.parameters)
    if at_least_one and looked_up and not any(size >= least for size in sizes.values()):
        least = max(sizes[name] for name in looked_up) / 2
    return frozenset(name for name, size in sizes.items() if size >= least)


def wide_nodes(model: CostedModel, tables: frozenset[str], degree: int) -> tuple[SharedLookup, ...]:
    """The lookups and heads that read one of `tables`, in order.

    Raises InfeasibleError, naming the table, where `degree` devices cannot share one equally.
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
            extent = space.axis(column).size if column else 0
            raise InfeasibleError(
                f"{degree} {plural(degree, 'device')} cannot share the {extent} "
                f"{plural(extent, 'row')} of {read[0]!r} equally",
                hint=even_degree_hint(extent, degree),
                where=repr(model.graph.nodes[node].name),
            )
        region = grow_region(model, node, axis, degree, everything, {})
        cut = frozenset({node}) if region.open else frozenset(region.axes)
        found.append(SharedLookup(read[0], cut | model.feeders(node)))
    return tuple(found)


@remembered(GRAPHS)
def _tables_read(
    model: CostedModel,
) -> tuple[tuple[frozenset[str], ...], tuple[frozenset[str], ...]]:
    """For each node the table that it looks rows up in, and the weights that it multiplies with as
    a head.
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
    """True for a product whose columns are classes: they end in a softmax or a loss, or leave the
    model.
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
    """Nodes that stand together; `shared` where they are split over all devices."""

    nodes: tuple[int, ...]
    shared: bool


def line_of_parts(
    model: CostedModel, chain: Chain, wide: Sequence[SharedLookup]
) -> tuple[ModelPart, ...]:
    """The line's parts in order: lookups and heads with all that stands between their nodes, and
    chains between them.

    A chain with less than half a device's share of the work at either end joins the shared part
    beside it.
    """
    place = {node: index for index, node in enumerate(chain.order)}
    shared: set[int] = set()
    for each in wide:
        places = [place[node] for node in each.nodes]
        shared.update(range(min(places), max(places) + 1))
    return _joined(model, (ModelPart((node,), index in shared) for node, index in place.items()))


def hoisted(
    model: CostedModel, parts: Sequence[ModelPart], wide: Sequence[SharedLookup]
) -> tuple[ModelPart, ...]:
    """The same with all lookups that read inputs alone in the first part, so that one chain is left
    behind them.
    """
    nodes = model.graph.nodes
    again = recomputed_nodes(model.graph)
    free = {value.name for value in model.graph.inputs} | model.weights.keys()
    early: set[int] = set()
    for each in wide:
        # It depends on nothing that the model computes from other parameters.
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
    return _joined(model, (ModelPart(tuple(sorted(early)), True), *behind))


def _joined(model: CostedModel, parts: Iterable[ModelPart]) -> tuple[ModelPart, ...]:
    """The parts that have nodes, shared ones that follow each other as one, and chains that do.

    Chains of little work join their neighbour: at the end what comes before, else the next.
    """
    runs = itertools.groupby((part for part in parts if part.nodes), key=attrgetter("shared"))
    whole = [
        ModelPart(tuple(node for part in run for node in part.nodes), shared)
        for shared, run in runs
    ]
    found: list[ModelPart] = []
    carried: Nodes = ()
    for part in whole:
        small = not part.shared and model.weighs(part.nodes) < model.least_s
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
    """Branches, and last everything from where they meet on; all nodes are in one of them.

    They meet at the first node, in `order`, that reads several with half a device's share of the
    work or more. Each has at least half as much work as the largest too: a decoder's first layer is
    no branch beside the encoder. None where there is none. Values made of parameters alone, masks
    and positions connect nothing.
    """
    graph = model.graph
    apart = recomputed_nodes(graph) | {
        node for node in range(len(graph.nodes)) if model.is_weight(node)
    }
    component: dict[int, list[int]] = {}
    work: dict[int, float] = {}  # Of each component, by the object that it is.
    for node in sorted(set(range(len(graph.nodes))) - apart):
        producers = [graph.producer(name) for name in graph.nodes[node].inputs if name]
        met = {
            id(component[each]): component[each]
            for each in producers
            if each is not None and each in component
        }
        most = max((work[each] for each in met), default=0.0)
        large = [nodes for each, nodes in met.items() if work[each] >= max(model.least_s, most / 2)]
        if len(large) > 1:
            return _branches(model, order, sorted(map(sorted, large)), apart)
        joined = (
            next(iter(met.values()))
            if len(met) == 1
            else [each for nodes in met.values() for each in nodes]
        )
        work[id(joined)] = sum(work[each] for each in met) + float(model.seconds[node])
        joined.append(node)
        component |= dict.fromkeys(joined if len(met) > 1 else [node], joined)
    return None


def _branches(
    model: CostedModel, order: tuple[int, ...], branches: list[list[int]], apart: Set[int]
) -> Stages:
    """The branches in order of their first nodes, each with the weights it reads first; all others
    are the rest.
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


def shared_out(weights: Sequence[float], devices: int) -> tuple[tuple[int, ...], ...]:
    """Neighbouring devices for each part, one at least: each further one to the part with most work
    a device.
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
    """Places a model in the form of a V, X, M, NN or K."""

    shape: str = "auto"
    """`v`: a chain of stages; `x`: two, in opposite directions over the devices, with parameters
    twice; `m`: lookups in large tables and heads split over all devices, the chain between them on
    one each; `nn`: the same where a second lookup parts the chain, as between encoder and decoder;
    `k`: branches on devices of their own, and what follows where they meet split over all. `auto`:
    nn, m or k where the model has what they need, else v.
    """
    stages_per_rank: Annotated[int, FormerKey("chunks")] = 1
    """Number of stages of a chain that each device has."""
    style: Annotated[StageStyle, STYLE_MARK] = "loop"
    """Order in which consecutive stages of a chain visit the devices. `loop`: 0 1 2 0 1 2. `v`:
    0 1 2 2 1 0.
    """

    name: ClassVar[str] = "tessel_shapes"

    def division(self, graph: Graph) -> Division:
        return Division.MANY

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for options out of range or constraints, InfeasibleError for an
        empty model.
        """
        if self.shape.lower() not in _SHAPES:
            raise ConfigurationError(
                f"there is no shape {self.shape!r}",
                hint=f"there are: {', '.join(_SHAPES)}",
                where="strategy",
            )
        if self.stages_per_rank < 1:
            raise ConfigurationError(
                f"stages_per_rank is {self.stages_per_rank}",
                hint="it must be at least 1",
                where="strategy",
            )
        if problem.constraints:
            raise ConfigurationError(
                "tessel_shapes follows no constraints",
                hint="strategy manual follows any",
                where="constraints",
            )
        check_operators(problem)

    def run(self, problem: Problem) -> Placement:
        """The placement. Raises InfeasibleError where the model does not have the shape or memory
        does not hold it.

        So it does for a part that is to be shared by devices of different kinds, which shapes m, nn
        and k have.
        """
        return best_order(problem, self._fitted)

    def _fitted(self, problem: Problem) -> Placement:
        model = costed_model(problem)
        shape = self.shape.lower()
        outline = None
        if shape == "auto":
            shape = "v"
            for each in ("nn", "m", "k") if may_share(problem, range(model.devices)) else ():
                # The first shape that the model has and the devices can take.
                with suppress(InfeasibleError):
                    found = self._outline(problem, model, each, only_large=True)
                    with_chains_cut(problem, found, (math.inf,) * model.devices)
                    outline = found
                    shape = each
                    break
        cut = with_chains_that_fit(problem, outline or self._outline(problem, model, shape))
        placement = fitted(problem, cut)
        return (
            replace(placement, options=(("shape", shape),))
            if self.shape.lower() == "auto"
            else placement
        )

    def _outline(
        self, problem: Problem, model: CostedModel, shape: str, only_large: bool = False
    ) -> Outline:
        if shape == "k":
            return tuple(self._around_join(problem, model, only_large))
        if shape in ("m", "nn"):
            return tuple(self._around_tables(problem, model, shape, only_large))
        if shape == "x" and model.devices < 2:
            raise InfeasibleError(
                "shape x runs in two directions over devices, and there is one", hint="take shape v"
            )
        line = line_around(model)
        devices = tuple(range(model.devices))
        down = self._chain(model, line, line.order, devices)
        return (
            (down,)
            if shape == "v"
            else (down, replace(self._chain(model, line, line.order, devices[::-1]), pipeline=1))
        )

    def _around_tables(
        self, problem: Problem, model: CostedModel, shape: str, only_large: bool
    ) -> Iterator[Stage | StageRow]:
        """M and NN: shared parts over all devices, chains between them."""
        tables = large_tables(model, at_least_one=not only_large)
        wide = wide_nodes(model, tables, model.devices)
        if not wide:
            raise InfeasibleError(
                (
                    f"shape {shape} shares lookups in large tables among all devices, and the "
                    "model "
                    "has none"
                ),
                hint="take shape v",
            )
        line = line_around(model, tuple(tuple(each.nodes) for each in wide))
        parts = line_of_parts(model, line, wide)
        if shape == "m":
            parts = hoisted(model, parts, wide)
        chains = [part for part in parts if not part.shared]
        wanted = {"m": 1, "nn": 2}[shape]
        if len(chains) != wanted:
            names = ", ".join(sorted({repr(each.table) for each in wide}))
            raise InfeasibleError(
                f"shape {shape} has {wanted} chain{'s' * (wanted > 1)} between large tables, "
                f"and the lookups in {names}"
                f" leave {len(chains)}",
                hint="take shape " + {1: "m", 2: "nn"}.get(len(chains), "v"),
            )
        if wanted > model.devices:
            raise InfeasibleError(
                f"shape {shape} needs {wanted} {plural(wanted, 'device')} at least, and there "
                f"are {model.devices}"
            )
        everyone = tuple(range(model.devices))
        groups = iter(shared_out([model.weighs(part.nodes) for part in chains], model.devices))
        for part in parts:
            if part.shared:
                yield stage_of_several(problem, model, part.nodes, everyone, tables)
            else:
                yield self._chain(model, line, part.nodes, next(groups))

    def _around_join(
        self, problem: Problem, model: CostedModel, only_shared: bool
    ) -> Iterator[Stage | StageRow]:
        """K: branches on devices of their own, then the rest over all (with `only_shared`, if they
        can share it).
        """
        line = line_around(model)
        found = find_join(model, line.order)
        if found is None or len(found) - 1 > model.devices:
            count = (
                "none"
                if found is None
                else f"{len(found) - 1} for {model.devices} {plural(model.devices, 'device')}"
            )
            raise InfeasibleError(
                f"shape k puts branches on devices of their own, and the model has {count}",
                hint="take shape v",
            )
        *branches, rest = found
        tables = large_tables(model, at_least_one=False)
        last = stage_of_several(problem, model, rest, tuple(range(model.devices)), tables)
        work = model.weighs(rest)
        shared = model.weighs(node for node, _ in last.splits)
        if only_shared and shared < work / 2 and work >= model.least_s:
            raise InfeasibleError(
                f"{model.devices} {plural(model.devices, 'device')} cannot share what follows "
                "where branches meet"
            )
        groups = shared_out([model.weighs(branch) for branch in branches], model.devices)
        for branch, devices in zip(branches, groups, strict=True):
            yield self._chain(model, line, branch, devices)
        yield last

    def _chain(
        self, model: CostedModel, line: Chain, nodes: tuple[int, ...], devices: tuple[int, ...]
    ) -> StageRow:
        return StageRow(
            line_of(model, line, nodes), devices_of_chain(devices, self.stages_per_rank, self.style)
        )
