"""Messages that a stage between two downsets receives from the stages before it and sends to those after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.graph import Graph
from autopipe.ir.placement import recomputed_nodes
from autopipe.passes.analysis.operators import SampleAxes
from autopipe.passes.partition.downsets import Downsets, Figures, Pairs
from autopipe.passes.placement.piper.blocks import Blocks

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
