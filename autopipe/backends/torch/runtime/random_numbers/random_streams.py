"""Random numbers of operators in a running program, equal for every plan, schedule and number of
ranks.

The Philox key is derived from the seed, the step and the node of the graph. The counter is derived
from the position of an element: the number of its sample in the step, and its position in this
sample. So each rank draws its slice of the tensor that a single device would draw, equal samples
have equal masks in micro-batches of any size, and a recomputed forward draws equal numbers.
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
from autopipe.ir.layout import MeshAxis, combined_coordinate

Axes = tuple[tuple[int, int], ...]

_CHUNK_BLOCKS = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Number of blocks of four words that are drawn at a time, by device type. On a CPU, the words fit
into its caches; on a GPU, the number limits the memory for words.
"""
_NO_CHUNK_LIMIT = 1 << 62


class ForwardState:
    """Origin of the random numbers of one forward: seed, step, and two numbers of samples in the
    step. `sample` is the number of the first sample of this forward. `shared` is the number of the
    first sample of the program's micro-batch, of which the forward may run a part; it is used for
    tensors without a sample dimension.
    """

    def __init__(self, seed: int, step: int, sample: int, shared: int) -> None:
        self._origin = seed, step, sample, shared
        self._numbers: Tensor | None = None

    def tensor_on(self, device: torch.device) -> Tensor:
        """Return this state as a tensor on a device: the two words of the key, then `sample` and
        `shared`; int64 [4]. It is copied to the device at the first call.
        """
        if self._numbers is None:
            seed, step, *samples = self._origin
            key = key_of(seed, Purpose.FORWARD, step)
            self._numbers = torch.tensor([*key, *samples]).to(device, non_blocking=True)
        return self._numbers


class StaticState:
    """Origin of the random numbers of a forward in a CUDA graph: a tensor that is overwritten
    before each replay of the graph.
    """

    def __init__(self, state: ForwardState, device: torch.device) -> None:
        """Start with the values of `state`."""
        self._numbers = state.tensor_on(device).clone()

    def tensor_on(self, device: torch.device) -> Tensor:
        """Return the tensor, int64 [4], as `ForwardState.tensor_on` does."""
        return self._numbers

    def copy(self, state: ForwardState) -> None:
        """Overwrite the values by the values of `state`."""
        self._numbers.copy_(state.tensor_on(self._numbers.device))


class RandomStreams:
    """Provides the random numbers of a stage's operators, on the rank at `position` of the stage's
    group. Generated code calls it as `p.random(...)`.

    The tensor of the state is created at the first draw of a forward. If `draws` is True, it is
    created before the forward, because a compiled forward cannot create it.
    """

    def __init__(self, device: torch.device, position: int = 0, draws: bool = False) -> None:
        self.device = device
        self.position = position
        self.draws = draws
        self.begin(0, 0, 0, 0)

    def begin(self, seed: int, step: int, sample: int, shared: int) -> None:
        """Start a forward. `sample` is the number in the step of its first sample. `shared` is the
        number of the first sample of the program's micro-batch, of which the forward may run a
        part: tensors without a sample dimension have equal values in all parts.
        """
        self.state: ForwardState | StaticState = ForwardState(seed, step, sample, shared)
        if self.draws:
            self.state.tensor_on(self.device)

    def __call__(
        self,
        node: int,
        cuts: tuple[Axes, ...] = (),
        samples: int | tuple[int, int, int] | None = None,
    ) -> RandomStream:
        """Return the random numbers of a node of the graph for this rank.

        `cuts` has, for each dimension, the mesh axes that shard it; () if no dimension is sharded.
        `samples` is the index of the dimension that counts samples; None if there is none. If other
        indices are merged with the sample index in this dimension, it is (dimension, size of the
        indices outside of the sample index, size of those inside); see
        `autopipe.ir.batch.BatchDimension`.
        """
        state = self.state.tensor_on(self.device)
        key = state[0] ^ (node >> 32), state[1] ^ (node & LOW_32_BITS)
        along = tuple(tuple(MeshAxis(*axis) for axis in axes) for axes in cuts)
        degrees = tuple(math.prod(degree for degree, _ in axes) for axes in cuts)
        places = tuple(combined_coordinate(axes, self.position) for axes in along)
        counted = (samples, 1, 1) if isinstance(samples, int) else samples
        return RandomStream(key, state[3 if counted is None else 2], places, degrees, counted)


@dataclass(frozen=True, slots=True)
class RandomStream:
    """The random numbers of one node in one forward, on one rank.

    In each dimension the rank has the shard with index `places[i]` of `degrees[i]` shards; both are
    () if the tensor is not sharded. `sample` is the number in the step of the forward's first
    sample or, without a sample dimension, of the first sample of the program's micro-batch.
    `counted` is (sample dimension, outer size, inner size): the sizes of the other indices in this
    dimension, which are merged with the sample index and outside or inside of it. None without a
    sample dimension.
    """

    key: tuple[Tensor, Tensor]
    sample: Tensor
    places: tuple[int, ...] = ()
    degrees: tuple[int, ...] = ()
    counted: tuple[int, int, int] | None = None

    def draw(
        self, shape: tuple[int, ...], make: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> Tensor:
        """Return this rank's shard of the random tensor, of shape `shape` and type `dtype`. `make`
        maps random 32-bit words (int32) to elements, and must be elementwise.
        """
        *outer, last = shape or (1,)
        rows, samples, blocks, lead = self._counters(outer, last)
        if isinstance(lead, Tensor):
            return (
                make(self._one_word_per_element(rows, samples, blocks, lead))
                .to(dtype)
                .reshape(shape)
            )
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

    def _one_word_per_element(
        self, rows: Tensor, samples: Tensor, blocks: Tensor, lead: Tensor
    ) -> Tensor:
        """Return one random word for each element, from a block that is computed for this element
        only. Used if the last dimension counts samples: then neighbouring elements belong to
        different samples, and so to different blocks. The arguments are from `_counters`.
        """
        block = philox_4x32((blocks, rows & LOW_32_BITS, rows >> 32, samples), self.key)
        words = torch.stack(torch.broadcast_tensors(*block), -1)
        picked = lead.expand(words.shape[:-1]).unsqueeze(-1)
        return words.gather(-1, picked).squeeze(-1).to(torch.int32)

    def _counters(self, outer: list[int], last: int) -> tuple[Tensor, Tensor, Tensor, int | Tensor]:
        """Return (rows, samples, blocks, lead), which determine the Philox counters of this rank's
        elements. A row consists of the elements along the last dimension. `outer` are the sizes of
        all dimensions but the last on this rank, `last` is the size of the last.

        rows: position of each row, an index into the outer dimensions, [rows, 1].
        samples: number in the step of the sample of each row, [rows, 1].
        blocks: index of the first block (four random words) of a row that this rank needs, [1, 1].
        lead: number of words in this block that precede this rank's words.

        If the last dimension counts samples, `samples` is [rows, last]; `blocks` [1, last] is the
        block of each element, and `lead` [1, last] is the index of the element's word in its block.
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

        index: position of each element in the full dimension; in the sample dimension, its position
        in the sample.
        size: number of such positions.
        sample: index of the sample of each element; None in other dimensions.
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
