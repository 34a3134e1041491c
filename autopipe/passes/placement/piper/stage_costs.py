"""The cost of each possible stage of strategy Piper, for each combination of data and tensor
parallelism of the stage's group of devices.

A downset is a set of blocks that contains all blocks on which its members depend. A stage lies
between two downsets: it contains the blocks of an outer downset that are not in an inner downset.
Its costs are sums over its blocks, except that a tensor that several blocks use, such as a shared
parameter, counts once.
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
from autopipe.passes.analysis.chain import Blocks, values_between_blocks
from autopipe.passes.analysis.gradients import sent_bytes
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.cost.communication import message_seconds
from autopipe.passes.cost.memory import (
    MemoryParts,
    fitting_micro_batches,
    parameter_state,
    saved_bytes,
)
from autopipe.passes.cost.roofline import update_seconds
from autopipe.passes.cost.stage_work import gradient_reduction_cost, stage_work, updated_fraction
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.partition.downsets import Downsets, Figures, NestedPairs
from autopipe.passes.sharding.regions import (
    NodeSplits,
    ReplicatedGraph,
    megatron_splits,
    replicated_graph,
    with_sample_splits,
)


@dataclass(frozen=True, slots=True)
class StageParallelism:
    """The parallelism of a stage: its group has `replicas` replicas of `tensor` neighbouring
    devices each. `splits` contains, for each block, the splits of its nodes.
    """

    replicas: int
    tensor: int
    splits: tuple[NodeSplits, ...]

    @property
    def devices(self) -> int:
        """Number of devices of the group."""
        return self.replicas * self.tensor


def stage_parallelisms(
    problem: Problem, blocks: Blocks, samples: SampleAxes
) -> Iterator[StageParallelism]:
    """Yield all combinations of data and tensor parallelism, in ascending order of the number of
    devices.

    Tensor parallelism stays inside a node of the cluster. A group of devices lies inside a node or
    consists of full nodes, so that its cost does not depend on its position.
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
            _self_contained_splits(network, nodes, megatron_splits(network, tensor, nodes))
            for nodes in blocks.nodes
        ]
        if tensor > 1 and not any(found):
            # No layer can be divided among this number of devices, so tensor parallelism would have
            # no effect.
            continue
        pairs = zip(blocks.nodes, found, strict=True)
        try:
            splits = tuple(
                with_sample_splits(samples, nodes, replicas, own) for nodes, own in pairs
            )
        except InfeasibleError:
            # The samples of some node cannot be divided evenly among this number of replicas.
            continue
        yield StageParallelism(replicas, tensor, splits)


def _self_contained_splits(
    network: ReplicatedGraph, nodes: tuple[int, ...], found: dict[int, tuple[Split, ...]]
) -> dict[int, tuple[Split, ...]]:
    """Return `found`, the tensor-parallel splits of the nodes `nodes` of one block, if no sharded
    value leaves the block. Otherwise return {}.

    A value is sharded if its node is split along an axis that the value has. It leaves the block if
    a node of another block reads it, or if it is an output of the graph.
    """
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
class BlockSums:
    """A quantity that is summed over the blocks of a stage.

    own: for each block, the part that belongs to this block only.
    common: (blocks, value) pairs for the parts that several blocks have in common. Each part counts
    once per stage that contains at least one of its blocks.
    """

    own: NDArray[np.float64]
    common: tuple[tuple[tuple[int, ...], float], ...] = ()

    @staticmethod
    def from_blocks(by_block: list[dict[Key, int]]) -> BlockSums:
        """Return the sums of values that are given by block and key, such as the bytes of a
        parameter by its name. If several blocks have a key, its maximum value counts once.
        """
        blocks: defaultdict[Key, dict[int, int]] = defaultdict(dict)
        for block, each in enumerate(by_block):
            for key, figure in each.items():
                blocks[key][block] = figure
        sums: Counter[tuple[int, ...]] = Counter()
        for figures in blocks.values():
            sums[tuple(figures)] += max(figures.values())
        own = np.array([float(sums.pop((block,), 0)) for block in range(len(by_block))])
        return BlockSums(own, tuple((members, float(figure)) for members, figure in sums.items()))

    def sum_between(self, downsets: Downsets, pairs: NestedPairs) -> Figures:
        """Return, for each pair (inner, outer) of nested downsets in `pairs`, the sum over the
        blocks of the outer downset that are not in the inner one.

        A downset is a set of blocks that contains all blocks on which its members depend. The
        blocks between two downsets form a stage.
        """
        if not self.own.any() and not self.common:
            return np.zeros(len(pairs.inner))
        found = pairs.difference(downsets.holds @ self.own)
        for blocks, figure in self.common:
            found += figure * (pairs.difference(downsets.holds[:, list(blocks)].sum(axis=1)) > 0)
        return found


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """Costs of each block on one device of a group, per micro-batch. Arrays are indexed by block.

    The seconds of forward and backward exclude the time for which a device waits for its host.
    """

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    host_forward_s: NDArray[np.float64]
    """Seconds that the host needs to launch the operators of a forward; 0 if the cluster
    description has no host time.
    """
    host_backward_s: NDArray[np.float64]
    kept: BlockSums
    """Bytes saved for backward per micro-batch."""
    state: BlockSums
    """Bytes of parameters, gradients and optimizer state."""
    gradients: BlockSums
    """Bytes of the gradients of parameters that all devices of the group hold in full."""
    sharded_gradients: BlockSums
    """Bytes on one device of the gradients of parameters that are sharded inside a replica."""
    workspace: NDArray[np.float64]
    """Peak bytes of temporary tensors while a block runs."""


def block_costs(problem: Problem, blocks: Blocks, sharing: StageParallelism) -> BlockCosts:
    """Return the costs of each block, as if it were a stage of its own on a group with the
    parallelism `sharing`.
    """
    devices = tuple(range(sharing.devices))
    pairs = zip(blocks.nodes, sharing.splits, strict=True)
    placement = Placement(
        tuple(Stage(nodes, devices, problem.micro_batch_size, splits) for nodes, splits in pairs)
    )
    costs = stage_costs(problem, placement)
    works = stage_work(problem, placement)
    state = []
    gradients = []
    sharded_gradients = []
    for parts in (work.parameter_parts for work in works):
        copies = {name: {name: sharing.devices // count} for name, count in parts}
        state.append(
            {
                name: parameter_state(problem, [(name, count)], copies[name]).total
                for name, count in parts
            }
        )
        sizes = {
            name: parameter_state(problem, [(name, count)]).gradient_bytes for name, count in parts
        }
        gradients.append({name: sizes[name] for name, count in parts if count == 1})
        sharded_gradients.append({name: sizes[name] for name, count in parts if count > 1})
    return BlockCosts(
        forward_s=np.array([cost.forward_s - cost.host_wait_s(Phase.FORWARD) for cost in costs]),
        backward_s=np.array([cost.backward_s - cost.host_wait_s(Phase.BACKWARD) for cost in costs]),
        host_forward_s=np.array(
            [cost.on_host.forward_s if cost.on_host else 0.0 for cost in costs]
        ),
        host_backward_s=np.array(
            [cost.on_host.backward_s if cost.on_host else 0.0 for cost in costs]
        ),
        kept=BlockSums.from_blocks([saved_bytes(problem, work.nodes) for work in works]),
        state=BlockSums.from_blocks(state),
        gradients=BlockSums.from_blocks(gradients),
        sharded_gradients=BlockSums.from_blocks(sharded_gradients),
        workspace=np.array([float(cost.transient_bytes) for cost in costs]),
    )


_MAX_ENTRIES = 2**22
"""Maximum number of entries of a temporary table."""


@dataclass(frozen=True, slots=True)
class StageMessages:
    """The messages that each possible stage receives, or those that it sends, per micro-batch of
    the graph.

    A downset is a set of blocks that contains all blocks on which its members depend. A pair
    (inner, outer) of nested downsets determines a stage: the blocks of the outer downset that are
    not in the inner one. Arrays are indexed by pair.

    sharded: bytes of values with a batch axis, which replicas divide.
    replicated: bytes of values without a batch axis, which each replica receives in full.
    count: number of messages.
    """

    sharded: Figures
    replicated: Figures
    count: Figures

    def local_bytes(self, fraction: float, pairs: NestedPairs) -> Figures:
        """Return the bytes of the messages of one replica that has `fraction` of the graph's
        samples, for each possible stage in `pairs`. A pair (inner, outer) of sets of blocks
        determines a stage: the blocks of the outer set that are not in the inner one.
        """
        sharded = self.sharded.take(pairs.numbers)
        found: Figures = sharded * fraction + self.replicated.take(pairs.numbers)
        return found


def messages_between(
    problem: Problem, blocks: Blocks, downsets: Downsets, samples: SampleAxes
) -> tuple[StageMessages, StageMessages]:
    """Return (received, sent): the messages of each possible stage.

    A downset is a set of blocks that contains all blocks on which its members depend. A pair
    (inner, outer) of nested downsets determines a stage: the blocks of the outer downset that are
    not in the inner one. The stage receives a value if the inner downset produces it and a block of
    the stage reads it. It sends a value if one of its blocks produces it and a block outside of the
    outer downset reads it. A value with several readers counts once.
    """
    block_of = {node: number for number, nodes in enumerate(blocks.nodes) for node in nodes}
    values = list(values_between_blocks(problem.graph, block_of))
    sizes = sent_bytes(problem.graph, problem.precision)
    made = downsets.holds[:, np.array([block for _, block, _ in values], dtype=int)]
    read = np.zeros(made.shape, dtype=np.int64)
    for column, (_, _, reading) in enumerate(values):
        read[:, column] = downsets.holds[:, reading].sum(axis=1)
    readers = np.array([len(reading) for _, _, reading in values])
    shared = [(samples.has_batch_dimension(name), sizes[name]) for name, _, _ in values]
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
            (still_read @ weight)[downsets.outer]
            - _pairwise_products(downsets, made, still_read * weight)
        )
        found = _pairwise_products(downsets, made[:, single], read_once * weight[single])
        found -= (read_once @ weight[single])[downsets.inner]
        for value in np.flatnonzero(~single):
            more = read[downsets.outer, value] > read[downsets.inner, value]
            found += weight[value] * (more & made[downsets.inner, value])
        received.append(found)
    return StageMessages(*received), StageMessages(*sent)


def _pairwise_products(
    downsets: Downsets, inner: NDArray[np.bool_], outer: NDArray[np.float64]
) -> Figures:
    """Return, for each pair of nested downsets, the scalar product of a row of `inner` and a row of
    `outer`. Both arrays have one row per downset; the rows are those of the inner and of the outer
    downset of the pair.

    A downset is a set of blocks that contains all blocks on which its members depend.
    """
    found = np.zeros(len(downsets.inner))
    width = len(downsets.holds)
    rows = max(1, _MAX_ENTRIES // width)
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
_AHEAD = 2
"""Factor by which the requested time limit is increased, so that stages for somewhat larger limits
are computed in advance.
"""
ANY_PLACE = np.iinfo(np.int16).max
"""Value of `ParallelismOption.farthest` for a stage that fits the memory at any distance from the
end of the pipeline.
"""


@dataclass(frozen=True, slots=True)
class ParallelismOption:
    """The possible stages with one combination of data and tensor parallelism, with or without
    recomputation. Arrays are indexed by stage.

    pairs: index of the pair (inner, outer) of downsets that determines the stage.
    seconds: seconds per micro-batch.
    farthest: maximum distance of the stage from the end of the pipeline at which its micro-batches
    in flight fit the memory. The distance is counted in stages, and the last stage has distance 1.
    """

    sharing: StageParallelism
    recompute: bool
    pairs: NDArray[np.int64]
    seconds: Figures
    farthest: NDArray[np.int16]

    def select(self, fits: NDArray[np.bool_]) -> ParallelismOption:
        """Return the option with only the stages for which `fits` is True."""
        places = np.flatnonzero(fits)
        arrays = self.pairs.take(places), self.seconds.take(places), self.farthest.take(places)
        return ParallelismOption(self.sharing, self.recompute, *arrays)


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The data of the search that does not depend on the micro-batch size: the blocks, their
    downsets, and the messages of the stages between two downsets.

    A downset is a set of blocks that contains all blocks on which its members depend. `samples` is
    the number of samples to which the bytes of messages refer.
    """

    blocks: Blocks
    downsets: Downsets
    received: StageMessages
    sent: StageMessages
    samples: int


class DownsetCosts:
    """Costs of all possible stages for the micro-batch size of one problem. A stage consists of the
    blocks of an outer downset that are not in an inner downset. A downset is a set of blocks that
    contains all blocks on which its members depend.

    The devices of a stage are not known. Its messages therefore use the slowest link of the
    cluster, and its operators take the time of the slowest device type.
    """

    def __init__(self, problem: Problem, chains: SearchSpace) -> None:
        self.problem = problem
        self.chains = chains
        cluster = problem.cluster
        downsets = chains.downsets
        self.link = cluster.slowest_link(range(cluster.size))
        self.limit = min(map(problem.memory_of, range(cluster.size)))
        self._whole = downsets.pairs.some(
            (downsets.outer == 0) & (downsets.inner == len(downsets.holds) - 1)
        )
        """The pair (inner, outer) of sets of blocks whose stage, the difference of the two,
        contains all blocks.
        """
        self._known_s = -np.inf
        """Time limit in seconds up to which `_known` contains all stages."""
        self._known = list[ParallelismOption]()
        """Cached options, because a search requests options for slowly growing limits."""

    @cached_property
    def _costs_by_parallelism(self) -> list[tuple[StageParallelism, BlockCosts]]:
        """All combinations of data and tensor parallelism, each with its costs of blocks."""
        problem = self.problem
        blocks = self.chains.blocks
        ways = stage_parallelisms(problem, blocks, sample_axes(problem.graph))
        return [(sharing, block_costs(problem, blocks, sharing)) for sharing in ways]

    @cached_property
    def _minimum_work(self) -> NDArray[np.float64]:
        """For each block: minimum, over all combinations of data and tensor parallelism, of its
        seconds per micro-batch times its number of devices.
        """
        work = (
            sharing.devices * (figures.forward_s + figures.backward_s)
            for sharing, figures in self._costs_by_parallelism
        )
        found: NDArray[np.float64] = reduce(np.minimum, work)
        return found

    @cached_property
    def _outside_work(self) -> Figures:
        """For each possible stage: lower bound on the work (seconds times devices) of all blocks
        that are not in the stage.
        """
        downsets = self.chains.downsets
        found: Figures = self._minimum_work.sum() - BlockSums(self._minimum_work).sum_between(
            downsets, downsets.pairs
        )
        return found

    @property
    def minimum_slowest_stage_s(self) -> float:
        """Lower bound on the seconds of the slowest stage: all work, divided evenly among all
        devices.
        """
        on_device = float(self._minimum_work.sum()) / self.problem.cluster.size
        on_host = min(
            float((figures.host_forward_s + figures.host_backward_s).sum())
            for _, figures in self._costs_by_parallelism
        )
        return max(on_device, on_host / self.problem.cluster.size)

    @property
    def maximum_stage_s(self) -> float:
        """Upper bound on the seconds per micro-batch of any stage."""
        messages = sum(
            message_seconds(
                self.link,
                float(each.count.max()),
                float(each.sharded.max() + each.replicated.max()),
            )
            for each in (self.chains.received, self.chains.sent)
        )
        found = (
            float((2 * figures.forward_s + figures.backward_s).sum())
            + float((2 * figures.host_forward_s + figures.host_backward_s).sum())
            + float(self._step_end_seconds(sharing, figures, self._whole).max())
            for sharing, figures in self._costs_by_parallelism
        )
        return max(found) + messages

    def feasible_stages(self, most_s: float) -> list[ParallelismOption]:
        """Return the stages that can be part of a pipeline all of whose stages take at most
        `most_s` seconds per micro-batch.

        There is one option per combination of parallelism and recomputation. Options on fewer
        devices come first. A returned stage takes at most `most_s` itself, fits the memory at least
        as the last stage, and leaves to the other devices at most the work that they can do in
        `most_s`.
        """
        if len(self.problem.cluster.kinds) > 1:
            # The device type with the slowest optimizer update depends on the set of stages that is
            # computed together. Stages computed for a larger limit are therefore invalid here and
            # are computed again.
            return self._make_options(self.chains.downsets.pairs, most_s)
        if most_s > self._known_s:
            self._known_s = most_s * _AHEAD
            self._known = self._make_options(self.chains.downsets.pairs, self._known_s)
        found = []
        for option in self._known:
            fits = option.seconds <= most_s
            if others := self.problem.cluster.size - option.sharing.devices:
                fits &= self._outside_work.take(option.pairs) <= others * most_s
            if fits.any():
                found.append(option.select(fits))
        return found

    def single_stage_options(self) -> list[ParallelismOption]:
        """Return the options for a pipeline that consists of a single stage."""
        return self._make_options(self._whole, np.inf)

    def _make_options(self, among: NestedPairs, most_s: float) -> list[ParallelismOption]:
        """Return the options for the stages in `among` that take at most `most_s` seconds per
        micro-batch. An option contains all stages with one combination of parallelism and
        recomputation. Options without stages are omitted.

        `among` contains a pair (inner, outer) of sets of blocks for each stage, which consists of
        the blocks of the outer set that are not in the inner one.
        """
        wanted = self.problem.recompute if self.problem.train else "none"
        recomputations = {"none": (False,), "full": (True,)}.get(wanted, (False, True))
        found = (
            self._make_option(sharing, figures, recompute, among, most_s)
            for sharing, figures in self._costs_by_parallelism
            for recompute in recomputations
        )
        return [option for option in found if len(option.pairs)]

    def _make_option(
        self,
        sharing: StageParallelism,
        figures: BlockCosts,
        recompute: bool,
        among: NestedPairs,
        most_s: float,
    ) -> ParallelismOption:
        """Return the option with the parallelism `sharing`, with or without recomputation, for the
        stages in `among` that take at most `most_s` seconds per micro-batch.

        `among` contains a pair (inner, outer) of sets of blocks for each stage, which consists of
        the blocks of the outer set that are not in the inner one.
        """
        seconds = self._compute_seconds(figures, recompute, among)
        left = self._outside_work.take(among.numbers)
        others = self.problem.cluster.size - sharing.devices
        enough = left <= (others * most_s if others else _ROUNDING * seconds)
        places = np.flatnonzero((seconds <= most_s) & enough)
        pairs = among.some(places)
        share = self.problem.micro_batch_size / self.chains.samples / sharing.replicas
        received, sent = (
            each.local_bytes(share, pairs) for each in (self.chains.received, self.chains.sent)
        )
        messages = message_seconds(
            self.link, self.chains.received.count.take(pairs.numbers), received
        )
        if self.problem.train:
            messages = messages + message_seconds(
                self.link, self.chains.sent.count.take(pairs.numbers), sent
            )
        seconds = seconds[places] + self._step_end_seconds(sharing, figures, pairs) + messages
        quick = np.flatnonzero(seconds <= most_s)
        pairs = pairs.some(quick)
        seconds = seconds[quick]
        farthest = self._farthest_positions(figures, recompute, pairs, received[quick], sent[quick])
        return ParallelismOption(sharing, recompute, pairs.numbers, seconds, farthest).select(
            farthest > 0
        )

    def _compute_seconds(self, figures: BlockCosts, recompute: bool, among: NestedPairs) -> Figures:
        """Return the seconds of forward plus backward of a micro-batch, for each possible stage in
        `among`.

        Forward and backward each take the time of the device, or the time of the host to launch the
        operators if that is longer.
        """
        downsets = self.chains.downsets
        if not figures.host_forward_s.any():
            return BlockSums(
                figures.backward_s + figures.forward_s * (2 if recompute else 1)
            ).sum_between(downsets, among)
        backward = figures.backward_s + figures.forward_s * recompute
        host_backward = figures.host_backward_s + figures.host_forward_s * recompute
        seconds: Figures = np.zeros(len(among.inner))
        for on_device, on_host in (
            (figures.forward_s, figures.host_forward_s),
            (backward, host_backward),
        ):
            seconds += np.maximum(
                BlockSums(on_device).sum_between(downsets, among),
                BlockSums(on_host).sum_between(downsets, among),
            )
        return seconds

    def _step_end_seconds(
        self, sharing: StageParallelism, figures: BlockCosts, pairs: NestedPairs
    ) -> Figures:
        """Return the seconds of the gradient all-reduce and the optimizer update, divided by the
        number of micro-batches, for each possible stage in `pairs`.
        """
        if not self.problem.train:
            return np.zeros(1)
        problem = self.problem
        downsets = self.chains.downsets
        replicated = figures.gradients.sum_between(downsets, pairs)
        sharded = figures.sharded_gradients.sum_between(downsets, pairs)
        group = range(sharing.devices)
        equal_shards = range(0, sharing.devices, sharing.tensor)
        seconds = gradient_reduction_cost(problem, group).seconds_each(replicated)
        seconds = seconds + gradient_reduction_cost(problem, equal_shards).seconds_each(sharded)
        updated = replicated * updated_fraction(problem, len(group))
        updated = updated + sharded * updated_fraction(problem, len(equal_shards))
        states = problem.optimizer.states
        updates = (
            update_seconds(device, updated, states, tensors=0) for device in problem.cluster.kinds
        )
        seconds = seconds + max(updates, key=np.sum)
        found: Figures = seconds / problem.micro_batches
        return found

    def _farthest_positions(
        self,
        figures: BlockCosts,
        recompute: bool,
        pairs: NestedPairs,
        received: Figures,
        sent: Figures,
    ) -> NDArray[np.int16]:
        """Return the field `farthest` of `ParallelismOption` for each stage: the maximum distance
        from the end of the pipeline at which the stage fits the memory. It is 0 if the stage does
        not fit even as the last one.

        A stage with k - 1 stages after it has k micro-batches in flight.
        """
        problem = self.problem
        downsets = self.chains.downsets
        workspace = np.zeros(len(pairs.inner))
        """Maximum workspace in bytes over the blocks of each stage."""
        for size in np.unique(figures.workspace):
            count = downsets.holds[:, figures.workspace == size].sum(axis=1)
            workspace[pairs.difference(count) > 0] = size
        memory = MemoryParts(
            state=figures.state.sum_between(downsets, pairs),
            # The bytes of 16-bit copies of parameters are already counted in `state`, so this part
            # is 0.
            low_precision=np.zeros(len(pairs.inner)),
            workspace=workspace,
            received=received,
            sent=sent,
            saved=figures.kept.sum_between(downsets, pairs),
        )
        constant, each = memory.needed(problem, recompute)
        # Sums of bytes are exact integers only up to rounding errors. A tolerance of 0.001 bytes
        # prevents a rounding error from rejecting a stage that fits.
        fitting = fitting_micro_batches(self.limit - constant + 1e-3, each, ANY_PLACE)
        return np.where(fitting >= problem.micro_batches, ANY_PLACE, fitting).astype(np.int16)
