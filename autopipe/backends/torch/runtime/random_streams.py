"""Numbers that operators draw while a program runs: the same whatever the plan, the schedule and the number of ranks.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) as tensor operations. Its key is
made of the seed, the step and the node; its counter is an element's place: the sample of the step that it belongs to,
and where in the sample it lies. So each rank draws its own block of what one device would draw, a micro-batch of any
size has the masks of its samples, and a forward that runs again draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopipe.backends.torch.runtime.philox import key_of
from autopipe.ir.layout import MeshAxis, place_along

Words = tuple[Tensor, Tensor, Tensor, Tensor]
"""Four tensors of whole numbers in [0, 2³²), int64, that can be broadcast to one shape."""
Axes = tuple[tuple[int, int], ...]

_STEP_STREAM = 2
_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_CHUNK = {"cpu": 1 << 14, "cuda": 1 << 22}
"""Blocks of four numbers made at once: on a processor as many as its caches hold, on a GPU as memory shall be taken."""
_ALL = 1 << 62


def philox_4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # Modulo 2⁶⁴: the sign is one more bit.
        if number:
            k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
        # Low halves are taken where they are used next: above them stand high halves until then.
        c0 = ((p1 >> 32) ^ c1).bitwise_xor_(k0).bitwise_and_(_LOW)
        c2 = ((p0 >> 32) ^ c3).bitwise_xor_(k1).bitwise_and_(_LOW)
        c1, c3 = p1, p0
    return c0, c1 & _LOW, c2, c3 & _LOW


class ForwardState:
    """The origin of one forward's numbers: seed, step, and the first sample's number in the step, its own and that of
    the program's micro-batch."""

    def __init__(self, seed: int, step: int, sample: int, shared: int) -> None:
        self._origin = seed, step, sample, shared
        self._numbers: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """Two words of the key, and the two samples; int64, [4]. Copied to the device once."""
        if self._numbers is None:
            seed, step, *samples = self._origin
            words = [int(word) & _LOW for word in key_of(seed, (_STEP_STREAM, step))]
            self._numbers = torch.tensor([*words, *samples]).to(device, non_blocking=True)
        return self._numbers


class StaticState:
    """The origin of the random numbers of a CUDA graph's forward: one tensor, which is written before each replay."""

    def __init__(self, state: ForwardState, device: torch.device) -> None:
        """Begin with the origin in `state`."""
        self._numbers = state.on(device).clone()

    def on(self, device: torch.device) -> Tensor:
        """Return the tensor, as `ForwardState.on` does."""
        return self._numbers

    def copy(self, state: ForwardState) -> None:
        """Replace the origin by the origin in `state`."""
        self._numbers.copy_(state.on(self._numbers.device))


class Random:
    """Random numbers of a stage's operators, on the rank at `position` of its group. The state is made where something
    is drawn, and before a forward that `draws`: it may be compiled, and then finds it there."""

    def __init__(self, device: torch.device, position: int = 0, draws: bool = False) -> None:
        self.device = device
        self.position = position
        self.draws = draws
        self.begin(0, 0, 0, 0)

    def begin(self, seed: int, step: int, sample: int, shared: int) -> None:
        """From now on a forward runs whose samples count from `sample` in the step. `shared` is the same for all parts
        of the program's micro-batch: of what carries no samples they draw the same."""
        self.state: ForwardState | StaticState = ForwardState(seed, step, sample, shared)
        if self.draws:
            self.state.on(self.device)

    def __call__(
        self, node: int, cuts: tuple[Axes, ...] = (), samples: int | tuple[int, int, int] | None = None
    ) -> Stream:
        """The numbers of a node, of which mesh axes give this rank a part: for each dimension those that `cuts` it.
        `samples` is the dimension that counts samples, or it with its extents outside of and inside a sample's index
        (see `autopipe.ir.batch.Samples`); None where the tensor carries none."""
        state = self.state.on(self.device)
        key = state[0] ^ (node >> 32), state[1] ^ (node & _LOW)
        along = tuple(tuple(MeshAxis(*axis) for axis in axes) for axes in cuts)
        degrees = tuple(math.prod(degree for degree, _ in axes) for axes in cuts)
        places = tuple(place_along(axes, self.position) for axes in along)
        counted = (samples, 1, 1) if isinstance(samples, int) else samples
        return Stream(key, state[3 if counted is None else 2], places, degrees, counted)


@dataclass(frozen=True, slots=True)
class Stream:
    """The numbers of one node in one forward, of which a rank has the block at `places` among `degrees`, by dimension;
    () where it has all. `sample` is the first sample's number in the step."""

    key: tuple[Tensor, Tensor]
    sample: Tensor
    places: tuple[int, ...] = ()
    degrees: tuple[int, ...] = ()
    counted: tuple[int, int, int] | None = None

    def draw(self, shape: tuple[int, ...], make: Callable[[Words], Sequence[Tensor]], dtype: torch.dtype) -> Tensor:
        """A tensor of `shape`, this rank's block: `make` gives the elements for words, each for its own or its four."""
        *outer, last = shape or (1,)
        rows, samples, blocks, lead = self._counters(outer, last)

        def words(own: slice, part: slice) -> Words:
            return philox_4x32((blocks[:, part], rows[own] & _LOW, rows[own] >> 32, samples[own]), self.key)

        if isinstance(lead, Tensor):
            made = torch.stack(tuple(make(words(slice(None), slice(None)))), -1)
            picked = lead.expand(made.shape[:-1]).unsqueeze(-1)
            return made.gather(-1, picked).squeeze(-1).to(dtype).reshape(shape)
        height, width = rows.shape[0], blocks.shape[1]
        found = torch.empty((height, width, 4), dtype=dtype, device=self.sample.device)
        chunk = _ALL if torch.compiler.is_compiling() else _CHUNK.get(self.sample.device.type, _ALL)
        across = max(1, min(width, chunk))
        down = max(1, chunk // across)
        for own in (slice(top, top + down) for top in range(0, height, down)):
            for part in (slice(left, left + across) for left in range(0, width, across)):
                for index, each in enumerate(make(words(own, part))):
                    found[own, part, index] = each
        return found.view(height, 4 * width)[:, lead : lead + last].reshape(shape)

    def _counters(self, outer: list[int], last: int) -> tuple[Tensor, Tensor, Tensor, int | Tensor]:
        """The counters of a block: of what lies before the last dimension rows and samples, [rows, 1]; along it blocks
        of four words, [1, blocks], and how many words of the first lie before the rank's own. Where elements are drawn
        one by one, instead of that the word of its block that each one takes."""
        rows = samples = torch.zeros((), dtype=torch.int64, device=self.sample.device)
        stride = 1
        for dimension in reversed(range(len(outer))):
            index, extent, counted = self._along(dimension, outer[dimension])
            ones = (1,) * (len(outer) - 1 - dimension)
            rows = rows + (index * stride).reshape(-1, *ones)
            samples = samples if counted is None else samples + counted.reshape(-1, *ones)
            stride *= extent
        rows, samples = (each.expand(outer).reshape(-1, 1) for each in (rows, samples + self.sample))
        if self.counted is not None and self.counted[0] == len(outer):
            index, _, counted = self._along(len(outer), last)
            assert counted is not None, "the last dimension counts samples"
            return rows, samples + counted, index[None] // 4, index[None] % 4
        start = self.places[len(outer)] * last if self.places else 0
        blocks = torch.arange(start // 4, -(-(start + last) // 4), device=self.sample.device)
        return rows, samples, blocks[None], start % 4

    def _along(self, dimension: int, extent: int) -> tuple[Tensor, int, Tensor | None]:
        """Of a dimension of which this rank has `extent`: where elements lie in a sample, of how many, and of which."""
        start = self.places[dimension] * extent if self.places else 0
        whole = extent * (self.degrees[dimension] if self.degrees else 1)
        index = torch.arange(start, start + extent, device=self.sample.device)
        if self.counted is None or self.counted[0] != dimension:
            return index, whole, None
        _, before, inside = self.counted
        batch = whole // (before * inside)
        return index // (batch * inside) * inside + index % inside, before * inside, index // inside % batch
