"""Training state of a rank: its blocks of parameters, the optimizer's state, and random generators;
who writes what. Every block of every parameter is written once, by one of those who hold it, and
about as much by each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from autopipe.backends.torch.checkpoint import AVERAGE, Reader, StoredParameter, StoredTensor
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.state.parameters import tensor_of
from autopipe.backends.torch.runtime.step.gradients import (
    OptimizerShard,
    buckets_of_rank,
    is_reduced,
)
from autopipe.backends.torch.runtime.step.precision import LossScaler
from autopipe.ir.layout import TensorSlice, full_slice
from autopipe.ir.problem import Optimizer
from autopipe.ir.program import ElementRange

_LEAST_BYTES = 2**20  # Smaller blocks are not cut up among their holders.
_PIECES = 16
"""About as many pieces a rank as make loads even where all hold everything; more would only swell
the manifest.
"""


@dataclass(frozen=True, slots=True)
class WriteBlock:
    """A block of a parameter that a rank writes; `number` tells the parameter's pieces apart."""

    parameter: int
    number: int
    box: TensorSlice


def write_blocks(manifest: Manifest) -> tuple[tuple[WriteBlock, ...], ...]:
    """The pieces that each rank writes, by rank: the same on all ranks, since all know who holds
    what.

    Blocks of a parameter are equal or apart (`autopipe.passes.lower.shard`), so that none is
    written twice. What is updated in shares is written by who has the share. Of the rest the
    largest piece goes first, to whichever of its holders has least to write.
    """
    numbers = [0] * len(manifest.parameters)
    found: list[list[WriteBlock]] = [[] for _ in range(manifest.world_size)]

    def numbered(parameter: int, box: TensorSlice) -> WriteBlock:
        numbers[parameter] += 1
        return WriteBlock(parameter, numbers[parameter] - 1, box)

    if manifest.optimizer["shard"]:
        for rank, pieces in enumerate(found):
            own = {shard.parameter: shard.box for shard in manifest.shards[rank]}
            for run in (
                run for bucket in buckets_of_rank(manifest, rank) for run in bucket.runs(rank)
            ):
                pieces.extend(
                    numbered(run.parameter, box) for box in boxes_of(run, own[run.parameter])
                )
    holders: dict[tuple[int, TensorSlice], list[int]] = {}
    for rank, shards in enumerate(manifest.shards):
        for shard in shards:
            holders.setdefault((shard.parameter, shard.box), []).append(rank)
    settings = manifest.optimizer
    states = Optimizer(settings["name"], momentum=settings["momentum"]).states
    states += manifest.training.ema_decay is not None
    sizes = [
        each.value.dtype.itemsize * (1 + states * each.trainable) for each in manifest.parameters
    ]
    blocks = [
        (parameter, box, ranks, box.elements * sizes[parameter])
        for (parameter, box), ranks in holders.items()
        if not (manifest.optimizer["shard"] and is_reduced(manifest, parameter, ranks))
    ]
    piece_bytes = max(
        _LEAST_BYTES, sum(size for *_, size in blocks) // (manifest.world_size * _PIECES)
    )
    shared_pieces = []
    for parameter, box, ranks, size in blocks:
        parts = list(_parts(box, min(len(ranks), size // piece_bytes)))
        shared_pieces += [(numbered(parameter, part), ranks, size // len(parts)) for part in parts]
    load = [0] * manifest.world_size
    for piece, ranks, size in sorted(shared_pieces, key=lambda each: -each[2]):
        rank = min(ranks, key=load.__getitem__)
        load[rank] += size
        found[rank].append(piece)
    return tuple(
        tuple(sorted(each, key=lambda piece: (piece.parameter, piece.number))) for each in found
    )


def _parts(box: TensorSlice, count: int) -> Iterator[TensorSlice]:
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
        yield TensorSlice(starts, (*box.stops[:axis], stop, *box.stops[axis + 1 :]))


def boxes_of(run: ElementRange, block: TensorSlice) -> Iterator[TensorSlice]:
    """A run of a parameter's block as boxes of the whole parameter, in order."""
    return (box.moved(full_slice(block.shape), block) for box in run.boxes(block.shape))


COUNTERS = frozenset(
    {"step"}
)  # Names of the state that torch's optimizers keep once a tensor, not for each element.


@dataclass(frozen=True, slots=True, eq=False)
class SavedBlock:
    """A block that a rank writes: of a parameter, or of what the optimizer keeps of it under the
    name `state`.
    """

    key: str
    piece: WriteBlock
    state: str
    tensor: torch.Tensor


class TrainingState:
    """A rank's training state; the optimizer is over its parameters, those of `shards` excepted,
    and over `shards`.
    """

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        parameters: Mapping[int, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        shards: Sequence[OptimizerShard] = (),
        loss_scaler: LossScaler | None = None,
    ) -> None:
        self.loss_scaler = loss_scaler
        self.device = device
        self._manifest = manifest
        self._boxes = {shard.parameter: shard.box for shard in manifest.shards[rank]}
        self._parameters = parameters
        self._optimizer = optimizer
        self._updated_in_shards = {
            run.parameter: (shard, run) for shard in shards for run in shard.runs
        }
        self._optimizer_shards = {id(shard.tensor): shard for shard in shards}

    def blocks(self, pieces: Sequence[WriteBlock]) -> Iterator[SavedBlock]:
        """Blocks to write, as views. Of a parameter that is updated in shards a piece must be one
        of its runs.
        """
        for piece in pieces:
            index = piece.parameter
            own = self._boxes[piece.parameter]
            box = piece.box.within(own)
            key = f"p{index}.{piece.number}"
            yield SavedBlock(key, piece, "", self._parameters[index].detach()[box.slices])
            for name, tensor in self._kept(index).items():
                if name in COUNTERS:
                    continue
                if index in self._updated_in_shards:
                    _, run = self._updated_in_shards[index]
                    first = sum(
                        start * math.prod(own.shape[axis + 1 :])
                        for axis, start in enumerate(box.starts)
                    )
                    at = run.at + first - run.start
                    yield SavedBlock(
                        f"{key}.{name}", piece, name, tensor[at : at + box.elements].view(box.shape)
                    )
                else:
                    yield SavedBlock(f"{key}.{name}", piece, name, tensor[box.slices])

    def counters(self, parameters: Iterable[int]) -> dict[int, tuple[tuple[str, float], ...]]:
        """Numbers that the optimizer keeps once a tensor, by parameter; read from a GPU in one
        copy.
        """
        kept = {parameter: self._kept(parameter) for parameter in parameters}
        found = [
            value.reshape(1)
            for each in kept.values()
            for name, value in each.items()
            if name in COUNTERS
        ]
        values = iter(torch.cat(found).tolist() if found else ())
        return {
            parameter: tuple((name, next(values)) for name in each if name in COUNTERS)
            for parameter, each in kept.items()
        }

    def _kept(self, parameter: int) -> dict[str, torch.Tensor]:
        """State tensors of a parameter by torch's names, or of the shard that it is updated in."""
        found = self._updated_in_shards.get(parameter)
        tensor = self._parameters[parameter] if found is None else found[0].tensor
        state = {} if self._optimizer is None else self._optimizer.state.get(tensor, {})
        return {
            name: value for name, value in sorted(state.items()) if isinstance(value, torch.Tensor)
        }

    def generators(self) -> dict[str, torch.Tensor]:
        found = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            found["cuda"] = torch.cuda.get_rng_state(self.device)
        return found

    def restore(self, reader: Reader, saved: Mapping[str, StoredParameter]) -> None:
        """Put this rank's blocks in place, of parameters that are all there, by name. They may have
        been saved under another plan.
        """
        for index, parameter in self._parameters.items():
            with torch.no_grad():
                parameter.copy_(_read(reader, self._stored(saved, index).value, self._boxes[index]))
        if self._optimizer is None:
            return
        indices = {id(parameter): index for index, parameter in self._parameters.items()}
        form = self._optimizer.state_dict()
        form["state"] = {}
        updated = [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
        for position, tensor in enumerate(updated):
            shard = self._optimizer_shards.get(id(tensor))
            if shard is not None:
                state = self._restored_shard(reader, saved, shard)
            else:
                index = indices[id(tensor)]
                stored = self._stored(saved, index)
                state = {
                    name: _read(reader, each, self._boxes[index])
                    for name, each in self._restored(stored)
                }
                state |= _scalars([stored])
            if state:
                form["state"][position] = state
        self._optimizer.load_state_dict(form)

    def _stored(self, saved: Mapping[str, StoredParameter], parameter: int) -> StoredParameter:
        return saved[self._manifest.parameters[parameter].value.name]

    def _restored(self, stored: StoredParameter) -> Iterator[tuple[str, StoredTensor]]:
        """State of a parameter that the program keeps: an average of weights only where it makes
        one.
        """
        averages = self._manifest.training.ema_decay is not None
        return (pair for pair in stored.state if averages or pair[0] != AVERAGE)

    def _restored_shard(
        self, reader: Reader, saved: Mapping[str, StoredParameter], shard: OptimizerShard
    ) -> dict[str, torch.Tensor]:
        """State of the runs of a shard's parameters; zeros where one has none, as before the first
        update.
        """
        found: dict[str, torch.Tensor] = {}
        for run in shard.runs:
            for name, tensor in self._restored(self._stored(saved, run.parameter)):
                row = found.setdefault(name, torch.zeros_like(shard.tensor))
                at = run.at
                for box in boxes_of(run, self._boxes[run.parameter]):
                    row[at : at + box.elements] = _read(reader, tensor, box).reshape(-1)
                    at += box.elements
        return found | _scalars(self._stored(saved, run.parameter) for run in shard.runs)

    def restore_generators(self, states: Mapping[str, torch.Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if self.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.device)


def _scalars(stored: Iterable[StoredParameter]) -> dict[str, torch.Tensor]:
    """The largest of each."""
    found: dict[str, float] = {}
    for name, value in (scalar for each in stored for scalar in each.scalars):
        found[name] = max(value, found.get(name, value))
    return {name: torch.tensor(value) for name, value in found.items()}


def _read(reader: Reader, tensor: StoredTensor, box: TensorSlice) -> torch.Tensor:
    return tensor_of(reader.read(tensor, box), tensor.dtype)
