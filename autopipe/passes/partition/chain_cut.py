"""Partition of a model into contiguous stages whose slowest stage is as fast as possible. The model
is treated as a chain of blocks, each of which is a range of consecutive nodes.

Each stage runs on a group of devices. `best_run_ends` also partitions other chains.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Device, Link
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.chain import Chain, make_chain, range_sums, values_between_blocks
from autopipe.passes.analysis.gradients import sent_bytes
from autopipe.passes.cost.range_tables import state_sums
from autopipe.passes.cost.roofline import mean_node_seconds, node_seconds

_MAXIMUM_BLOCKS = 224
"""Maximum number of blocks (ranges of consecutive nodes) into which a model is divided. The time of
the search grows with the square of this number.
"""

_Floats = NDArray[np.float64]


def best_run_ends(
    lengths: Sequence[_Floats],
    known: Sequence[int],
    bounds: Sequence[tuple[int, int]] | None = None,
) -> list[int]:
    """Return the block boundaries at which the runs of a partition of a chain end. A run is a
    contiguous range of blocks, and the longest run is as short as possible. Return [] if there is
    no partition.

    `lengths[s][a, b]` is the length of run s if it extends from block boundary a to boundary b,
    infinite if this is not permitted. If `bounds` is given, run s must end at a boundary from
    `bounds[s][0]` to `bounds[s][1]`. Let R(s, b) be the minimum longest run over the partitions of
    [0, b) into s runs:

        R(s, b) = min over a < b of max(R(s-1, a), lengths[s-1][a, b])

    Ties: for each run and end, the earliest start wins. `known` are the ends of the runs of a known
    partition. The search skips runs that are longer than the longest run of this partition, because
    they are in no best partition. Time O(runs · boundaries · width), where width is the maximum
    number of blocks in a run that is not skipped.
    """
    boundaries = np.arange(len(lengths[0]))
    different = {id(each): each for each in lengths}
    bounds = bounds or [(0, len(boundaries) - 1)] * len(lengths)
    runs = list(itertools.pairwise([0, *known]))
    slowest = max(float(length[run]) for length, run in zip(lengths, runs, strict=True))
    width = len(boundaries) - 1
    if not np.isinf(slowest) and all(
        first <= stop <= last for stop, (first, last) in zip(known, bounds, strict=True)
    ):
        widths = (np.subtract(*np.nonzero(length <= slowest)) for length in different.values())
        width = max(-int(each.min()) for each in widths)
    starts = boundaries[:, None] + np.arange(-width, 0)
    # A run is a contiguous range of blocks between two boundaries. bands[..][b, j] is the length of
    # the run from boundary `starts[b, j]` to boundary b, and infinite if `starts[b, j]` is
    # negative.
    bands = {
        key: np.where(starts < 0, np.inf, each[np.maximum(starts, 0), boundaries[:, None]])
        for key, each in different.items()
    }
    longest = np.where(boundaries == 0, 0.0, np.inf)
    best_starts = []
    for length, (first, last) in zip(lengths, bounds, strict=True):
        previous = np.lib.stride_tricks.sliding_window_view(
            np.concatenate((np.full(width, np.inf), longest)), width
        )[:-1]
        candidates = np.maximum(previous, bands[id(length)])
        nearest = candidates.argmin(axis=1)
        longest = candidates[boundaries, nearest]
        longest[(boundaries < first) | (boundaries > last)] = np.inf
        best_starts.append(starts[boundaries, nearest])
    if np.isinf(longest[-1]):
        return []
    stops = [len(boundaries) - 1]
    for sources in best_starts[:0:-1]:
        stops.append(int(sources[stops[-1]]))
    return stops[::-1]


def limit_runs_to_memory(
    lengths: Sequence[_Floats], weights: _Floats, capacity: Sequence[float]
) -> list[_Floats]:
    """Return `lengths`, in which each run that needs too much memory has an infinite length. A run
    is a contiguous range of blocks a … b-1, which runs on one group of devices; it needs too much
    memory if its weight `weights[a, b]` exceeds the `capacity` of the group.

    `lengths` has one table per run, indexed by [a, b], and `capacity` one entry per run.
    """
    pairs = [(id(length), maximum) for length, maximum in zip(lengths, capacity, strict=True)]
    limited = {
        pair: np.where(weights > pair[1], np.inf, length)
        for pair, length in zip(pairs, lengths, strict=True)
    }
    return [limited[pair] for pair in pairs]


def chain_step_seconds(seconds: Sequence[float], micro_batches: int) -> float:
    """Return the seconds of a pipeline step with warm-up and cool-down: the sum of the stages'
    times plus, for each further micro-batch, the longest of these times. `seconds` contains the
    time of each stage per micro-batch.
    """
    return sum(seconds) + (micro_batches - 1) * max(seconds)


def even_run_ends(work: _Floats, count: int) -> list[int]:
    """Return the block boundaries at which `count` runs (contiguous ranges of blocks) of about
    equal work end. `work` contains the work of each block. Each run has at least one block.
    """
    done = np.concatenate(([0.0], np.cumsum(work)))
    stops = [0]
    for stage, stop in enumerate(np.searchsorted(done, done[-1] * np.arange(1, count + 1) / count)):
        stops.append(min(max(int(stop), stops[-1] + 1), len(work) - count + 1 + stage))
    return [*stops[1:-1], len(work)]


def run_lengths(seconds: _Floats, before: _Floats, after: _Floats) -> _Floats:
    """Return the table that has at [a, b] the seconds of blocks a … b-1 plus `before[a]` and
    `after[b]`, the seconds of communication at the two boundaries. Entries with a >= b are
    infinite.
    """
    found: _Floats = range_sums(seconds) + before[:, None] + after[None, :]
    found[np.tril_indices(len(found))] = np.inf
    return found


def crossing_seconds(
    graph: Graph,
    precision: str,
    block_of: Mapping[int, int],
    blocks: int,
    link: Link,
    replicas: int = 1,
) -> _Floats:
    """Return, for each boundary between the blocks, the seconds to send the values that cross it; 0
    at the two ends of the chain.

    `block_of` is the block of each node; nodes without a block are ignored. `blocks` is the number
    of blocks. Each of `replicas` devices sends only its own samples.
    """
    change = np.zeros(blocks + 2)
    sizes = sent_bytes(graph, precision)
    for name, start, readers in values_between_blocks(graph, block_of):
        if readers[-1] > start:
            seconds = link.seconds(sizes[name] / replicas)
            change[[start + 1, readers[-1] + 1]] += np.array([1, -1]) * seconds
    crossing: _Floats = np.cumsum(change)[: blocks + 1]
    crossing[[0, -1]] = 0.0
    return crossing


def partition_chain(
    problem: Problem,
    groups: Sequence[Sequence[int]],
    fixed: Mapping[int, int],
    replicas: int | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Return the nodes of each stage, one stage per group of devices in `groups`. The nodes in
    `fixed` are in the stages that it assigns.

    The slowest stage is as fast as possible. The time of a stage is its work divided by its number
    of devices, plus the communication at both boundaries. For the communication, each of `replicas`
    devices of a group is assumed to send its own samples. If `replicas` is None, one device sends
    everything; between groups of different device types or sizes, as many devices send as the
    smaller group has.

    If the groups have different memory limits, the state of each stage (parameters, gradients,
    optimizer state), sharded over its group, fits in the memory of the group, if such a partition
    exists. Raises ConfigurationError if `fixed` permits no partition, and InfeasibleError if the
    chain has fewer blocks than stages.
    """
    count = len(groups)
    if count == 1:
        return (tuple(range(len(problem.graph.nodes))),)
    forward, backward = mean_node_seconds(problem)
    seconds = forward + (backward if problem.train else 0.0)
    fixed_together = tuple(
        tuple(node for node in fixed if fixed[node] == stage)
        for stage in sorted(set(fixed.values()))
    )
    chain = make_chain(problem.graph, seconds, _MAXIMUM_BLOCKS, fixed_together)
    if chain.blocks < count:
        raise InfeasibleError(
            (
                f"{chain.blocks} {plural(chain.blocks, 'operator')} cannot be partitioned into "
                f"{count} {plural(count, 'stage')}"
            ),
            hint="use fewer stages",
        )
    bounds = _permitted_ends(problem.graph, chain, count, fixed)
    lengths = _stage_lengths(problem, chain, groups, replicas)
    known = even_run_ends(chain.sums_by_block(seconds), count)
    stops = []
    limits = [min(map(problem.memory_of, group)) for group in groups]
    if len(set(limits)) > 1:
        capacity = [limit * len(group) for group, limit in zip(groups, limits, strict=True)]
        stops = best_run_ends(
            limit_runs_to_memory(
                lengths, state_sums(problem, chain, attrgetter("total")), capacity
            ),
            known,
            bounds,
        )
    stops = stops or best_run_ends(lengths, known, bounds)
    return tuple(chain.nodes(start, stop) for start, stop in itertools.pairwise([0, *stops]))


def _permitted_ends(
    graph: Graph, chain: Chain, count: int, fixed: Mapping[int, int]
) -> list[tuple[int, int]]:
    """Return, for each of `count` stages, the first and the last block boundary at which it may
    end, given the nodes in `fixed`. Raises ConfigurationError if a stage has no such boundary.
    """
    found = []
    for stage in range(1, count + 1):
        before = {int(chain.block_of[node]): node for node in fixed if fixed[node] < stage}
        after = {int(chain.block_of[node]): node for node in fixed if fixed[node] >= stage}
        first = max(max(before, default=-1) + 1, stage)
        last = min(min(after, default=chain.blocks), chain.blocks - count + stage)
        if first > last:
            early = before.get(first - 1)
            late = after.get(last)
            names = [repr(graph.nodes[node].name) for node in (late, early) if node is not None]
            raise ConfigurationError(
                (
                    f"constraints permit no boundary after stage {stage - 1} of {count}: "
                    f"{' comes before '.join(names)}"
                ),
                hint=(
                    "assign operators to stages in topological order, with one operator or more "
                    "per stage"
                ),
                where="constraints",
            )
        found.append((first, last))
    return found


def _stage_lengths(
    problem: Problem, chain: Chain, groups: Sequence[Sequence[int]], replicas: int | None
) -> list[_Floats]:
    """Return, for each stage, the table of `run_lengths`: the seconds of blocks a … b-1 on the
    stage's group, plus the communication at both boundaries.

    The devices of a group divide the work evenly, and the slowest device type of the group
    determines the time.
    """
    cluster = problem.cluster
    block_of = dict(enumerate(chain.block_of.tolist()))
    kinds = [(frozenset(cluster.device_types_among(group)), len(group)) for group in groups]

    @cache
    def crossing(link: Link, senders: int) -> _Floats:
        """Return `crossing_seconds` for a link over which `senders` devices send."""
        return crossing_seconds(
            problem.graph, problem.precision, block_of, chain.blocks, link, senders
        )

    def seconds(devices: frozenset[Device], fraction: float) -> _Floats:
        """Return the seconds of each node, of which a device computes `fraction`, on the slowest of
        the device types.
        """
        both = (
            node_seconds(problem.work, device, problem.precision, fraction) for device in devices
        )
        each = [forward + backward if problem.train else forward for forward, backward in both]
        slowest: _Floats = np.maximum.reduce(each)
        return slowest

    if len(set(kinds)) == 1:
        devices, width = kinds[0]
        between = crossing(cluster.slowest_link(range(cluster.size)), replicas or 1)
        return [
            run_lengths(chain.sums_by_block(seconds(devices, 1.0) / width), between, between)
        ] * len(groups)
    work_by_kind = {kind: chain.sums_by_block(seconds(kind[0], 1 / kind[1])) for kind in set(kinds)}
    ends = [np.zeros(chain.blocks + 1)]
    for group, next_group in itertools.pairwise(groups):
        senders = replicas or min(len(group), len(next_group))
        ends.append(crossing(cluster.slowest_link((group[-1], next_group[0])), senders))
    ends.append(ends[0])
    return [
        run_lengths(work_by_kind[kind], ends[stage], ends[stage + 1])
        for stage, kind in enumerate(kinds)
    ]
