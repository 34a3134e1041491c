"""The price of every stage between two downsets, for each way in which a group may share it.

Cost of blocks on a group that shares them, and sums over the blocks of a stage.

Messages that a stage between two downsets receives from the stages before it and sends to those after it.

The ways in which a group of devices may share a stage: its samples, its layers, or both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Device
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage, recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.gradients import kept_values
from autopipe.passes.analysis.operators import SampleAxes, sample_axes, uses_of
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.roofline import update_line
from autopipe.passes.cost.stage_work import StageWork, exchange_of_gradients, stage_work, updated_part
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.partition.downsets import Downsets, Figures, Pairs
from autopipe.passes.placement.piper.blocks import Blocks
from autopipe.passes.sharding.regions import (
    Network,
    NodeSplits,
    group_splits,
    replicated_network,
    with_samples_split,
)


@dataclass(frozen=True, slots=True)
class StageSharing:
    """`replicas` share the samples, each of them `tensor` neighbouring devices that share layers; `splits` by block."""

    replicas: int
    tensor: int
    splits: tuple[NodeSplits, ...]

    @property
    def devices(self) -> int:
        """The size of the group."""
        return self.replicas * self.tensor

    def placement(self, problem: Problem, blocks: Blocks) -> Placement:
        """Each block as a stage by itself, all on the first devices."""
        devices = tuple(range(self.devices))
        pairs = zip(blocks.nodes, self.splits, strict=True)
        return Placement(tuple(Stage(nodes, devices, problem.micro_batch_size, splits) for nodes, splits in pairs))


def sharings(problem: Problem, blocks: Blocks, samples: SampleAxes) -> Iterator[StageSharing]:
    """All of them, the smallest groups first.

    Layers are shared inside a node of the cluster. A group fits into a node or has whole nodes, so that what it takes
    does not depend on where it stands.
    """
    node = problem.cluster.devices_per_node
    for devices in range(1, problem.cluster.size + 1):
        if devices > node and devices % node:
            continue
        for tensor in range(1, min(devices, node) + 1):
            if devices % tensor == 0 and node % tensor == 0:
                try:
                    yield _sharing(problem, blocks, samples, devices // tensor, tensor)
                except InfeasibleError:
                    continue  # Some node's samples cannot be cut into so many equal parts.


def _sharing(problem: Problem, blocks: Blocks, samples: SampleAxes, replicas: int, tensor: int) -> StageSharing:
    """Sharing of blocks.

    Raises InfeasibleError where `replicas` cannot share the samples, or nothing can be shared by layers.
    """
    graph = problem.graph
    if problem.micro_batch_size % replicas or (replicas > 1 and not graph.batch_axes):
        raise InfeasibleError(f"{replicas} replicas cannot share {problem.micro_batch_size} samples")
    network = replicated_network(graph, replicas, samples)
    found = [_closed(network, nodes, group_splits(network, tensor, nodes)) for nodes in blocks.nodes]
    if tensor > 1 and not any(found):
        raise InfeasibleError(f"no layer can be shared by {tensor} devices")
    pairs = zip(blocks.nodes, found, strict=True)
    splits = tuple(with_samples_split(samples, nodes, replicas, own) for nodes, own in pairs)
    return StageSharing(replicas, tensor, splits)


def _closed(
    network: Network, nodes: tuple[int, ...], found: dict[int, tuple[Split, ...]]
) -> dict[int, tuple[Split, ...]]:
    """The splits of a block's layers; none where a value would leave the block cut."""
    graph, members = network.graph, set(nodes)
    for node, splits in found.items():
        for name, words in zip(graph.nodes[node].outputs, network.uses[node].space.results, strict=True):
            leaves = name in graph.outputs or not members.issuperset(network.readers.get(name, ()))
            if leaves and any(splits[-1].axis in dimension for dimension in words or ()):
                return {}
    return found


Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Sums:
    """Figures that add up over a stage's blocks: `own` of one block each, and `common` ones of several, once each."""

    own: NDArray[np.float64]
    common: tuple[tuple[tuple[int, ...], float], ...] = ()

    def over(self, downsets: Downsets, pairs: Pairs) -> Figures:
        """The sum over the blocks between the two downsets of each of some pairs."""
        if not self.own.any() and not self.common:
            return np.zeros(len(pairs.inner))
        found = pairs.difference(downsets.holds @ self.own)
        for blocks, figure in self.common:
            found += figure * (pairs.difference(downsets.holds[:, list(blocks)].sum(axis=1)) > 0)
        return found


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """Seconds and bytes on one device of a group. Those of a micro-batch are as in `StageCost`."""

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    kept: Sums
    """Bytes that backward needs of a micro-batch."""
    state: Sums
    """Bytes of parameters, gradients and optimizer state."""
    gradients: Sums
    """Bytes of the gradients of parameters that each device of the group holds whole."""
    cut_gradients: Sums
    """Bytes on one device of the gradients of parameters that the devices of a replica share."""
    workspace: NDArray[np.float64]
    """Bytes that come and go while a block runs."""


def block_figures(problem: Problem, blocks: Blocks, sharing: StageSharing) -> BlockFigures:
    """The figures of each block on such a group."""
    placement = sharing.placement(problem, blocks)
    works = stage_work(problem, placement)
    costs = stage_costs(problem, placement)
    parts = [work.parameters for work in works]
    gradients = [{name: _gradient_bytes(problem, name, count) for name, count in each.items()} for each in parts]
    return BlockFigures(
        forward_s=np.array([cost.forward_s for cost in costs]),
        backward_s=np.array([cost.backward_s for cost in costs]),
        kept=_sums(_kept(problem, works)),
        state=_sums(
            [
                {name: _state_bytes(problem, name, count, sharing.devices) for name, count in each.items()}
                for each in parts
            ]
        ),
        gradients=_sums(_those(gradients, parts, cut=False)),
        cut_gradients=_sums(_those(gradients, parts, cut=True)),
        workspace=np.array([float(cost.transient_bytes) for cost in costs]),
    )


def _state_bytes(problem: Problem, name: str, parts: int, devices: int) -> int:
    return state_of(problem, [(name, parts)], {name: devices // parts}).total


def _gradient_bytes(problem: Problem, name: str, parts: int) -> int:
    return state_of(problem, [(name, parts)]).gradient_bytes


def _those(gradients: list[dict[str, int]], parts: Iterable[Mapping[str, int]], cut: bool) -> list[dict[str, int]]:
    """The gradients of parameters that are held in parts, or of the others."""
    return [
        {name: size for name, size in each.items() if (counts[name] > 1) == cut}
        for each, counts in zip(gradients, parts, strict=True)
    ]


def _kept(problem: Problem, works: tuple[StageWork, ...]) -> list[dict[tuple[str, int], int]]:
    """By block the bytes of each value that backward needs of it."""
    kept = kept_values(problem.graph, uses_of(problem.graph), problem.precision)
    found = []
    for work in works:
        own: dict[tuple[str, int], int] = {}
        for each in work.nodes:
            for value in kept[each.index]:
                own[value.key] = max(value.local_bytes(each.sharing.degrees), own.get(value.key, 0))
        found.append(own)
    return found


def _sums(by_block: list[dict[Key, int]]) -> Sums:
    """Figures by block and by what they are of: the same thing counts once, at its largest."""
    blocks: dict[Key, list[int]] = {}
    figures: dict[Key, int] = {}
    for block, each in enumerate(by_block):
        for key, figure in each.items():
            blocks.setdefault(key, []).append(block)
            figures[key] = max(figure, figures.get(key, 0))
    own = np.zeros(len(by_block))
    common: dict[tuple[int, ...], float] = {}
    for key, members in blocks.items():
        if len(members) == 1:
            own[members[0]] += figures[key]
        else:
            common[tuple(members)] = common.get(tuple(members), 0.0) + figures[key]
    return Sums(own, tuple(common.items()))


_CELLS = 2**22
"""Cells of a table made at once."""


@dataclass(frozen=True, slots=True)
class Messages:
    """For each pair of downsets what its stage receives, or sends.

    `cut` are bytes, for the samples of the graph, of values that replicas share out; `whole` of those that each gets.
    """

    cut: Figures
    whole: Figures
    count: Figures

    def local_bytes(self, share: float, pairs: Pairs) -> Figures:
        """Bytes on one replica that has a share of the graph's samples, for some of the pairs."""
        found: Figures = self.cut.take(pairs.numbers) * share + self.whole.take(pairs.numbers)
        return found


def messages_between(
    graph: Graph, blocks: Blocks, downsets: Downsets, samples: SampleAxes
) -> tuple[Messages, Messages]:
    """Messages that the stage of each pair receives, and those it sends."""
    values = _crossing(graph, blocks, samples)
    shape = len(downsets.holds), len(values)
    made = np.array([downsets.holds[:, value.block] for value in values], dtype=bool).T.reshape(shape)
    read = np.array([downsets.holds[:, list(value.readers)].sum(axis=1) for value in values], np.int64).T.reshape(shape)
    readers = np.array([len(value.readers) for value in values])
    weights = np.array([(value.cut, value.whole, 1.0) for value in values]).reshape(-1, 3)
    received, sent = [], []
    for weight in weights.T:
        if not weight.any():
            received.append(np.zeros(len(downsets.inner)))
            sent.append(received[-1])
            continue
        open_after = made & (read < readers)
        sent.append((open_after @ weight)[downsets.outer] - _products(downsets, made, open_after * weight))
        received.append(_received(downsets, made, read, readers, weight))
    return Messages(*received), Messages(*sent)


@dataclass(frozen=True, slots=True)
class _Value:
    """Values that one block makes and the same others read."""

    block: int
    readers: tuple[int, ...]
    cut: float
    whole: float


def _crossing(graph: Graph, blocks: Blocks, samples: SampleAxes) -> list[_Value]:
    """All values that leave their block; each counts, however many leave it for the same."""
    recomputed = recomputed_nodes(graph)
    block_of = {node: number for number, nodes in enumerate(blocks.nodes) for node in nodes}
    found = []
    for name, reading in graph.consumers().items():
        producer = graph.producer(name)
        if producer is None or producer in recomputed:
            continue
        block = block_of[producer]
        readers = {block_of[reader] for reader in reading if reader not in recomputed} - {block}
        if readers:
            size, carries = float(graph.type_of(name).bytes), samples.carries(name)
            found.append(_Value(block, tuple(sorted(readers)), size * carries, size * (not carries)))
    return found


def _received(
    downsets: Downsets,
    made: NDArray[np.bool_],
    read: NDArray[np.int64],
    readers: NDArray[np.int64],
    weight: NDArray[np.float64],
) -> Figures:
    """The weight of the values that the inner downset makes and the stage reads, once each."""
    single = readers == 1
    once = read[:, single].astype(bool)
    found = _products(downsets, made[:, single], once * weight[single])
    found -= (once @ weight[single])[downsets.inner]
    for value in np.flatnonzero(~single):
        more = read[downsets.outer, value] > read[downsets.inner, value]
        found += weight[value] * (more & made[downsets.inner, value])
    return found


def _products(downsets: Downsets, inner: NDArray[np.bool_], outer: NDArray[np.float64]) -> Figures:
    """For each pair the product of two rows: that of its inner downset and that of its outer one."""
    found = np.zeros(len(downsets.inner))
    width = len(downsets.holds)
    rows = max(1, _CELLS // width)
    across = np.ascontiguousarray(outer.T)
    for begin in range(0, width, rows):
        first, last = np.searchsorted(downsets.inner, (begin, begin + rows))
        if first < last:
            table = inner[begin : begin + rows].astype(float) @ across
            found[first:last] = table[downsets.inner[first:last] - begin, downsets.outer[first:last]]
    return found


_ROUNDING = 1e-9

_AHEAD = 2
"""By what factor more time stages are priced for than is asked for."""

ANY_PLACE = np.iinfo(np.int16).max
"""A stage that fits wherever it stands."""


@dataclass(frozen=True, slots=True)
class Option:
    """Stages shared in one way: pairs of downsets, seconds a micro-batch, and the farthest place from the end, counted
    from 1, at which memory holds each."""

    sharing: StageSharing
    recompute: bool
    pairs: NDArray[np.int64]
    seconds: Figures
    farthest: NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Chains:
    """Facts common to micro-batches of any size: blocks, their downsets, and the messages between them."""

    blocks: Blocks
    downsets: Downsets
    received: Messages
    sent: Messages
    samples: int
    """Samples that messages are counted for."""


class StagePrices:
    """Prices of stages for the micro-batches of one problem.

    A stage receives and sends over the slowest link that there is, since where it stands is not known, and is as slow
    as on the slowest device.
    """

    def __init__(self, problem: Problem, chains: Chains) -> None:
        self.problem, self.chains = problem, chains
        cluster = problem.cluster
        self.link = cluster.slowest_link(range(cluster.size))
        self.limit = min(map(problem.memory_of, range(cluster.size)))
        self._known_s, self._known = -np.inf, list[Option]()
        """The most seconds for which options are known, and these: a search asks again and again, for a bit more."""

    @cached_property
    def _shared(self) -> list[tuple[StageSharing, BlockFigures]]:
        problem, blocks = self.problem, self.chains.blocks
        ways = sharings(problem, blocks, self.samples)
        return [(sharing, block_figures(problem, blocks, sharing)) for sharing in ways]

    @cached_property
    def samples(self) -> SampleAxes:
        """The batch axes of the problem's graph."""
        return sample_axes(self.problem.graph)

    @cached_property
    def _least_work(self) -> NDArray[np.float64]:
        """For each block the least seconds of a micro-batch's computation, times the devices that share it."""
        work = [sharing.devices * (figures.forward_s + figures.backward_s) for sharing, figures in self._shared]
        found: NDArray[np.float64] = np.min(work, axis=0)
        return found

    @property
    def least_s(self) -> float:
        """Seconds that the slowest stage takes at least: an even share of what all blocks take."""
        return float(self._least_work.sum()) / self.problem.cluster.size

    @property
    def most_s(self) -> float:
        """Seconds that no stage exceeds."""
        chains, whole = self.chains, self._whole
        messages = sum(
            each.count.max() * self.link.latency_s
            + (each.cut.max() + each.whole.max()) / self.link.bandwidth_bytes_per_s
            for each in (chains.received, chains.sent)
        )
        found = (
            float((2 * figures.forward_s + figures.backward_s).sum())
            + float(self._step_seconds(sharing, figures, whole).max())
            for sharing, figures in self._shared
        )
        return max(found) + float(messages)

    @cached_property
    def _left(self) -> Figures:
        """The least work that each stage leaves to others."""
        downsets = self.chains.downsets
        found: Figures = self._least_work.sum() - Sums(self._least_work).over(downsets, downsets.pairs)
        return found

    def options(self, most_s: float) -> list[Option]:
        """All stages that take no more than `most_s`, fit somewhere, and leave no more work to the other devices than
        these do in that time; smaller groups first."""
        if len(self.problem.cluster.kinds) > 1:  # Which kind updates slowest is told by all stages that are priced.
            return self._options(self.chains.downsets.pairs, most_s)
        if most_s > self._known_s:
            self._known_s = most_s * _AHEAD
            self._known = self._options(self.chains.downsets.pairs, self._known_s)
        found = (self._within(option, most_s) for option in self._known)
        return [option for option in found if len(option.pairs)]

    def _within(self, option: Option, most_s: float) -> Option:
        """Part of an option with less time."""
        fits = option.seconds <= most_s
        if others := self._others(option.sharing):
            fits &= self._left.take(option.pairs) <= others * most_s
        places = np.flatnonzero(fits)
        return replace(
            option,
            pairs=option.pairs.take(places),
            seconds=option.seconds.take(places),
            farthest=option.farthest.take(places),
        )

    def _others(self, sharing: StageSharing) -> int:
        """The devices outside a group."""
        return self.problem.cluster.size - sharing.devices

    def whole(self) -> list[Option]:
        """All blocks as one stage, in every way that fits."""
        return self._options(self._whole, np.inf)

    @cached_property
    def _whole(self) -> Pairs:
        """The pair of all blocks and none."""
        downsets = self.chains.downsets
        return downsets.pairs.some((downsets.outer == 0) & (downsets.inner == len(downsets.holds) - 1))

    def _options(self, among: Pairs, most_s: float) -> list[Option]:
        ways = ((*each, recompute) for each in self._shared for recompute in self._recomputations())
        found = (self._option(*way, among, most_s) for way in ways)
        return [option for option in found if len(option.pairs)]

    def _recomputations(self) -> tuple[bool, ...]:
        wanted = self.problem.recompute if self.problem.train else "none"
        return {"none": (False,), "full": (True,)}.get(wanted, (False, True))

    def _option(
        self, sharing: StageSharing, figures: BlockFigures, recompute: bool, among: Pairs, most_s: float
    ) -> Option:
        compute = figures.backward_s + figures.forward_s * (2 if recompute else 1)
        seconds = Sums(compute).over(self.chains.downsets, among)
        left, others = self._left.take(among.numbers), self._others(sharing)
        enough = left <= (others * most_s if others else _ROUNDING * seconds)
        places = np.flatnonzero((seconds <= most_s) & enough)
        pairs = among.some(places)
        seconds = seconds[places] + self._step_seconds(sharing, figures, pairs) + self._message_seconds(sharing, pairs)
        quick = np.flatnonzero(seconds <= most_s)
        pairs, seconds = pairs.some(quick), seconds[quick]
        farthest = self._farthest(sharing, figures, recompute, pairs)
        fits = farthest > 0
        return Option(sharing, recompute, pairs.numbers[fits], seconds[fits], farthest[fits])

    def _message_seconds(self, sharing: StageSharing, pairs: Pairs) -> Figures:
        found = np.zeros(1)
        for messages in (self.chains.received, self.chains.sent)[: 2 if self.problem.train else 1]:
            size = messages.local_bytes(self._share(sharing), pairs)
            count = messages.count.take(pairs.numbers)
            found = found + count * self.link.latency_s + size / self.link.bandwidth_bytes_per_s
        return found

    def _share(self, sharing: StageSharing) -> float:
        """The part that a replica's micro-batch is of the samples that messages are counted for."""
        return self.problem.micro_batch_size / self.chains.samples / sharing.replicas

    def _step_seconds(self, sharing: StageSharing, figures: BlockFigures, pairs: Pairs) -> Figures:
        """A micro-batch's share of the end of a step: summing gradients over replicas, updating parameters."""
        if not self.problem.train:
            return np.zeros(1)
        problem, downsets = self.problem, self.chains.downsets
        whole = figures.gradients.over(downsets, pairs)
        cut = figures.cut_gradients.over(downsets, pairs)
        every, alike = range(sharing.devices), range(0, sharing.devices, sharing.tensor)
        seconds = exchange_of_gradients(problem, every).seconds_each(whole)
        seconds = seconds + exchange_of_gradients(problem, alike).seconds_each(cut)
        updated = whole * updated_part(problem, len(every)) + cut * updated_part(problem, len(alike))
        seconds = seconds + max((self._update(device, updated) for device in set(problem.cluster.devices)), key=np.sum)
        found: Figures = seconds / self.problem.micro_batches
        return found

    def _update(self, device: Device, gradients: Figures) -> Figures:
        update = update_line(device, self.problem.optimizer.states)
        found: Figures = gradients * update.per_byte_s + update.fixed_s * (gradients > 0)
        return found

    def _farthest(
        self, sharing: StageSharing, figures: BlockFigures, recompute: bool, pairs: Pairs
    ) -> NDArray[np.int16]:
        """The farthest place from the end at which each stage fits; 0 for none. At place k it keeps k micro-batches."""
        downsets, train = self.chains.downsets, self.problem.train
        received = self.chains.received.local_bytes(self._share(sharing), pairs)
        buffers = received + self.chains.sent.local_bytes(self._share(sharing), pairs)
        always = figures.state.over(downsets, pairs) + self._workspace(figures, pairs) + (1 + train) * buffers
        each = figures.kept.over(downsets, pairs) if train else np.zeros_like(always)
        if recompute:
            always, each = always + each, received
        room = self.limit - always + 1e-3  # Sums of bytes are whole numbers, but for rounding.
        with np.errstate(divide="ignore", invalid="ignore"):
            count = np.where(each > 0, np.floor(room / each), np.inf)
        count = np.where(room < 0, 0, np.where(count >= self.problem.micro_batches, ANY_PLACE, count))
        return np.minimum(count, ANY_PLACE).astype(np.int16)

    def _workspace(self, figures: BlockFigures, pairs: Pairs) -> Figures:
        """The most that one of a stage's blocks needs."""
        downsets = self.chains.downsets
        found = np.zeros(len(pairs.inner))
        for size in np.unique(figures.workspace):
            count = downsets.holds[:, figures.workspace == size].sum(axis=1)
            found[pairs.difference(count) > 0] = size
        return found
