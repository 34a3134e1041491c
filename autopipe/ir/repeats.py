"""Search of repeated parts in a sequence of nodes: equal subgraphs of consecutive nodes.

The search works on labels. The label of a node is a number that is equal for nodes that are equal
without their wiring. Two ranges of nodes are equal if

- their labels are equal,
- an operand that node m of one range writes is written by node m of the other range, and
- two operands from outside of one range are one value if, and only if, the corresponding operands
  of the other range are one value.

1. Candidate periods. A run of period p is a maximal range in which label i equals label i + p. A
   window of length L at least p occurs once per period in such a run, so p is the distance between
   two consecutive occurrences of a window. Windows of length 1, 2, 4, … get numbers by prefix
   doubling (Karp, Miller and Rosenberg, "Rapid identification of repeated patterns in strings,
   trees and arrays", STOC 1972), and the distances between consecutive equal windows are the
   candidates. Time: O(n log² n).
2. Runs. For a candidate p, one comparison of two shifted arrays gives all runs of period p.
3. Boundaries. A run of m·p + r labels has r + 1 ways to choose its first instance. The boundary
   that the fewest values cross wins, because a layer passes few values to the next layer. Ties: a
   boundary before a matmul or convolution wins, because layers often end with a normalization or an
   activation, and so does the part of the model before them. Then the first one wins.
4. Choice. Runs are chosen in the order of the number of nodes that they cover. Ties: the shorter
   period wins, so that a layer is not a pair of equal layers. A run is reduced to the instances
   that earlier choices leave free.
5. The rest of the sequence is searched for further instances of the chosen parts, and an instance
   is searched for repeated parts inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]
"""One number per node. Two numbers are equal if the nodes are equal without their wiring."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """The values that nodes read and write. Values are numbered in the order in which nodes write
    them; the inputs, parameters and constants of the graph have the negative numbers.
    """

    operands: Sequence[tuple[int, ...]]
    """For each node, the numbers of its operands. Parameters and absent operands are omitted, and
    so are constants that the label of the node describes.
    """
    first_result: NDArray[np.int64]
    """For each node, the number of the first value that it writes. One entry more at the end."""

    def part(self, start: int, stop: int) -> Wiring:
        """Return the wiring of the nodes from `start` to `stop` - 1 as a separate graph: values
        that none of these nodes writes count as inputs.
        """
        before = int(self.first_result[start])
        outside: dict[int, int] = {}
        operands = [
            tuple(
                each - before if each >= before else outside.setdefault(each, -1 - len(outside))
                for each in self.operands[node]
            )
            for node in range(start, stop)
        ]
        return Wiring(operands, self.first_result[start : stop + 1] - before)


_MIN_LAYER_NODES: Final = 2
"""Minimum number of nodes of a layer."""
_MIN_PARALLEL_NODES: Final = 4
"""Minimum number of nodes of a layer if no instance reads the results of another instance, such as
the towers of a recommendation model."""
_MAX_NESTING: Final = 3
"""Maximum nesting depth of repeated parts inside repeated parts."""
_MAX_PERIODS_PER_LENGTH: Final = 256
"""Maximum number of candidate periods per window length, the most frequent first."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """Equal ranges of consecutive nodes, which do not overlap."""

    length: int
    """Number of nodes of a range."""
    starts: tuple[int, ...]
    """Position of the first node of each range, ascending."""
    inner: tuple[Repeat, ...] = ()
    """Repeated parts inside a range. Their positions count from the first node of the range."""


def find_repeats(
    labels: Labels,
    wiring: Wiring,
    has_parameter: NDArray[np.bool_],
    is_heavy: NDArray[np.bool_],
    depth: int = 0,
) -> tuple[Repeat, ...]:
    """Return the repeated parts of a sequence of nodes, ordered by their first nodes. See the
    module's docstring.

    `has_parameter[i]` is True if node i reads a parameter, and `is_heavy[i]` if it is a matmul, a
    convolution or a recurrent layer with a parameter.
    """
    if len(labels) < 2 * _MIN_LAYER_NODES:
        return ()
    crossing = _crossing_values(wiring)
    parameters_before = np.concatenate(([0], np.cumsum(has_parameter)))
    runs = [
        run
        for run in _find_runs(labels)
        if parameters_before[run.start + run.period] > parameters_before[run.start]
    ]
    runs.sort(key=lambda run: (-(run.length // run.period) * run.period, run.period, run.start))
    free = np.ones(len(labels), dtype=bool)
    found: list[Repeat] = []
    for run in runs:
        for start, end in _free_ranges(free, run.start, run.start + run.length):
            for starts in _equal_instances(
                labels, wiring, crossing, is_heavy, start, end, run.period
            ):
                is_parallel = not _is_chain(wiring, starts, run.period)
                if is_parallel and (depth or run.period < _MIN_PARALLEL_NODES):
                    continue
                for first in starts:
                    free[first : first + run.period] = False
                found.append(Repeat(run.period, tuple(starts)))
    return tuple(
        sorted(
            (
                _with_inner_classes(each, labels, wiring, has_parameter, is_heavy, depth)
                for each in _join_equal_classes(found, labels, wiring, free)
            ),
            key=lambda each: each.starts[0],
        )
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """A maximal range of nodes in which label i equals label i + `period`."""

    start: int
    length: int
    """Number of nodes of the range, at least two periods."""
    period: int


def _find_runs(labels: Labels) -> list[_Run]:
    """Return the runs of all candidate periods p: the maximal ranges, at least two periods long, in
    which label i equals label i + p.
    """
    found: list[_Run] = []
    for period in _candidate_periods(labels):
        starts, ends = _true_ranges(labels[period:] == labels[:-period])
        lengths = ends - starts
        for index in np.flatnonzero(lengths >= period):
            found.append(_Run(int(starts[index]), int(lengths[index]) + period, period))
    return found


def _true_ranges(mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (starts, ends) of the maximal ranges in which all entries of `mask` are True. The
    entry at the end of a range is not in it.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.view(np.int8), [0]))))
    return edges[0::2], edges[1::2]


def _candidate_periods(labels: Labels) -> list[int]:
    """Return possible periods of repeated parts, ascending: distances between consecutive equal
    windows. A window is a range of 1, 2, 4, … labels, up to half of all labels. Of each window
    length, the most frequent distances count, at most `_MAX_PERIODS_PER_LENGTH`, between half a
    window and half of all labels. A period below `_MIN_LAYER_NODES` is replaced by its smallest
    multiple that is not.
    """
    count = len(labels)
    names = labels
    length = 1
    found: set[int] = set()
    while length <= count // 2:
        order = np.argsort(names, kind="stable")
        is_next = names[order[1:]] == names[order[:-1]]
        distances = (order[1:] - order[:-1])[is_next]
        periods, frequency = np.unique(distances, return_counts=True)
        is_possible = (periods >= length // 2) & (periods <= count // 2)
        periods = periods[is_possible]
        frequency = frequency[is_possible]
        most_frequent = np.argsort(-frequency, kind="stable")[:_MAX_PERIODS_PER_LENGTH]
        found.update(periods[most_frequent].tolist())
        if not is_next.any():
            break
        # A window of length 2L is a pair of windows of length L, so pairs of names identify windows
        # of the next length.
        pairs = names[:-length].astype(np.int64) * (int(names.max()) + 1) + names[length:]
        names = np.unique(pairs, return_inverse=True)[1]
        length *= 2
    # A run of a period below `_MIN_LAYER_NODES`, the minimum size of a layer, is also a run of each
    # multiple of the period. So a multiple of sufficient size replaces it.
    short = [period for period in found if period < _MIN_LAYER_NODES]
    found.difference_update(short)
    found.update(period * -(-_MIN_LAYER_NODES // period) for period in short)
    return sorted(found)


def _crossing_values(wiring: Wiring) -> NDArray[np.int64]:
    """Return, for each i from 0 to the number of nodes, the number of values that a node before
    node i writes and that node i or a later node reads.
    """
    count = len(wiring.operands)
    last_reader = np.full(int(wiring.first_result[-1]), -1, dtype=np.int64)
    for node, operands in enumerate(wiring.operands):
        for value in operands:
            if value >= 0:
                last_reader[value] = node
    writer = np.repeat(np.arange(count), np.diff(wiring.first_result))
    is_read = last_reader >= 0
    change = np.bincount(writer[is_read] + 1, minlength=count + 2)
    change -= np.bincount(last_reader[is_read] + 1, minlength=count + 2)
    return np.cumsum(change)[: count + 1]


def _free_ranges(free: NDArray[np.bool_], start: int, end: int) -> list[tuple[int, int]]:
    """Return the maximal ranges (start, end) of nodes between `start` and `end` that are in no
    repeated part yet (`free`).
    """
    starts, ends = _true_ranges(free[start:end])
    return [
        (start + int(first), start + int(last)) for first, last in zip(starts, ends, strict=True)
    ]


def _equal_instances(
    labels: Labels,
    wiring: Wiring,
    crossing: NDArray[np.int64],
    is_heavy: NDArray[np.bool_],
    start: int,
    end: int,
    period: int,
) -> list[list[int]]:
    """Return lists of the first nodes of consecutive equal instances. An instance is a range of
    `period` nodes between `start` and `end`, where the labels have this period. Each list has two
    entries or more, and its instances are equal to one another.
    """
    count = (end - start) // period
    if count < 2:
        return []
    shifts = range(min((end - start) % period, period - 1) + 1)
    # The shift minimizes the values that cross the boundaries between instances. The boundary
    # before the first instance does not count, because its values come from another kind of layer.
    shift = min(
        shifts,
        key=lambda each: (
            crossing[start + each + period * (count - 1)],
            not is_heavy[start + each],
            each,
        ),
    )
    firsts = [start + shift + period * number for number in range(count)]
    groups: list[list[int]] = [[firsts[0]]]
    for first in firsts[1:]:
        if _are_equal(labels, wiring, groups[-1][0], first, period):
            groups[-1].append(first)
        else:
            groups.append([first])
    return [group for group in groups if len(group) > 1]


def _is_chain(wiring: Wiring, starts: Sequence[int], length: int) -> bool:
    """Return True if the last of several equal ranges of nodes reads a value that the range before
    it writes. `starts` are the first nodes of the ranges, and `length` is their number of nodes.
    """
    previous, start = starts[-2:]
    values = range(int(wiring.first_result[previous]), int(wiring.first_result[start]))
    return any(
        value in values for node in range(start, start + length) for value in wiring.operands[node]
    )


def _are_equal(labels: Labels, wiring: Wiring, one: int, other: int, length: int) -> bool:
    """Return True if the ranges of `length` nodes from `one` and from `other` have equal labels and
    equal wiring.
    """
    if not np.array_equal(labels[one : one + length], labels[other : other + length]):
        return False
    matched: dict[int, int] = {}
    matched_back: dict[int, int] = {}
    one_first = int(wiring.first_result[one])
    other_first = int(wiring.first_result[other])
    for offset in range(length):
        operands = wiring.operands[one + offset]
        for left, right in zip(operands, wiring.operands[other + offset], strict=True):
            is_inside = left >= one_first
            if is_inside != (right >= other_first):
                return False
            if is_inside:
                if left - one_first != right - other_first:
                    return False
            elif (
                matched.setdefault(left, right) != right
                or matched_back.setdefault(right, left) != left
            ):
                return False
    return True


def _join_equal_classes(
    classes: Sequence[Repeat], labels: Labels, wiring: Wiring, free: NDArray[np.bool_]
) -> list[Repeat]:
    """Return the repeated parts `classes` with two changes: parts with equal ranges are joined to
    one, and equal ranges of nodes that are in no part yet (`free`) are added.
    """
    joined: list[Repeat] = []
    for each in classes:
        for index, other in enumerate(joined):
            if other.length == each.length and _are_equal(
                labels, wiring, other.starts[0], each.starts[0], each.length
            ):
                starts = tuple(sorted((*other.starts, *each.starts)))
                joined[index] = Repeat(each.length, starts)
                break
        else:
            joined.append(each)
    result = []
    for each in joined:
        found = list(each.starts)
        for first in _occurrences(labels, each.starts[0], each.length):
            stop = first + each.length
            if free[first:stop].all() and _are_equal(
                labels, wiring, each.starts[0], first, each.length
            ):
                found.append(first)
                free[first:stop] = False
        result.append(Repeat(each.length, tuple(sorted(found))))
    return result


def _occurrences(labels: Labels, start: int, length: int) -> list[int]:
    """Return the positions at which the `length` labels from `start` occur."""
    pattern = labels[start : start + length]
    values, counts = np.unique(labels, return_counts=True)
    frequency = counts[np.searchsorted(values, pattern)]
    rarest = int(np.argmin(frequency))
    candidates = np.flatnonzero(labels == pattern[rarest]) - rarest
    return [
        int(first)
        for first in candidates
        if first >= 0
        and first + length <= len(labels)
        and np.array_equal(labels[first : first + length], pattern)
    ]


def _with_inner_classes(
    layer: Repeat,
    labels: Labels,
    wiring: Wiring,
    has_parameter: NDArray[np.bool_],
    is_heavy: NDArray[np.bool_],
    depth: int,
) -> Repeat:
    """Return the repeated part `layer` with the repeated parts inside its ranges (`Repeat.inner`),
    up to the maximum nesting.
    """
    if depth + 1 >= _MAX_NESTING:
        return layer
    start = layer.starts[0]
    stop = start + layer.length
    inner = find_repeats(
        labels[start:stop],
        wiring.part(start, stop),
        has_parameter[start:stop],
        is_heavy[start:stop],
        depth + 1,
    )
    return Repeat(layer.length, layer.starts, inner)
