"""Optimizer state of a rank's parameters, by parameter and block, for optimizers that update parameters or shards of
them.

Who writes what: every block of every parameter once, by one of those who hold it, and about as much by each.

Training state of a rank: its blocks of parameters, the optimizer's state, and random generators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from autopipe.backends.torch.checkpoint.format import StoredParameter, StoredTensor
from autopipe.backends.torch.checkpoint.read import Reader
from autopipe.backends.torch.runtime.gradients import OptimizerShard, buckets_of_rank
from autopipe.backends.torch.runtime.manifest import Manifest, ShardEntry
from autopipe.ir.graph import DType
from autopipe.ir.layout import Box
from autopipe.ir.problem import Optimizer
from autopipe.ir.program import ElementRange

COUNTERS = frozenset({"step"})
"""Names of the state that torch's optimizers keep once a tensor, not for each element."""

Read = Callable[[StoredTensor, Box], torch.Tensor]
"""Reads a block of a stored tensor."""


class OptimizerState:
    """The state of an optimizer over a rank's parameters, those of `shares` excepted, and over `shares`."""

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        parameters: Mapping[int, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        shares: Sequence[OptimizerShard] = (),
    ) -> None:
        self._names = [entry.name for entry in manifest.parameters]
        self._shards = {shard.parameter: shard for shard in manifest.shards[rank]}
        self._parameters = parameters
        self._optimizer = optimizer
        self._shares = {id(share.tensor): share for share in shares}
        self._share_of = {run.parameter: (share, run) for share in shares for run in share.runs}

    def tensors(self, parameter: int, box: Box) -> dict[str, torch.Tensor]:
        """State tensors of the elements of a box, in coordinates of the rank's block, as views by torch's names.

        Of a parameter that is updated in shards a box must be one of its runs.
        """
        if parameter not in self._share_of:
            region = tuple(slice(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))
            kept = self._kept(self._parameters[parameter])
            return {name: tensor[region] for name, tensor in kept.items() if name not in COUNTERS}
        share, run = self._share_of[parameter]
        at = run.at + _place(box, self._shards[parameter].shape) - run.start
        kept = self._kept(share.tensor)
        return {
            name: tensor[at : at + box.elements].view(box.shape)
            for name, tensor in kept.items()
            if name not in COUNTERS
        }

    def counters(self, parameter: int) -> tuple[tuple[str, float], ...]:
        """Scalar state of a parameter."""
        found = self._share_of.get(parameter)
        kept = self._kept(self._parameters[parameter] if found is None else found[0].tensor)
        return tuple((name, float(value)) for name, value in kept.items() if name in COUNTERS)

    def _kept(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        state = {} if self._optimizer is None else self._optimizer.state.get(tensor, {})
        return {name: value for name, value in sorted(state.items()) if isinstance(value, torch.Tensor)}

    def restore(self, saved: Mapping[str, StoredParameter], read: Read) -> None:
        """Put in place what is stored of the rank's blocks, which may have been saved under another plan."""
        if self._optimizer is None:
            return
        indices = {id(parameter): index for index, parameter in self._parameters.items()}
        form = self._optimizer.state_dict()
        form["state"] = {}
        updated = [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
        for position, tensor in enumerate(updated):
            share = self._shares.get(id(tensor))
            if share is None:
                index = indices[id(tensor)]
                state = self._stored(saved, read, index)
            else:
                state = self._stored_share(saved, read, share)
            if state:
                form["state"][position] = state
        self._optimizer.load_state_dict(form)

    def _stored(self, saved: Mapping[str, StoredParameter], read: Read, parameter: int) -> dict[str, torch.Tensor]:
        stored, shard = saved[self._names[parameter]], self._shards[parameter]
        box = Box(shard.starts, shard.stops)
        return {name: read(tensor, box) for name, tensor in stored.state} | _scalars([stored])

    def _stored_share(
        self, saved: Mapping[str, StoredParameter], read: Read, share: OptimizerShard
    ) -> dict[str, torch.Tensor]:
        """State of the runs of a shard's parameters; zeros where one has none, as before the first update."""
        found: dict[str, torch.Tensor] = {}
        for run in share.runs:
            for name, tensor in saved[self._names[run.parameter]].state:
                row = found.setdefault(name, torch.zeros_like(share.tensor))
                at = run.at
                for box in boxes_of(run, self._shards[run.parameter]):
                    row[at : at + box.elements] = read(tensor, box).reshape(-1)
                    at += box.elements
        return found | _scalars(saved[self._names[run.parameter]] for run in share.runs)


def boxes_of(run: ElementRange, shard: ShardEntry) -> Iterable[Box]:
    """A run of a block as boxes of the whole parameter, in order."""
    for box in run.boxes(shard.shape):
        starts = (begin + start for begin, start in zip(shard.starts, box.starts, strict=True))
        stops = (begin + stop for begin, stop in zip(shard.starts, box.stops, strict=True))
        yield Box(tuple(starts), tuple(stops))


def _place(box: Box, shape: tuple[int, ...]) -> int:
    """Where the first element of a box stands in a block of `shape`, row by row."""
    return sum(start * math.prod(shape[axis + 1 :]) for axis, start in enumerate(box.starts))


def _scalars(stored: Iterable[StoredParameter]) -> dict[str, torch.Tensor]:
    found: dict[str, float] = {}
    for each in stored:
        for name, value in each.scalars:
            found[name] = max(value, found.get(name, value))
    return {name: torch.tensor(value) for name, value in found.items()}


_LEAST_BYTES = 2**20
"""Smaller blocks are not cut up among their holders."""
_PIECES = 16
"""About as many pieces a rank as make loads even where all hold everything; more would only swell the manifest."""


@dataclass(frozen=True, slots=True)
class WriteBlock:
    """A block of a parameter that a rank writes; `number` tells the parameter's pieces apart."""

    parameter: int
    number: int
    box: Box


@dataclass(frozen=True, slots=True)
class _Held:
    """A block, the ranks that hold it, and its bytes with what the optimizer keeps of it.

    `shared` says that, where the optimizer's state is shared out, that of this block is.
    """

    parameter: int
    box: Box
    ranks: tuple[int, ...]
    size: int
    shared: bool


def write_blocks(manifest: Manifest) -> tuple[tuple[WriteBlock, ...], ...]:
    """The pieces that each rank writes, by rank: the same on all ranks, since all know who holds what.

    Blocks of a parameter are equal or apart (`autopipe.passes.lower.shard`), so that none is written twice. What
    is updated in shares is written by who has the share. Of the rest the largest piece goes first, to whichever of its
    holders has least to write.
    """
    numbers = [0] * len(manifest.parameters)
    found: list[list[WriteBlock]] = [[] for _ in range(manifest.world_size)]
    blocks = _held(manifest)
    if manifest.optimizer["shard"]:
        for rank, pieces in enumerate(found):
            pieces.extend(_shares(manifest, rank, numbers))
        blocks = [block for block in blocks if not block.shared]
    piece_bytes = max(_LEAST_BYTES, sum(block.size for block in blocks) // (manifest.world_size * _PIECES))
    parts_of_blocks = []
    for block in blocks:
        parts = list(_parts(block.box, min(len(block.ranks), block.size // piece_bytes)))
        for part in parts:
            piece = WriteBlock(block.parameter, numbers[block.parameter], part)
            parts_of_blocks.append((piece, block.ranks, block.size // len(parts)))
            numbers[block.parameter] += 1
    load = [0] * manifest.world_size
    for piece, ranks, size in sorted(parts_of_blocks, key=lambda each: -each[2]):
        rank = min(ranks, key=lambda holder: load[holder])
        load[rank] += size
        found[rank].append(piece)
    return tuple(tuple(sorted(each, key=lambda piece: (piece.parameter, piece.number))) for each in found)


def _shares(manifest: Manifest, rank: int, numbers: list[int]) -> Iterator[WriteBlock]:
    """The pieces of a rank's shares, numbered on from those that each parameter has."""
    own = {shard.parameter: shard for shard in manifest.shards[rank]}
    for bucket in buckets_of_rank(manifest, rank):
        for run in bucket.runs(rank):
            for box in boxes_of(run, own[run.parameter]):
                yield WriteBlock(run.parameter, numbers[run.parameter], box)
                numbers[run.parameter] += 1


def _held(manifest: Manifest) -> list[_Held]:
    """Every block of every parameter, once."""
    holders: dict[tuple[int, Box], list[int]] = {}
    for rank, shards in enumerate(manifest.shards):
        for shard in shards:
            holders.setdefault((shard.parameter, Box(shard.starts, shard.stops)), []).append(rank)
    states = Optimizer(manifest.optimizer["name"], momentum=manifest.optimizer["momentum"]).states
    found = []
    for (parameter, box), ranks in holders.items():
        entry = manifest.parameters[parameter]
        dtype = DType(entry.dtype)
        element = dtype.itemsize * (1 + states * entry.trainable)
        shared = len(ranks) > 1 and entry.trainable and dtype.is_floating
        found.append(_Held(parameter, box, tuple(ranks), box.elements * element, shared))
    return found


def _parts(box: Box, count: int) -> Iterator[Box]:
    """About `count` parts of a block, cut along its longest dimension."""
    extent = max(box.shape, default=1)
    axis = box.shape.index(extent) if box.shape else 0
    count = min(count, extent)
    if count < 2:
        yield box
        return
    cuts = [box.starts[axis] + extent * index // count for index in range(count + 1)]
    for start, stop in pairwise(cuts):
        starts = (*box.starts[:axis], start, *box.starts[axis + 1 :])
        yield Box(starts, (*box.stops[:axis], stop, *box.stops[axis + 1 :]))


@dataclass(frozen=True, slots=True, eq=False)
class SavedBlock:
    """A block that a rank writes: of a parameter, or of what the optimizer keeps of it under the name `state`."""

    key: str
    piece: WriteBlock
    state: str
    tensor: torch.Tensor


class TrainingState:
    """A rank's training state."""

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        parameters: Mapping[int, torch.Tensor],
        optimizer: OptimizerState,
        device: torch.device,
    ) -> None:
        self._manifest = manifest
        self._boxes = {shard.parameter: Box(shard.starts, shard.stops) for shard in manifest.shards[rank]}
        self._parameters = parameters
        self._optimizer = optimizer
        self._device = device

    def blocks(self, pieces: Sequence[WriteBlock]) -> Iterator[SavedBlock]:
        """Blocks to write, as views."""
        for piece in pieces:
            parameter = self._parameters[piece.parameter]
            box = piece.box.within(self._boxes[piece.parameter])
            region = tuple(slice(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))
            key = f"p{piece.parameter}.{piece.number}"
            yield SavedBlock(key, piece, "", parameter.detach()[region])
            for name, tensor in self._optimizer.tensors(piece.parameter, box).items():
                yield SavedBlock(f"{key}.{name}", piece, name, tensor)

    def counters(self, parameter: int) -> tuple[tuple[str, float], ...]:
        """Scalar optimizer state of a parameter."""
        return self._optimizer.counters(parameter)

    def generators(self) -> dict[str, torch.Tensor]:
        """The states of torch's generators of random numbers, by device."""
        found = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            found["cuda"] = torch.cuda.get_rng_state(self._device)
        return found

    def restore(self, reader: Reader, saved: Mapping[str, StoredParameter]) -> None:
        """Put this rank's blocks in place, of parameters that are all there, by name."""

        def read(tensor: StoredTensor, box: Box) -> torch.Tensor:
            return tensor_of(reader.read(tensor, box), tensor.dtype)

        for index, parameter in self._parameters.items():
            stored = saved[self._manifest.parameters[index].name]
            with torch.no_grad():
                parameter.copy_(read(stored.value, self._boxes[index]))
        self._optimizer.restore(saved, read)

    def restore_generators(self, states: Mapping[str, torch.Tensor]) -> None:
        """Draw on from where these states were taken."""
        torch.set_rng_state(states["cpu"])
        if self._device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self._device)

    def seed_generators(self, *seeds: int) -> None:
        """Draw numbers that follow from these seeds."""
        (seed,) = np.random.SeedSequence(seeds).generate_state(1, np.uint64)
        torch.manual_seed(int(seed >> np.uint64(1)))


def tensor_of(array: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor of what a checkpoint stores under the type called `dtype`."""
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
