"""The placement strategy Piper: it merges the nodes of a graph into blocks, and partitions the
blocks into stages by dynamic programming over downsets.

Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization"
(NeurIPS 2021), section 4.

A downset is a set of blocks that contains all blocks that its members depend on. A chain of stages
corresponds to a sequence of growing downsets; each stage is the difference of two consecutive ones.

The paper minimises the time of the slowest stage by (downset, number of stages after it, devices).
This module tests time limits instead. For a limit t, let N(D, d) be the minimum number of stages
that compute all blocks outside of downset D on the last d devices:

    N(all blocks, d) = 0
    N(D, d) = 1 + min N(D', d - s) over stages D' - D on s devices that take at most t seconds and
              whose memory suffices with N(D', d - s) stages after them

Fewer stages are never worse: the number of micro-batches in flight at a stage, and therefore its
memory, grows with the number of stages after it.

The paper starts from layers. An ONNX graph has about ten times as many operators as layers, so
operators are first merged into blocks.
"""

from __future__ import annotations

import functools
import heapq
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.errors import ConfigurationError, InfeasibleError, OutOfMemoryError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage, recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.chain import Blocks, values_between_blocks
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import (
    check_operators,
    describe_device_types,
    equal_device_ranges,
    with_required_recomputation,
)
from autopipe.passes.cost.roofline import Seconds, mean_node_seconds
from autopipe.passes.partition.chain_cut import chain_step_seconds
from autopipe.passes.partition.downsets import Downsets, count_downsets
from autopipe.passes.placement.piper.stage_costs import (
    ANY_PLACE,
    DownsetCosts,
    ParallelismOption,
    SearchSpace,
    StageParallelism,
    messages_between,
)
from autopipe.passes.schedule.device_order import best_micro_batch_size
from autopipe.passes.sharding.regions import check_constraints_met

MAX_FRACTION = 1 / 30
"""Maximum fraction of the graph's work in a block that consists of several nodes."""
LIGHT = MAX_FRACTION / 16
"""Fraction of the graph's work up to which a block is light: it is merged even if the result
exceeds `MAX_FRACTION`.
"""


def merge_nodes(graph: Graph, seconds: Seconds) -> Blocks:
    """Merge the nodes of a graph into blocks. `seconds` contains the time of each node.

    Pairs of blocks are merged greedily: first the pair whose merging saves the most bytes that
    cross block boundaries, and among equal pairs the one with the least work. In a pair (first,
    second), the second block reads from the first one. A pair is merged only in two cases, in which
    the blocks can still be ordered topologically:

    - the second block depends only on the first block and on blocks on which the first one depends;
    - the first block is light (at most the fraction `LIGHT` of all work), and all other blocks that
      read from it depend on the second block.

    A node that each stage recomputes joins its first reader.
    """
    merging = _BlockMerger(graph, seconds)
    waiting = [
        merging.sort_key(first, second)
        for second in merging.members
        for first in merging.before[second]
    ]
    heapq.heapify(waiting)
    while waiting:
        entry = heapq.heappop(waiting)
        _, _, first, second = entry
        if (
            first in merging.joined
            or second in merging.joined
            or not merging.can_merge(first, second)
        ):
            continue
        # When a merge changes the sort key of a pair, the pair is pushed again with the new key. An
        # entry with an outdated key is skipped.
        if entry == merging.sort_key(first, second):
            merging.merge(first, second)
            for changed in dict.fromkeys(merging.affected_pairs(first)):
                heapq.heappush(waiting, merging.sort_key(*changed))
    nodes = merging.nodes_in_order() or [[]]
    block_of = {node: number for number, each in enumerate(nodes) for node in each}
    consumers = graph.consumers()
    for node in sorted(merging.apart, reverse=True):
        readers = (
            reader for name in graph.nodes[node].outputs for reader in consumers.get(name, ())
        )
        block_of[node] = min((block_of[reader] for reader in readers), default=0)
        nodes[block_of[node]].append(node)
    return Blocks.of(graph, nodes)


class _BlockMerger:
    """The blocks while they are merged. A block is identified by one of its nodes."""

    def __init__(self, graph: Graph, seconds: Seconds) -> None:
        self.graph = graph
        self.apart = recomputed_nodes(graph)
        self.members = {node: [node] for node in range(len(graph.nodes)) if node not in self.apart}
        total = float(sum(seconds[node] for node in self.members)) or 1.0
        self.weight = {node: float(seconds[node]) / total for node in self.members}
        self.before: dict[int, set[int]] = {node: set() for node in self.members}
        """For each block: the blocks whose values it reads."""
        self.after: dict[int, set[int]] = {node: set() for node in self.members}
        """For each block: the blocks that read its values."""
        self.written: dict[int, set[str]] = {node: set() for node in self.members}
        self.read: dict[int, set[str]] = {node: set() for node in self.members}
        self.readers: dict[str, set[int]] = {}
        self.joined: set[int] = set()
        """Blocks that no longer exist, because they were merged into another block."""
        for name, producer, readers in values_between_blocks(
            graph, {node: node for node in self.members}
        ):
            self.readers[name] = set(readers)
            self.written[producer].add(name)
            for reader in readers:
                self.read[reader].add(name)
                self.before[reader].add(producer)
                self.after[producer].add(reader)
        self.ancestors: dict[int, int] = {}
        for node in self.members:
            above = (self.ancestors[producer] | 1 << producer for producer in self.before[node])
            self.ancestors[node] = functools.reduce(operator.or_, above, 0)

    def sort_key(self, first: int, second: int) -> tuple[float, float, int, int]:
        """Return the key by which pairs of blocks are sorted, in ascending order: minus the number
        of bytes that no longer enter or leave a block after merging; then the work of both blocks;
        then their identifiers.
        """
        saved = 0
        for name in self.read[second] & (self.written[first] | self.read[first]):
            inside = name in self.written[first] and self.readers[name] <= {first, second}
            saved += self.graph.type_of(name).bytes * (2 if inside else 1)
        return -float(saved), self.weight[first] + self.weight[second], first, second

    def can_merge(self, first: int, second: int) -> bool:
        """True if the work and the dependencies of two blocks permit merging.

        The merged block must have at most the fraction `MAX_FRACTION` of all work, unless one of
        the two is light (at most the fraction `LIGHT`). After merging, the blocks must still have a
        topological order.
        """
        one = self.weight[first]
        two = self.weight[second]
        if one + two > MAX_FRACTION and min(one, two) > LIGHT:
            return False
        if all(self.ancestors[first] >> other & 1 for other in self.before[second] - {first}):
            return True
        return one <= LIGHT and all(
            self.ancestors[other] >> second & 1 for other in self.after[first] - {second}
        )

    def merge(self, first: int, second: int) -> None:
        """Merge block `second` into block `first`."""
        self.joined.add(second)
        self.members[first] += self.members.pop(second)
        self.weight[first] += self.weight.pop(second)
        for name in self.read.pop(second):
            self.readers[name] = self.readers[name] - {second} | {first}
            self.read[first].add(name)
        self.written[first] |= self.written.pop(second)
        for other in self.before.pop(second):
            self.after[other].discard(second)
            if other != first:
                self.after[other].add(first)
                self.before[first].add(other)
        for other in self.after.pop(second):
            self.before[other].discard(second)
            self.before[other].add(first)
            self.after[first].add(other)
        self.ancestors[first] = (self.ancestors[first] | self.ancestors[second]) & ~(
            1 << first | 1 << second
        )

    def affected_pairs(self, block: int) -> Iterator[tuple[int, int]]:
        """Yield the pairs of blocks whose sort key or possible merging may change after another
        block was merged into `block`.
        """
        for other in sorted(self.before[block]):
            yield other, block
            for reader in sorted(self.after[other]):
                yield other, reader
        for after in sorted(self.after[block]):
            for other in sorted(self.before[after]):
                yield other, after

    def nodes_in_order(self) -> list[list[int]]:
        """Return the nodes of each block, the blocks in topological order. If several blocks can
        come next, the block with the smallest node comes first.
        """
        left = {block: len(before) for block, before in self.before.items()}
        ready = [(min(self.members[block]), block) for block, count in left.items() if not count]
        heapq.heapify(ready)
        found: list[list[int]] = []
        while ready:
            _, block = heapq.heappop(ready)
            found.append(self.members[block])
            for after in self.after[block]:
                left[after] -= 1
                if not left[after]:
                    heapq.heappush(ready, (min(self.members[after]), after))
        return found


_STEP = 1.15
"""Factor between the lower bound and the first time limit that is tried, and between a limit that
is too low and the next limit.
"""
_SLOWER = 1.1
"""Factor by which the time limit is raised to find chains with fewer and slower stages."""


@dataclass(frozen=True, slots=True)
class DownsetStage:
    """A stage of a chain: the blocks of downset number `outer` that are not in downset number
    `inner`. A downset is a set of blocks that contains all blocks on which its members depend.

    `device` is the first device of the stage, and `seconds` its time per micro-batch.
    """

    inner: int
    outer: int
    sharing: StageParallelism
    recompute: bool
    device: int
    seconds: float


def minimise_slowest_stage(costs: DownsetCosts, most_s: float) -> list[DownsetStage]:
    """Return the chain of stages whose slowest stage takes the least time, and among equal chains
    one with the fewest stages.

    Return [] if no chain fits the memory, or if the slowest stage of each chain takes longer than
    about `most_s` seconds per micro-batch.
    """
    most_s = min(most_s, costs.maximum_stage_s)
    too_low = 0.0
    limit = costs.minimum_slowest_stage_s * _STEP
    while not (
        answer := _chain_with_fewest_stages(costs, options := costs.feasible_stages(limit), limit)
    ):
        if limit > most_s:
            return []
        too_low = limit
        limit = limit * _STEP
    steps = np.unique(np.concatenate([option.seconds for option in options]))
    steps = steps[(steps > too_low) & (steps < _slowest_stage_seconds(answer))]
    while len(steps):
        middle = len(steps) // 2
        better = _chain_with_fewest_stages(costs, options, float(steps[middle]))
        if better:
            answer = better
            steps = steps[:middle][steps[:middle] < _slowest_stage_seconds(better)]
        else:
            steps = steps[middle + 1 :]
    return answer


def minimise_step(costs: DownsetCosts, most_step_s: float) -> list[DownsetStage]:
    """Return the chain with the shortest step among the result of `minimise_slowest_stage` and
    chains with fewer, slower stages. Return [] if no chain is found.

    `most_step_s` is an upper bound on the seconds of a step, above which chains are of no interest.
    The time limit per stage is raised by the factor `_SLOWER` while a step could become shorter.
    This is a heuristic: chains between two limits are not examined.
    """
    count = costs.problem.micro_batches
    best = _chain_with_fewest_stages(costs, costs.single_stage_options(), math.inf)
    most_step_s = min(most_step_s, _step_seconds(best, count))
    pieces = minimise_slowest_stage(costs, most_step_s / count)
    limit = _slowest_stage_seconds(pieces)
    while pieces:
        best = min(best or pieces, pieces, key=lambda each: _step_seconds(each, count))
        limit *= _SLOWER
        if len(pieces) == 1 or count * limit > min(most_step_s, _step_seconds(best, count)):
            break
        pieces = _chain_with_fewest_stages(costs, costs.feasible_stages(limit), limit)
    return best


def _step_seconds(pieces: list[DownsetStage], micro_batches: int) -> float:
    """Return the seconds of a step of the chain `pieces` with `micro_batches` micro-batches;
    infinite for [].
    """
    return (
        chain_step_seconds([piece.seconds for piece in pieces], micro_batches)
        if pieces
        else math.inf
    )


def _slowest_stage_seconds(pieces: list[DownsetStage]) -> float:
    """Return the seconds per micro-batch of the slowest stage; infinite for []."""
    return max((piece.seconds for piece in pieces), default=math.inf)


def _chain_with_fewest_stages(
    costs: DownsetCosts, options: list[ParallelismOption], limit: float
) -> list[DownsetStage]:
    """Return a chain with the minimum number of stages, each of which takes at most `limit` seconds
    per micro-batch, or [] if there is none.
    """
    farthest = np.zeros(len(costs.chains.downsets.inner), np.int16)
    chosen: list[ParallelismOption] = []
    for option in options:
        # A stage is useful only if it is within the limit and fits farther from the end of the
        # pipeline than the same blocks on fewer devices. Other stages are dropped.
        kept = option.select((option.farthest > farthest[option.pairs]) & (option.seconds <= limit))
        farthest[kept.pairs] = kept.farthest
        chosen.append(kept)
    fewest = _minimum_stages(costs, chosen)
    return [] if fewest[-1, -1] == ANY_PLACE else _trace_chain(costs, chosen, fewest)


def _minimum_stages(costs: DownsetCosts, options: list[ParallelismOption]) -> NDArray[np.int16]:
    """Return the matrix N(D, d). For each downset (row) and number of devices d (column), it
    contains the minimum number of stages that compute the blocks outside of the downset on the last
    d devices. An entry is `ANY_PLACE` if there is no such chain.

    A downset is a set of blocks that contains all blocks on which its members depend.
    """
    downsets = costs.chains.downsets
    size = costs.problem.cluster.size
    found = np.full((len(downsets.holds), size + 1), ANY_PLACE, np.int16)
    found[0] = 0
    bounds = [np.searchsorted(option.pairs, downsets.starts) for option in options]
    for level in range(1, len(downsets.levels) - 1):
        for option, places in zip(options, bounds, strict=True):
            part = slice(places[level], places[level + 1])
            pairs = option.pairs[part]
            if not len(pairs):
                continue
            # `level` is the number of blocks in the inner downset of a stage. The chains known so
            # far are extended at their beginning by each stage of this level.
            after = _possible_remaining_devices(costs.problem, option.sharing.devices)
            behind = found[np.ix_(downsets.outer[pairs], after)]
            stages = np.where(behind < option.farthest[part, None], behind + 1, ANY_PLACE)
            inner = downsets.inner[pairs]
            firsts = np.flatnonzero(np.diff(inner, prepend=-1))
            reached = np.ix_(inner[firsts], after + option.sharing.devices)
            found[reached] = np.minimum(found[reached], np.minimum.reduceat(stages, firsts, axis=0))
        rows = slice(downsets.levels[level], downsets.levels[level + 1])
        found[rows] = np.minimum.accumulate(found[rows], axis=1)
    return found


def _possible_remaining_devices(problem: Problem, devices: int) -> NDArray[np.int64]:
    """Return the possible numbers of devices after a group of `devices` devices. A group lies
    inside a node of the cluster, or starts at the first device of a node.
    """
    size = problem.cluster.size
    node = problem.cluster.devices_per_node
    after = np.arange(size - devices + 1)
    first = size - after - devices
    last = size - after - 1
    fits = (first // node == last // node) | (devices > node) & (first % node == 0)
    found: NDArray[np.int64] = after[fits]
    return found


def _trace_chain(
    costs: DownsetCosts, options: list[ParallelismOption], fewest: NDArray[np.int16]
) -> list[DownsetStage]:
    """Return the chain of stages that computes all blocks on all devices with the minimum number of
    stages, by the matrix `fewest` of `_minimum_stages`. If several stages can come next, the
    fastest is chosen.
    """
    downsets = costs.chains.downsets
    problem = costs.problem
    inner = len(downsets.holds) - 1
    devices = problem.cluster.size
    found: list[DownsetStage] = []
    while inner:
        stages = fewest[inner, devices]
        devices = int(np.argmax(fewest[inner] == stages))
        begin, end = np.searchsorted(downsets.inner, (inner, inner + 1))
        choices: list[DownsetStage] = []
        for option in options:
            after = devices - option.sharing.devices
            if after < 0 or after not in _possible_remaining_devices(
                problem, option.sharing.devices
            ):
                continue
            part = slice(*np.searchsorted(option.pairs, (begin, end)))
            outer = downsets.outer[option.pairs[part]]
            fits = (fewest[outer, after] == stages - 1) & (stages <= option.farthest[part])
            if fits.any():
                place = int(np.where(fits, option.seconds[part], np.inf).argmin())
                found_at = (
                    int(outer[place]),
                    option.sharing,
                    option.recompute,
                    problem.cluster.size - devices,
                )
                choices.append(DownsetStage(inner, *found_at, float(option.seconds[part][place])))
        best = min(choices, key=lambda piece: piece.seconds)
        found.append(best)
        inner = best.outer
        devices = devices - best.sharing.devices
    return found


@dataclass(frozen=True, slots=True)
class Piper:
    """Partitions the graph into a chain of stages, each of which may contain parts of several
    branches.

    Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization"
    (NeurIPS 2021). Operators are merged into blocks of about a layer each. A search over all
    downsets of blocks (sets that contain all blocks on which their members depend) minimises the
    time of the slowest stage, and then tries fewer, slower stages for a shorter step. The devices
    of a stage use data parallelism, tensor parallelism as in Megatron-LM, or both, with optional
    recomputation. If the micro-batch size is not specified, the size with the shortest step is
    chosen. The number of downsets grows exponentially with the number of parallel branches.
    """

    max_downsets: int = 10_000
    """Maximum number of downsets, which are sets of blocks that contain all blocks on which their
    members depend. A graph with more downsets is rejected.
    """
    objective: Literal["step", "slowest_stage"] = "step"
    """`step` minimises the time of a step, including warm-up and cool-down; `slowest_stage`
    minimises the time of the slowest stage, as in the paper.
    """

    name: ClassVar[str] = "piper"

    def division(self, graph: Graph) -> Division:
        """Return `Division.OWN`: the strategy chooses the micro-batch size, equal for all
        stages.
        """
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError if the graph has no nodes, or if the devices have different types
        and the cluster does not allow mixed stages. Raise ConfigurationError for an option that is
        out of range.
        """
        if self.max_downsets < 1:
            raise ConfigurationError(
                f"max_downsets is {self.max_downsets}, expected at least 1",
                hint="set strategy.max_downsets to at least 1",
                where="strategy",
            )
        check_operators(problem)
        if len(equal_device_ranges(problem.cluster)) > 1:
            everything = describe_device_types(problem.cluster, range(problem.cluster.size))
            raise InfeasibleError(
                (
                    "piper assumes that all devices are equally fast, but the cluster has "
                    f"devices of different types: {everything}"
                ),
                hint="use strategy pipedream, graphpipe or tepdist, which support different "
                "types, or set cluster.allow_mixed_stages, with which piper plans for the "
                "slowest type",
            )

    def run(self, problem: Problem) -> Placement:
        """Return the placement of the best chain of stages.

        Raise InfeasibleError if there are more than `max_downsets` downsets or no chain fits the
        memory, and ConfigurationError for a constraint that the chain violates.
        """
        forward, backward = mean_node_seconds(problem)
        blocks = merge_nodes(problem.graph, forward + backward)
        count = count_downsets(blocks.needs)
        if count is None or count > self.max_downsets:
            counted = "too many downsets to count" if count is None else f"{count} downsets"
            raise InfeasibleError(
                f"the operator graph of {len(blocks.nodes)} {plural(len(blocks.nodes), 'block')} "
                f"has {counted}, expected at most max_downsets = {self.max_downsets}",
                hint="use strategy pipedream or graphpipe, or raise strategy.max_downsets",
            )
        downsets = Downsets(blocks.needs)
        samples = sample_axes(problem.graph)
        messages = messages_between(problem, blocks, downsets, samples)
        chains = SearchSpace(blocks, downsets, *messages, problem.micro_batch_size)
        placement = best_micro_batch_size(
            problem, lambda sized, step: self._best_chain(sized, chains, step)
        )
        check_constraints_met(problem, placement, self.name)
        return placement

    def _best_chain(
        self, problem: Problem, chains: SearchSpace, most_step_s: float
    ) -> tuple[Placement, float]:
        """Return (placement, seconds of a step) of the best chain for the problem's micro-batch
        size.

        Raise InfeasibleError if no chain fits the memory, or if no chain has a step shorter than
        about `most_step_s` seconds.
        """
        costs = DownsetCosts(problem, chains)
        count = problem.micro_batches
        by_step = self.objective == "step"
        pieces = (
            minimise_step(costs, most_step_s)
            if by_step
            else minimise_slowest_stage(costs, most_step_s / count)
        )
        if not pieces:
            raise OutOfMemoryError(
                f"no chain of stages fits into the memory of {problem.cluster.size} "
                f"{plural(problem.cluster.size, 'device')}",
                hint="use more devices, smaller micro-batches or a higher memory limit",
            )
        stages = tuple(_make_stage(problem, chains, piece) for piece in pieces)
        return with_required_recomputation(problem, Placement(stages)), _step_seconds(pieces, count)


def _make_stage(problem: Problem, chains: SearchSpace, piece: DownsetStage) -> Stage:
    """Return the stage of a placement that corresponds to `piece`."""
    holds = chains.downsets.holds
    blocks = (holds[piece.outer] & ~holds[piece.inner]).nonzero()[0].tolist()
    return Stage(
        nodes=tuple(sorted(node for block in blocks for node in chains.blocks.nodes[block])),
        devices=tuple(range(piece.device, piece.device + piece.sharing.devices)),
        micro_batch_size=problem.micro_batch_size,
        splits=tuple(sorted(split for block in blocks for split in piece.sharing.splits[block])),
        recompute=piece.recompute,
    )
