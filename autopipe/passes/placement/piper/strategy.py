"""Piper: a graph's nodes joined into blocks that no cut parts, the dynamic programme over downsets,
and the strategy.

Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization"
(NeurIPS 2021), section 4: for each downset, the stages after it and the devices they use, the least
time of the slowest stage. What a stage keeps grows with its place from the end, so of two ways to
place what comes after it on as many devices within one limit the one with fewer stages is never
worse. So it runs from the end and tries limits: a state is a downset and a number of devices, its
value the fewest stages. The paper takes layers as they come; a graph of ONNX has operators, an
order of magnitude more, which are joined first.
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
from autopipe.passes.analysis.chain import Blocks, values_between
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import (
    check_operators,
    describe_kinds,
    equal_device_runs,
    fitted,
)
from autopipe.passes.cost.roofline import Seconds, mean_seconds
from autopipe.passes.partition.chain_cut import step_of_line
from autopipe.passes.partition.downsets import Downsets, count_downsets
from autopipe.passes.placement.piper.stage_costs import (
    ANY_PLACE,
    Chains,
    DownsetPrices,
    Option,
    StageSharing,
    messages_between,
)
from autopipe.passes.schedule.device_order import best_micro_batch_size
from autopipe.passes.sharding.regions import check_constraints_met

SHARE = 1 / 30  # The most of all work that nodes joined into one block may make up.
LIGHT = SHARE / 16  # A block with less of all work stands for nothing that a device could be given.


def join_nodes(graph: Graph, seconds: Seconds) -> Blocks:
    """The graph as blocks. `seconds` weighs each node. What is joined first is what exchanges most
    bytes, then what is light. Two blocks are joined where that keeps the same order: the second
    needs nothing but the first and what the first needs, or the first is light and nothing but what
    needs the second needs it. Nodes that every stage computes for itself follow the first that
    reads them.
    """
    joining = _Joining(graph, seconds)
    waiting = [
        joining.entry(first, second)
        for second in joining.members
        for first in joining.before[second]
    ]
    heapq.heapify(waiting)
    while waiting:
        entry = heapq.heappop(waiting)
        _, _, first, second = entry
        if (
            first in joining.joined
            or second in joining.joined
            or not joining.may_join(first, second)
        ):
            continue
        # As something around a pair changes it is put in again.
        if entry == joining.entry(first, second):
            joining.join(first, second)
            for changed in dict.fromkeys(joining.around(first)):
                heapq.heappush(waiting, joining.entry(*changed))
    nodes = joining.topological() or [[]]
    block_of = {node: number for number, each in enumerate(nodes) for node in each}
    consumers = graph.consumers()
    for node in sorted(joining.apart, reverse=True):
        readers = (
            reader for name in graph.nodes[node].outputs for reader in consumers.get(name, ())
        )
        block_of[node] = min((block_of[reader] for reader in readers), default=0)
        nodes[block_of[node]].append(node)
    return Blocks.of(graph, nodes)


class _Joining:
    """Blocks while they are joined; a block goes by one of its nodes."""

    def __init__(self, graph: Graph, seconds: Seconds) -> None:
        self.graph = graph
        self.apart = recomputed_nodes(graph)
        self.members = {node: [node] for node in range(len(graph.nodes)) if node not in self.apart}
        total = float(sum(seconds[node] for node in self.members)) or 1.0
        self.weight = {node: float(seconds[node]) / total for node in self.members}
        self.before, self.after = ({node: set[int]() for node in self.members} for _ in range(2))
        self.written, self.read = ({node: set[str]() for node in self.members} for _ in range(2))
        self.readers: dict[str, set[int]] = {}
        self.joined: set[int] = set()  # Blocks that others have taken in.
        for name, producer, readers in values_between(graph, {node: node for node in self.members}):
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

    def entry(self, first: int, second: int) -> tuple[float, float, int, int]:
        """How many bytes fewer would enter and leave the two as one, the most first; of equals the
        lightest.
        """
        saved = 0
        for name in self.read[second] & (self.written[first] | self.read[first]):
            inside = name in self.written[first] and self.readers[name] <= {first, second}
            saved += self.graph.type_of(name).bytes * (2 if inside else 1)
        return -float(saved), self.weight[first] + self.weight[second], first, second

    def may_join(self, first: int, second: int) -> bool:
        one = self.weight[first]
        two = self.weight[second]
        if one + two > SHARE and min(one, two) > LIGHT:
            return False
        if all(self.ancestors[first] >> other & 1 for other in self.before[second] - {first}):
            return True
        return one <= LIGHT and all(
            self.ancestors[other] >> second & 1 for other in self.after[first] - {second}
        )

    def join(self, first: int, second: int) -> None:
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

    def around(self, block: int) -> Iterator[tuple[int, int]]:
        """The pairs of blocks whose bytes or needs change as others become part of `block`."""
        for other in sorted(self.before[block]):
            yield other, block
            for beside in sorted(self.after[other]):
                yield other, beside
        for after in sorted(self.after[block]):
            for other in sorted(self.before[after]):
                yield other, after

    def topological(self) -> list[list[int]]:
        """The nodes of each block, after all that it needs; of those that could be next the first
        in the graph.
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


# By what factor limits begin above the least that there can be, and a limit that is too low is
# raised.
_STEP = 1.15
_SLOWER = 1.1  # By what factor a slower stage is allowed, for fewer stages.


@dataclass(frozen=True, slots=True)
class DownsetStage:
    """One stage of an answer: the blocks of the outer downset that the inner one lacks."""

    inner: int
    outer: int
    sharing: StageSharing
    recompute: bool
    device: int  # The first of its devices.
    seconds: float


def search(prices: DownsetPrices, most_s: float) -> list[DownsetStage]:
    """The stages, in order, whose slowest one is fastest; as few of them as that allows. Empty
    where memory holds none, or none of which the slowest takes about `most_s`.
    """
    most_s = min(most_s, prices.most_s)
    too_low = 0.0
    limit = prices.least_s * _STEP
    while not (answer := _answer(prices, options := prices.options(limit), limit)):
        if limit > most_s:
            return []
        too_low = limit
        limit = limit * _STEP
    steps = np.unique(np.concatenate([option.seconds for option in options]))
    steps = steps[(steps > too_low) & (steps < _slowest(answer))]
    while len(steps):
        middle = len(steps) // 2
        better = _answer(prices, options, float(steps[middle]))
        if better:
            answer = better
            steps = steps[:middle][steps[:middle] < _slowest(better)]
        else:
            steps = steps[middle + 1 :]
    return answer


def search_steps(prices: DownsetPrices, most_step_s: float) -> list[DownsetStage]:
    """As `search`, or of the chains with fewer stages and a slower one that whose step is shorter.
    Limits are raised by `_SLOWER` at a time, as long as a step could be shorter: so this is no
    proof.
    """
    count = prices.problem.micro_batches
    best = _answer(prices, prices.whole(), math.inf)
    most_step_s = min(most_step_s, _step_seconds(best, count))
    pieces = search(prices, most_step_s / count)
    limit = _slowest(pieces)
    while pieces:
        best = min(best or pieces, pieces, key=lambda each: _step_seconds(each, count))
        limit *= _SLOWER
        if len(pieces) == 1 or count * limit > min(most_step_s, _step_seconds(best, count)):
            break
        pieces = _answer(prices, prices.options(limit), limit)
    return best


def _step_seconds(pieces: list[DownsetStage], micro_batches: int) -> float:
    """Seconds of a step; infinite without stages."""
    return step_of_line([piece.seconds for piece in pieces], micro_batches) if pieces else math.inf


def _slowest(pieces: list[DownsetStage]) -> float:
    return max((piece.seconds for piece in pieces), default=math.inf)


def _answer(prices: DownsetPrices, options: list[Option], limit: float) -> list[DownsetStage]:
    """The fewest stages within a limit; empty where there are none."""
    farthest = np.zeros(len(prices.chains.downsets.inner), np.int16)
    chosen: list[Option] = []
    for option in options:
        # What is within the limit and fits farther from the end than on any smaller group.
        kept = option.some((option.farthest > farthest[option.pairs]) & (option.seconds <= limit))
        farthest[kept.pairs] = kept.farthest
        chosen.append(kept)
    fewest = _fewest_stages(prices, chosen)
    return [] if fewest[-1, -1] == ANY_PLACE else _trace(prices, chosen, fewest)


def _fewest_stages(prices: DownsetPrices, options: list[Option]) -> NDArray[np.int16]:
    """For each downset and number of devices the fewest stages that do the rest on that many last
    devices. It is `ANY_PLACE` where there are none.
    """
    downsets = prices.chains.downsets
    size = prices.problem.cluster.size
    found = np.full((len(downsets.holds), size + 1), ANY_PLACE, np.int16)
    found[0] = 0
    bounds = [np.searchsorted(option.pairs, downsets.starts) for option in options]
    for level in range(1, len(downsets.levels) - 1):
        for option, places in zip(options, bounds, strict=True):
            part = slice(places[level], places[level + 1])
            pairs = option.pairs[part]
            if not len(pairs):
                continue
            # The stages whose inner downsets are of this level, put before what is known.
            after = _after(prices.problem, option.sharing.devices)
            behind = found[np.ix_(downsets.outer[pairs], after)]
            stages = np.where(behind < option.farthest[part, None], behind + 1, ANY_PLACE)
            inner = downsets.inner[pairs]
            firsts = np.flatnonzero(np.diff(inner, prepend=-1))
            reached = np.ix_(inner[firsts], after + option.sharing.devices)
            found[reached] = np.minimum(found[reached], np.minimum.reduceat(stages, firsts, axis=0))
        rows = slice(downsets.levels[level], downsets.levels[level + 1])
        found[rows] = np.minimum.accumulate(found[rows], axis=1)
    return found


def _after(problem: Problem, devices: int) -> NDArray[np.int64]:
    """Possible numbers of devices behind a group of `devices`: a group fits into a node or begins
    with one.
    """
    size = problem.cluster.size
    node = problem.cluster.devices_per_node
    after = np.arange(size - devices + 1)
    first = size - after - devices
    last = size - after - 1
    fits = (first // node == last // node) | (devices > node) & (first % node == 0)
    found: NDArray[np.int64] = after[fits]
    return found


def _trace(
    prices: DownsetPrices, options: list[Option], fewest: NDArray[np.int16]
) -> list[DownsetStage]:
    """The stages behind the fewest for all blocks on all devices; of equally few the quickest first
    stages.
    """
    downsets = prices.chains.downsets
    problem = prices.problem
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
            if after < 0 or after not in _after(problem, option.sharing.devices):
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
    """Cuts the graph into a chain of stages, each of which may hold parts of several branches.

    Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization"
    (NeurIPS 2021): over all downsets of the graph's blocks, about a layer each, it finds the stages
    whose slowest one is fastest, and looks at fewer and slower ones for the sake of a shorter step.
    A stage's devices share samples, layers as in Megatron-LM, or both, and it may run its forward
    again. Micro-batches are as large as gives the shortest step, where they are left open. The
    number of downsets grows exponentially with the number of parallel branches.
    """

    max_downsets: int = 10_000
    """The most downsets that it takes on."""
    objective: Literal["step", "slowest_stage"] = "step"
    """Objective: the time of a whole step, filling and draining included, or, as published, of the
    slowest stage.
    """

    name: ClassVar[str] = "piper"

    def division(self, graph: Graph) -> Division:
        """It chooses one size of micro-batches for all stages."""
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError where there is nothing to place or devices differ,
        ConfigurationError for an option.
        """
        if self.max_downsets < 1:
            raise ConfigurationError(
                f"max_downsets is {self.max_downsets}",
                hint="it must be at least 1",
                where="strategy",
            )
        check_operators(problem)
        if len(equal_device_runs(problem.cluster)) > 1:
            everything = describe_kinds(problem.cluster, range(problem.cluster.size))
            raise InfeasibleError(
                (
                    "piper takes a stage to be as fast wherever it stands, and devices differ: "
                    f"{everything}"
                ),
                hint="strategies pipedream, graphpipe and tepdist weigh kinds of devices; with "
                "cluster.allow_mixed_stages piper "
                "counts all as the slowest",
            )

    def run(self, problem: Problem) -> Placement:
        """The chain. Raises InfeasibleError, with the number of downsets, where there are too many,
        and where memory holds no chain; ConfigurationError for a constraint that the chain does not
        fulfil.
        """
        forward, backward = mean_seconds(problem)
        blocks = join_nodes(problem.graph, forward + backward)
        count = count_downsets(blocks.needs)
        if count is None or count > self.max_downsets:
            counted = "too many downsets to count" if count is None else f"{count} downsets"
            raise InfeasibleError(
                f"the model's {len(blocks.nodes)} {plural(len(blocks.nodes), 'block')} of "
                f"operators have {counted}, and piper goes through all of "
                f"them, up to max_downsets = {self.max_downsets}",
                hint="strategies pipedream and graphpipe do not depend on their number",
            )
        downsets = Downsets(blocks.needs)
        samples = sample_axes(problem.graph)
        messages = messages_between(problem, blocks, downsets, samples)
        chains = Chains(blocks, downsets, *messages, problem.micro_batch_size)
        placement = best_micro_batch_size(
            problem, lambda sized, step: self._answer(sized, chains, step)
        )
        check_constraints_met(problem, placement, self.name)
        return placement

    def _answer(
        self, problem: Problem, chains: Chains, most_step_s: float
    ) -> tuple[Placement, float]:
        """The best chain for the micro-batches of a problem. Raises InfeasibleError where memory
        holds none, or none whose step could be shorter than `most_step_s`.
        """
        prices = DownsetPrices(problem, chains)
        count = problem.micro_batches
        by_step = self.objective == "step"
        pieces = (
            search_steps(prices, most_step_s) if by_step else search(prices, most_step_s / count)
        )
        if not pieces:
            raise OutOfMemoryError(
                f"memory holds no chain of stages of these blocks on {problem.cluster.size} "
                f"{plural(problem.cluster.size, 'device')}",
                hint="use more devices, smaller micro-batches or a higher memory limit",
            )
        stages = tuple(_stage(problem, chains, piece) for piece in pieces)
        return fitted(problem, Placement(stages)), _step_seconds(pieces, count)


def _stage(problem: Problem, chains: Chains, piece: DownsetStage) -> Stage:
    holds = chains.downsets.holds
    blocks = (holds[piece.outer] & ~holds[piece.inner]).nonzero()[0].tolist()
    return Stage(
        nodes=tuple(sorted(node for block in blocks for node in chains.blocks.nodes[block])),
        devices=tuple(range(piece.device, piece.device + piece.sharing.devices)),
        micro_batch_size=problem.micro_batch_size,
        splits=tuple(sorted(split for block in blocks for split in piece.sharing.splits[block])),
        recompute=piece.recompute,
    )
