"""The price of every stage between two downsets, for each way in which a group of devices may share
it.

A stage is what an outer downset holds and an inner one does not. Figures of blocks add up over it,
but for those of what several of its blocks have in common.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase
from autopipe.passes.analysis.chain import Blocks, values_between
from autopipe.passes.analysis.gradients import most_widened, sent_bytes
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.cost.memory import saved_bytes, state_of
from autopipe.passes.cost.roofline import update_line
from autopipe.passes.cost.stage_work import exchange_of_gradients, stage_work, updated_part
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.partition.downsets import Downsets, Figures, Pairs
from autopipe.passes.sharding.regions import (
    NodeSplits,
    ReplicatedGraph,
    group_splits,
    replicated_graph,
    with_samples_split,
)


@dataclass(frozen=True, slots=True)
class StageSharing:
    """`replicas` share the samples, each of them `tensor` neighbouring devices that share layers;
    `splits` by block.
    """

    replicas: int
    tensor: int
    splits: tuple[NodeSplits, ...]

    @property
    def devices(self) -> int:
        """The size of the group."""
        return self.replicas * self.tensor


def sharings(problem: Problem, blocks: Blocks, samples: SampleAxes) -> Iterator[StageSharing]:
    """All ways of sharing a stage, the smallest groups first. Layers are shared inside a node of
    the cluster. A group fits into a node or has whole nodes, so that what it takes does not depend
    on where it stands.
    """
    graph = problem.graph
    node = problem.cluster.devices_per_node
    groups = [
        count for count in range(1, problem.cluster.size + 1) if count <= node or count % node == 0
    ]
    for devices, tensor in (
        (count, tensor) for count in groups for tensor in range(1, min(count, node) + 1)
    ):
        replicas = devices // tensor
        if devices % tensor or node % tensor or problem.micro_batch_size % replicas:
            continue
        if replicas > 1 and not graph.batch_axes:
            continue
        network = replicated_graph(graph, replicas, samples)
        found = [
            _closed(network, nodes, group_splits(network, tensor, nodes)) for nodes in blocks.nodes
        ]
        if tensor > 1 and not any(found):
            continue  # No layer can be shared by so many devices.
        pairs = zip(blocks.nodes, found, strict=True)
        try:
            splits = tuple(
                with_samples_split(samples, nodes, replicas, own) for nodes, own in pairs
            )
        except InfeasibleError:
            continue  # Some node's samples cannot be cut into so many equal parts.
        yield StageSharing(replicas, tensor, splits)


def _closed(
    network: ReplicatedGraph, nodes: tuple[int, ...], found: dict[int, tuple[Split, ...]]
) -> dict[int, tuple[Split, ...]]:
    """The splits of a block's layers; none where a value would leave the block cut."""
    graph = network.graph
    members = set(nodes)
    for node, splits in found.items():
        for name, words in zip(
            graph.nodes[node].outputs, network.uses[node].space.results, strict=True
        ):
            leaves = name in graph.outputs or not members.issuperset(network.readers.get(name, ()))
            if leaves and any(splits[-1].axis in dimension for dimension in words or ()):
                return {}
    return found


Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Sums:
    """Figures that add up over a stage's blocks: `own` of one block each, and `common` ones of
    several, once each.
    """

    own: NDArray[np.float64]
    common: tuple[tuple[tuple[int, ...], float], ...] = ()

    @staticmethod
    def of(by_block: list[dict[Key, int]]) -> Sums:
        """Figures by block and by what they are of: the same thing counts once, at its largest."""
        blocks: defaultdict[Key, dict[int, int]] = defaultdict(dict)
        for block, each in enumerate(by_block):
            for key, figure in each.items():
                blocks[key][block] = figure
        sums: Counter[tuple[int, ...]] = Counter()
        for figures in blocks.values():
            sums[tuple(figures)] += max(figures.values())
        own = np.array([float(sums.pop((block,), 0)) for block in range(len(by_block))])
        return Sums(own, tuple((members, float(figure)) for members, figure in sums.items()))

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
    """Seconds and bytes on one device of a group. Those of a micro-batch are as in `StageCost`, but
    seconds of forward and backward are the device's alone.
    """

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    host_forward_s: NDArray[np.float64]
    """Seconds in which the host starts a forward's operators; 0 if its time does not count."""
    host_backward_s: NDArray[np.float64]
    kept: Sums  # Bytes that backward needs of a micro-batch.
    state: Sums  # Bytes of parameters, gradients and optimizer state.
    gradients: Sums
    """Bytes of the gradients of parameters that each device of the group holds whole."""
    cut_gradients: Sums
    """Bytes on one device of the gradients of parameters that the devices of a replica share."""
    workspace: NDArray[np.float64]  # Bytes that come and go while a block runs.


def block_figures(problem: Problem, blocks: Blocks, sharing: StageSharing) -> BlockFigures:
    """The figures of each block on such a group, as if it were a stage by itself."""
    devices = tuple(range(sharing.devices))
    pairs = zip(blocks.nodes, sharing.splits, strict=True)
    placement = Placement(
        tuple(Stage(nodes, devices, problem.micro_batch_size, splits) for nodes, splits in pairs)
    )
    costs = stage_costs(problem, placement)
    works = stage_work(problem, placement)
    state = []
    gradients = []
    cut_gradients = []
    for parts in (work.parameter_parts for work in works):
        copies = {name: {name: sharing.devices // count} for name, count in parts}
        state.append(
            {name: state_of(problem, [(name, count)], copies[name]).total for name, count in parts}
        )
        sizes = {name: state_of(problem, [(name, count)]).gradient_bytes for name, count in parts}
        gradients.append({name: sizes[name] for name, count in parts if count == 1})
        cut_gradients.append({name: sizes[name] for name, count in parts if count > 1})
    return BlockFigures(
        forward_s=np.array([cost.forward_s - cost.host_wait_s(Phase.FORWARD) for cost in costs]),
        backward_s=np.array([cost.backward_s - cost.host_wait_s(Phase.BACKWARD) for cost in costs]),
        host_forward_s=np.array(
            [cost.on_host.forward_s if cost.on_host else 0.0 for cost in costs]
        ),
        host_backward_s=np.array(
            [cost.on_host.backward_s if cost.on_host else 0.0 for cost in costs]
        ),
        kept=Sums.of([saved_bytes(problem, work.nodes) for work in works]),
        state=Sums.of(state),
        gradients=Sums.of(gradients),
        cut_gradients=Sums.of(cut_gradients),
        workspace=np.array([float(cost.transient_bytes) for cost in costs]),
    )


_CELLS = 2**22  # Cells of a table made at once.


@dataclass(frozen=True, slots=True)
class Messages:
    """For each pair of downsets what its stage receives, or sends. `cut` are bytes, for the samples
    of the graph, of values that replicas share out; `whole` of those that each gets.
    """

    cut: Figures
    whole: Figures
    count: Figures

    def local_bytes(self, share: float, pairs: Pairs) -> Figures:
        """Bytes on one replica that has a share of the graph's samples, for some of the pairs."""
        found: Figures = self.cut.take(pairs.numbers) * share + self.whole.take(pairs.numbers)
        return found


def messages_between(
    problem: Problem, blocks: Blocks, downsets: Downsets, samples: SampleAxes
) -> tuple[Messages, Messages]:
    """Messages that the stage of each pair receives, and those it sends. What a stage receives is
    made by the inner downset and read by one of the stage's own blocks; what it sends, made by one
    of these and read outside the outer downset. Each value counts once, however many blocks read
    it.
    """
    block_of = {node: number for number, nodes in enumerate(blocks.nodes) for node in nodes}
    values = list(values_between(problem.graph, block_of))
    sizes = sent_bytes(problem.graph, problem.precision)
    made = downsets.holds[:, np.array([block for _, block, _ in values], dtype=int)]
    read = np.zeros(made.shape, dtype=np.int64)
    for column, (_, _, reading) in enumerate(values):
        read[:, column] = downsets.holds[:, reading].sum(axis=1)
    readers = np.array([len(reading) for _, _, reading in values])
    shared = [(samples.carries(name), sizes[name]) for name, _, _ in values]
    weights = np.array([(size * cut, size * (not cut), 1.0) for cut, size in shared]).reshape(-1, 3)
    still_read = made & (read < readers)
    single = readers == 1
    read_once = read[:, single].astype(bool)
    received = []
    sent = []
    for weight in weights.T:
        if not weight.any():
            received.append(np.zeros(len(downsets.inner)))
            sent.append(received[-1])
            continue
        sent.append(
            (still_read @ weight)[downsets.outer] - _products(downsets, made, still_read * weight)
        )
        found = _products(downsets, made[:, single], read_once * weight[single])
        found -= (read_once @ weight[single])[downsets.inner]
        for value in np.flatnonzero(~single):
            more = read[downsets.outer, value] > read[downsets.inner, value]
            found += weight[value] * (more & made[downsets.inner, value])
        received.append(found)
    return Messages(*received), Messages(*sent)


def _products(downsets: Downsets, inner: NDArray[np.bool_], outer: NDArray[np.float64]) -> Figures:
    """For each pair the product of two rows: that of its inner downset and that of its outer
    one.
    """
    found = np.zeros(len(downsets.inner))
    width = len(downsets.holds)
    rows = max(1, _CELLS // width)
    across = np.ascontiguousarray(outer.T)
    for begin in range(0, width, rows):
        first, last = np.searchsorted(downsets.inner, (begin, begin + rows))
        if first < last:
            table = inner[begin : begin + rows].astype(float) @ across
            found[first:last] = table[
                downsets.inner[first:last] - begin, downsets.outer[first:last]
            ]
    return found


_ROUNDING = 1e-9
_AHEAD = 2  # By what factor more time stages are priced for than is asked for.
ANY_PLACE = np.iinfo(np.int16).max  # A stage that fits wherever it stands.


@dataclass(frozen=True, slots=True)
class Option:
    """Stages shared in one way: pairs of downsets, seconds a micro-batch, and the farthest place
    from the end, counted from 1, at which memory holds each.
    """

    sharing: StageSharing
    recompute: bool
    pairs: NDArray[np.int64]
    seconds: Figures
    farthest: NDArray[np.int16]

    def some(self, fits: NDArray[np.bool_]) -> Option:
        """The part of it that fits."""
        places = np.flatnonzero(fits)
        arrays = self.pairs.take(places), self.seconds.take(places), self.farthest.take(places)
        return Option(self.sharing, self.recompute, *arrays)


@dataclass(frozen=True, slots=True)
class Chains:
    """Facts common to micro-batches of any size: blocks, their downsets, and the messages between
    them.
    """

    blocks: Blocks
    downsets: Downsets
    received: Messages
    sent: Messages
    samples: int  # Samples that messages are counted for.


class DownsetPrices:
    """Prices of stages for the micro-batches of one problem. A stage receives and sends over the
    slowest link that there is, since where it stands is not known, and is as slow as on the slowest
    device.
    """

    def __init__(self, problem: Problem, chains: Chains) -> None:
        self.problem = problem
        self.chains = chains
        cluster = problem.cluster
        downsets = chains.downsets
        self.link = cluster.slowest_link(range(cluster.size))
        self.limit = min(map(problem.memory_of, range(cluster.size)))
        self._whole = downsets.pairs.some(
            (downsets.outer == 0) & (downsets.inner == len(downsets.holds) - 1)
        )
        """The pair of all blocks and none."""
        self._known_s = -np.inf
        self._known = list[Option]()
        """The most seconds for which options are known, and these: a search asks again and again,
        for a bit more.
        """

    @cached_property
    def _shared(self) -> list[tuple[StageSharing, BlockFigures]]:
        problem = self.problem
        blocks = self.chains.blocks
        ways = sharings(problem, blocks, sample_axes(problem.graph))
        return [(sharing, block_figures(problem, blocks, sharing)) for sharing in ways]

    @cached_property
    def _least_work(self) -> NDArray[np.float64]:
        """For each block the least seconds of a micro-batch's computation, times the devices that
        share it.
        """
        work = (
            sharing.devices * (figures.forward_s + figures.backward_s)
            for sharing, figures in self._shared
        )
        found: NDArray[np.float64] = reduce(np.minimum, work)
        return found

    @cached_property
    def _left(self) -> Figures:
        """The least work that each stage leaves to others."""
        downsets = self.chains.downsets
        found: Figures = self._least_work.sum() - Sums(self._least_work).over(
            downsets, downsets.pairs
        )
        return found

    @property
    def least_s(self) -> float:
        """Seconds that the slowest stage takes at least: an even share of what all blocks take."""
        on_device = float(self._least_work.sum()) / self.problem.cluster.size
        on_host = min(
            float((figures.host_forward_s + figures.host_backward_s).sum())
            for _, figures in self._shared
        )
        return max(on_device, on_host / self.problem.cluster.size)

    @property
    def most_s(self) -> float:
        """Seconds that no stage exceeds."""
        messages = sum(
            each.count.max() * self.link.latency_s
            + (each.cut.max() + each.whole.max()) / self.link.bandwidth_bytes_per_s
            for each in (self.chains.received, self.chains.sent)
        )
        found = (
            float((2 * figures.forward_s + figures.backward_s).sum())
            + float((2 * figures.host_forward_s + figures.host_backward_s).sum())
            + float(self._step_seconds(sharing, figures, self._whole).max())
            for sharing, figures in self._shared
        )
        return max(found) + float(messages)

    def options(self, most_s: float) -> list[Option]:
        """All stages that take no more than `most_s`, fit somewhere, and leave no more work to the
        other devices than these do in that time; smaller groups first.
        """
        if (
            len(self.problem.cluster.kinds) > 1
        ):  # Which kind updates slowest is told by all stages that are priced.
            return self._options(self.chains.downsets.pairs, most_s)
        if most_s > self._known_s:
            self._known_s = most_s * _AHEAD
            self._known = self._options(self.chains.downsets.pairs, self._known_s)
        found = []
        for option in self._known:
            fits = option.seconds <= most_s
            if others := self.problem.cluster.size - option.sharing.devices:
                fits &= self._left.take(option.pairs) <= others * most_s
            if fits.any():
                found.append(option.some(fits))
        return found

    def whole(self) -> list[Option]:
        """All blocks as one stage, in every way that fits."""
        return self._options(self._whole, np.inf)

    def _options(self, among: Pairs, most_s: float) -> list[Option]:
        wanted = self.problem.recompute if self.problem.train else "none"
        recomputations = {"none": (False,), "full": (True,)}.get(wanted, (False, True))
        found = (
            self._option(sharing, figures, recompute, among, most_s)
            for sharing, figures in self._shared
            for recompute in recomputations
        )
        return [option for option in found if len(option.pairs)]

    def _option(
        self,
        sharing: StageSharing,
        figures: BlockFigures,
        recompute: bool,
        among: Pairs,
        most_s: float,
    ) -> Option:
        seconds = self._compute_seconds(figures, recompute, among)
        left = self._left.take(among.numbers)
        others = self.problem.cluster.size - sharing.devices
        enough = left <= (others * most_s if others else _ROUNDING * seconds)
        places = np.flatnonzero((seconds <= most_s) & enough)
        pairs = among.some(places)
        share = self.problem.micro_batch_size / self.chains.samples / sharing.replicas
        received, sent = (
            each.local_bytes(share, pairs) for each in (self.chains.received, self.chains.sent)
        )
        messages = np.zeros(1)
        for each, size in ((self.chains.received, received), (self.chains.sent, sent))[
            : 1 + self.problem.train
        ]:
            count = each.count.take(pairs.numbers)
            messages = (
                messages + count * self.link.latency_s + size / self.link.bandwidth_bytes_per_s
            )
        seconds = seconds[places] + self._step_seconds(sharing, figures, pairs) + messages
        quick = np.flatnonzero(seconds <= most_s)
        pairs = pairs.some(quick)
        seconds = seconds[quick]
        farthest = self._farthest(figures, recompute, pairs, received[quick], sent[quick])
        return Option(sharing, recompute, pairs.numbers, seconds, farthest).some(farthest > 0)

    def _compute_seconds(self, figures: BlockFigures, recompute: bool, among: Pairs) -> Figures:
        """Return the seconds of a micro-batch's tasks: of each the longer of the device's time and
        the host's.
        """
        downsets = self.chains.downsets
        if not figures.host_forward_s.any():
            return Sums(figures.backward_s + figures.forward_s * (2 if recompute else 1)).over(
                downsets, among
            )
        backward = figures.backward_s + figures.forward_s * recompute
        host_backward = figures.host_backward_s + figures.host_forward_s * recompute
        seconds: Figures = np.zeros(len(among.inner))
        for on_device, on_host in (
            (figures.forward_s, figures.host_forward_s),
            (backward, host_backward),
        ):
            seconds += np.maximum(
                Sums(on_device).over(downsets, among), Sums(on_host).over(downsets, among)
            )
        return seconds

    def _step_seconds(self, sharing: StageSharing, figures: BlockFigures, pairs: Pairs) -> Figures:
        """A micro-batch's share of the end of a step: summing gradients over replicas, updating
        parameters.
        """
        if not self.problem.train:
            return np.zeros(1)
        problem = self.problem
        downsets = self.chains.downsets
        whole = figures.gradients.over(downsets, pairs)
        cut = figures.cut_gradients.over(downsets, pairs)
        every = range(sharing.devices)
        alike = range(0, sharing.devices, sharing.tensor)
        seconds = exchange_of_gradients(problem, every).seconds_each(whole)
        seconds = seconds + exchange_of_gradients(problem, alike).seconds_each(cut)
        updated = whole * updated_part(problem, len(every)) + cut * updated_part(
            problem, len(alike)
        )
        lines = (
            update_line(device, problem.optimizer.states) for device in set(problem.cluster.devices)
        )
        seconds = seconds + max(
            (updated * line.per_byte_s + line.fixed_s * (updated > 0) for line in lines), key=np.sum
        )
        found: Figures = seconds / problem.micro_batches
        return found

    def _farthest(
        self, figures: BlockFigures, recompute: bool, pairs: Pairs, received: Figures, sent: Figures
    ) -> NDArray[np.int16]:
        """The farthest place from the end at which each stage fits; 0 for none. At place k it keeps
        k micro-batches.
        """
        downsets = self.chains.downsets
        train = self.problem.train
        workspace = np.zeros(len(pairs.inner))  # The most that one of a stage's blocks needs.
        for size in np.unique(figures.workspace):
            count = downsets.holds[:, figures.workspace == size].sum(axis=1)
            workspace[pairs.difference(count) > 0] = size
        always = figures.state.over(downsets, pairs) + workspace + (1 + train) * (received + sent)
        each = figures.kept.over(downsets, pairs) if train else np.zeros_like(always)
        if recompute:
            always = always + each
            each = received * most_widened(self.problem.precision)
        room = self.limit - always + 1e-3  # Sums of bytes are whole numbers, but for rounding.
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.where(each > 0, np.floor(room / each), np.inf)
        most = np.where(room < 0, 0, np.where(most >= self.problem.micro_batches, ANY_PLACE, most))
        return np.minimum(most, ANY_PLACE).astype(np.int16)
