"""Random numbers of operators in a running program, equal for every plan, schedule and number of
ranks.

The Philox key is derived from the seed, the step and the node. The counter is derived from the
position of an element: the number of its sample in the step, and its position in that sample.
Therefore each rank draws its block of the tensor that a single device would draw, micro-batches of
any size have equal masks for equal samples, and a recomputed forward pass draws equal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autopipe.backends.torch.runtime.random_numbers.philox import (
    LOW_32_BITS,
    WORDS_PER_BLOCK,
    CounterRows,
    Purpose,
    draw_words,
    key_of,
    philox_4x32,
)
from autopipe.ir.layout import MeshAxis, coordinate_along

Axes = tuple[tuple[int, int], ...]

_CHUNK_BLOCKS = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Number of blocks of four words that are drawn at a time, by device type: on a CPU bounded by the
size of its caches, on a GPU by memory.
"""
_NO_CHUNK_LIMIT = 1 << 62


class ForwardState:
    """The origin of the random numbers of one forward pass: the seed, the step, and two sample
    numbers in the step. `sample` is the first sample of this forward pass; `shared` is equal for
    all parts of the program's micro-batch.
    """

    def __init__(self, seed: int, step: int, sample: int, shared: int) -> None:
        self._origin = seed, step, sample, shared
        self._numbers: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """Return the two words of the key, then `sample` and `shared`: int64, [4]. The tensor is
        copied to the device once.
        """
        if self._numbers is None:
            seed, step, *samples = self._origin
            key = key_of(seed, Purpose.FORWARD, step)
            self._numbers = torch.tensor([*key, *samples]).to(device, non_blocking=True)
        return self._numbers


class StaticState:
    """The origin of the random numbers of a forward pass in a CUDA graph: one tensor, which is
    overwritten before each replay.
    """

    def __init__(self, state: ForwardState, device: torch.device) -> None:
        """Start with the origin in `state`."""
        self._numbers = state.on(device).clone()

    def on(self, device: torch.device) -> Tensor:
        """Return the tensor, as `ForwardState.on` does."""
        return self._numbers

    def copy(self, state: ForwardState) -> None:
        """Replace the origin by the origin in `state`."""
        self._numbers.copy_(state.on(self._numbers.device))


class Random:
    """Random numbers of a stage's operators, on the rank at `position` of its group.

    The origin's tensor is created at the first draw of a forward pass. If `draws` is set, it is
    created before the forward pass, so that a compiled forward pass finds it.
    """

    def __init__(self, device: torch.device, position: int = 0, draws: bool = False) -> None:
        self.device = device
        self.position = position
        self.draws = draws
        self.begin(0, 0, 0, 0)

    def begin(self, seed: int, step: int, sample: int, shared: int) -> None:
        """Start a forward pass whose first sample has number `sample` in the step. `shared` is
        equal for all parts of the program's micro-batch: tensors without a sample dimension use it,
        and have equal values in all parts.
        """
        self.state: ForwardState | StaticState = ForwardState(seed, step, sample, shared)
        if self.draws:
            self.state.on(self.device)

    def __call__(
        self,
        node: int,
        cuts: tuple[Axes, ...] = (),
        samples: int | tuple[int, int, int] | None = None,
    ) -> Stream:
        """Return the random numbers of a node for this rank.

        `cuts`: for each dimension, the mesh axes that shard it; () if nothing is sharded.
        `samples`: the dimension that counts samples, or a tuple of that dimension and its sizes
        outside and inside the sample index (see `autopipe.ir.batch.BatchDimension`); None for a
        tensor without a sample dimension.
        """
        state = self.state.on(self.device)
        key = state[0] ^ (node >> 32), state[1] ^ (node & LOW_32_BITS)
        along = tuple(tuple(MeshAxis(*axis) for axis in axes) for axes in cuts)
        degrees = tuple(math.prod(degree for degree, _ in axes) for axes in cuts)
        places = tuple(coordinate_along(axes, self.position) for axes in along)
        counted = (samples, 1, 1) if isinstance(samples, int) else samples
        return Stream(key, state[3 if counted is None else 2], places, degrees, counted)


@dataclass(frozen=True, slots=True)
class Stream:
    """The random numbers of one node in one forward pass.

    The rank has the shard at index `places` of `degrees` shards in each dimension; both are () for
    a replicated tensor. `sample` is the number of the first sample in the step. `counted` describes
    the sample dimension, None if there is none.
    """

    key: tuple[Tensor, Tensor]
    sample: Tensor
    places: tuple[int, ...] = ()
    degrees: tuple[int, ...] = ()
    counted: tuple[int, int, int] | None = None

    def draw(
        self, shape: tuple[int, ...], make: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """Return this rank's shard, a tensor of `shape`. `make` must be elementwise: it maps each
        word to an element.
        """
        *outer, last = shape or (1,)
        rows, samples, blocks, lead = self._counters(outer, last)
        if isinstance(lead, Tensor):
            return make(self._single_words(rows, samples, blocks, lead)).to(dtype).reshape(shape)
        width = -(-(lead + last) // WORDS_PER_BLOCK)
        counters = CounterRows(blocks, rows >> 32, samples, rows & LOW_32_BITS)
        height = len(rows)
        chunk = (
            _NO_CHUNK_LIMIT
            if torch.compiler.is_compiling()
            else _CHUNK_BLOCKS.get(self.sample.device.type, _NO_CHUNK_LIMIT)
        )
        across = max(1, min(width, chunk))
        down = max(1, chunk // across)
        if across == width and down >= height:
            words = draw_words(counters, 0, width, self.key)
            return make(words[:, lead : lead + last]).to(dtype).reshape(shape)
        found = torch.empty((height, last), dtype=dtype, device=self.sample.device)
        for top in range(0, height, down):
            own = slice(top, top + down)
            for left in range(0, width, across):
                words = draw_words(counters.slice(own), left, min(left + across, width), self.key)
                begin = WORDS_PER_BLOCK * left - lead
                skipped = max(0, -begin)
                part = words[:, skipped : last - begin]
                found[own, begin + skipped : begin + skipped + part.shape[1]] = make(part)
        return found.reshape(shape)

    def _single_words(self, rows: Tensor, samples: Tensor, blocks: Tensor, lead: Tensor) -> Tensor:
        """Return one word for each element, from the block of that element. Used if the last
        dimension counts samples, so that the elements of a row belong to different samples.
        """
        block = philox_4x32((blocks, rows & LOW_32_BITS, rows >> 32, samples), self.key)
        words = torch.stack(torch.broadcast_tensors(*block), -1)
        picked = lead.expand(words.shape[:-1]).unsqueeze(-1)
        return words.gather(-1, picked).squeeze(-1).to(torch.int32)

    def _counters(self, outer: list[int], last: int) -> tuple[Tensor, Tensor, Tensor, int | Tensor]:
        """Return (rows, samples, blocks, lead): the counters of this rank's block.

        rows, samples: [rows, 1], of the dimensions before the last. blocks: [1, 1], the first block
        of four words along the last dimension. lead: number of words of that block that lie before
        this rank's words. If the last dimension counts samples, `samples` and `blocks` have an
        entry for each element, [rows, last] and [1, last], and `lead` is the word of its block that
        each element takes.
        """
        rows = samples = torch.zeros((), dtype=torch.int64, device=self.sample.device)
        stride = 1
        for dimension in reversed(range(len(outer))):
            index, extent, counted = self._axis_coordinates(dimension, outer[dimension])
            ones = (1,) * (len(outer) - 1 - dimension)
            rows = rows + (index * stride).reshape(-1, *ones)
            samples = samples if counted is None else samples + counted.reshape(-1, *ones)
            stride *= extent
        rows, samples = (
            each.expand(outer).reshape(-1, 1) for each in (rows, samples + self.sample)
        )
        if self.counted is not None and self.counted[0] == len(outer):
            index, _, counted = self._axis_coordinates(len(outer), last)
            assert counted is not None, "the last dimension counts samples"
            return (
                rows,
                samples + counted,
                index[None] // WORDS_PER_BLOCK,
                index[None] % WORDS_PER_BLOCK,
            )
        start = self.places[len(outer)] * last if self.places else 0
        first = torch.full(
            (1, 1), start // WORDS_PER_BLOCK, dtype=torch.int64, device=self.sample.device
        )
        return rows, samples, first, start % WORDS_PER_BLOCK

    def _axis_coordinates(self, dimension: int, extent: int) -> tuple[Tensor, int, Tensor | None]:
        """Return (index, size, sample) for a dimension that has `extent` elements on this rank.

        index: position of each element in the full dimension, or, for the sample dimension, in its
        sample. size: number of positions. sample: index of the sample of each element; None for
        other dimensions.
        """
        start = self.places[dimension] * extent if self.places else 0
        whole = extent * (self.degrees[dimension] if self.degrees else 1)
        index = torch.arange(start, start + extent, device=self.sample.device)
        if self.counted is None or self.counted[0] != dimension:
            return index, whole, None
        _, before, inside = self.counted
        batch = whole // (before * inside)
        return (
            index // (batch * inside) * inside + index % inside,
            before * inside,
            index // inside % batch,
        )
