"""The training state of a rank: its shards of parameters, the optimizer's state, and random
generators. Also the decision which rank writes which part of each parameter to a checkpoint.

A block is a slice of a parameter. Each element of a parameter is written once, by one of the ranks
that hold it. The number of bytes is balanced over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from autopipe.backends.torch.checkpoint import (
    AVERAGE_STATE,
    CheckpointReader,
    StoredParameter,
    StoredTensor,
)
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.state.parameters import tensor_from_array
from autopipe.backends.torch.runtime.step.gradients import (
    OptimizerShard,
    buckets_of_rank,
    is_reduced,
)
from autopipe.backends.torch.runtime.step.precision import LossScaler
from autopipe.ir.layout import TensorSlice, full_slice
from autopipe.ir.problem import Optimizer
from autopipe.ir.program import ElementRange

_MIN_BLOCK_BYTES = 2**20  # Minimum bytes of a part into which a block is split.
_MAX_BLOCKS_PER_SHARD = 16
"""Approximate maximum number of blocks per rank into which parameters are split, if all ranks hold
all parameters. More blocks would enlarge the manifest of the checkpoint.
"""


@dataclass(frozen=True, slots=True)
class CheckpointBlock:
    """The slice `box` of a parameter, which one rank writes to a checkpoint. `number` distinguishes
    the blocks of the parameter.
    """

    parameter: int
    number: int
    box: TensorSlice


def assign_blocks_to_ranks(manifest: Manifest) -> tuple[tuple[CheckpointBlock, ...], ...]:
    """Return, for each rank, the blocks that it writes to a checkpoint. The result is equal on all
    ranks, because it depends on the manifest only.

    Slices of a parameter that ranks hold are equal or disjoint (`autopipe.passes.lower.shard`), so
    no element is written twice. With ZeRO-1, a rank writes the parts of reduced parameters that its
    optimizer updates. Other slices are split along their longest dimension, into at most one part
    per rank that holds the slice. The parts are assigned greedily: in the order of decreasing
    bytes, each to the rank among its holders that has the fewest bytes so far.
    """
    numbers = [0] * len(manifest.parameters)
    found: list[list[CheckpointBlock]] = [[] for _ in range(manifest.world_size)]

    def next_block(parameter: int, box: TensorSlice) -> CheckpointBlock:
        """Return a block of a parameter with the next unused number."""
        numbers[parameter] += 1
        return CheckpointBlock(parameter, numbers[parameter] - 1, box)

    if manifest.optimizer["shard"]:
        for rank, pieces in enumerate(found):
            own = {shard.parameter: shard.box for shard in manifest.shards[rank]}
            for run in (
                run
                for bucket in buckets_of_rank(manifest, rank)
                for run in bucket.element_ranges(rank)
            ):
                pieces.extend(
                    next_block(run.parameter, box)
                    for box in slices_of_range(run, own[run.parameter])
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
        _MIN_BLOCK_BYTES,
        sum(size for *_, size in blocks) // (manifest.world_size * _MAX_BLOCKS_PER_SHARD),
    )
    shared_pieces = []
    for parameter, box, ranks, size in blocks:
        parts = list(_split_slice(box, min(len(ranks), size // piece_bytes)))
        shared_pieces += [
            (next_block(parameter, part), ranks, size // len(parts)) for part in parts
        ]
    load = [0] * manifest.world_size
    for piece, ranks, size in sorted(shared_pieces, key=lambda each: -each[2]):
        rank = min(ranks, key=load.__getitem__)
        load[rank] += size
        found[rank].append(piece)
    return tuple(
        tuple(sorted(each, key=lambda piece: (piece.parameter, piece.number))) for each in found
    )


def _split_slice(box: TensorSlice, count: int) -> Iterator[TensorSlice]:
    """Yield `count` parts of a slice, split evenly along its longest dimension. There are fewer
    parts if the dimension is shorter.
    """
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


def slices_of_range(run: ElementRange, block: TensorSlice) -> Iterator[TensorSlice]:
    """Yield slices of a parameter, in row-major order, that together consist of the contiguous
    element range `run` of `block`. `block` is this rank's slice of the parameter. The result is in
    coordinates of the full parameter.
    """
    return (box.moved_between(full_slice(block.shape), block) for box in run.boxes(block.shape))


# Names of optimizer states that torch stores as one scalar per parameter.
COUNTER_STATES = frozenset({"step"})


@dataclass(frozen=True, slots=True, eq=False)
class SavedBlock:
    """A part of a tensor that a rank writes to a checkpoint: the block `piece` of a parameter's
    value if `state` is "", otherwise of the parameter's optimizer state of this name. `key` is the
    name of the part in the rank's file.
    """

    key: str
    piece: CheckpointBlock
    state: str
    tensor: torch.Tensor


class TrainingState:
    """The training state of a rank. With ZeRO-1, the optimizer updates the tensors of `shards`
    instead of the parameters that they contain.
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

    def blocks(self, pieces: Sequence[CheckpointBlock]) -> Iterator[SavedBlock]:
        """Yield the parameters and optimizer states in `pieces`, as views. With ZeRO-1, each piece
        of a reduced parameter must be in the range that this rank's optimizer updates.
        """
        for piece in pieces:
            index = piece.parameter
            own = self._boxes[piece.parameter]
            box = piece.box.relative_to(own)
            key = f"p{index}.{piece.number}"
            yield SavedBlock(key, piece, "", self._parameters[index].detach()[box.slices])
            for name, tensor in self._state_tensors(index).items():
                if name in COUNTER_STATES:
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
        """Return the scalar optimizer states of parameters, for example the step count, as (name,
        value) pairs by parameter index. All values are copied from the device at once.
        """
        kept = {parameter: self._state_tensors(parameter) for parameter in parameters}
        found = [
            value.reshape(1)
            for each in kept.values()
            for name, value in each.items()
            if name in COUNTER_STATES
        ]
        values = iter(torch.cat(found).tolist() if found else ())
        return {
            parameter: tuple((name, next(values)) for name in each if name in COUNTER_STATES)
            for parameter, each in kept.items()
        }

    def _state_tensors(self, parameter: int) -> dict[str, torch.Tensor]:
        """Return the optimizer's state tensors of a parameter, by torch's names. If a tensor of
        `shards` contains the parameter, return the state of that tensor.
        """
        found = self._updated_in_shards.get(parameter)
        tensor = self._parameters[parameter] if found is None else found[0].tensor
        state = {} if self._optimizer is None else self._optimizer.state.get(tensor, {})
        return {
            name: value for name, value in sorted(state.items()) if isinstance(value, torch.Tensor)
        }

    def generators(self) -> dict[str, torch.Tensor]:
        """Return the states of torch's random generators by device type."""
        found = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            found["cuda"] = torch.cuda.get_rng_state(self.device)
        return found

    def restore(self, reader: CheckpointReader, saved: Mapping[str, StoredParameter]) -> None:
        """Copy this rank's shards of parameters and optimizer states from a checkpoint, which may
        have been written under another plan. `saved` must contain all parameters, by name.
        """
        for index, parameter in self._parameters.items():
            with torch.no_grad():
                parameter.copy_(
                    _read_tensor(
                        reader, self._stored_parameter(saved, index).value, self._boxes[index]
                    )
                )
        if self._optimizer is None:
            return
        indices = {id(parameter): index for index, parameter in self._parameters.items()}
        form = self._optimizer.state_dict()
        form["state"] = {}
        updated = [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
        for position, tensor in enumerate(updated):
            shard = self._optimizer_shards.get(id(tensor))
            if shard is not None:
                state = self._restore_shard(reader, saved, shard)
            else:
                index = indices[id(tensor)]
                stored = self._stored_parameter(saved, index)
                state = {
                    name: _read_tensor(reader, each, self._boxes[index])
                    for name, each in self._restored_tensors(stored)
                }
                state |= _merge_scalars([stored])
            if state:
                form["state"][position] = state
        self._optimizer.load_state_dict(form)

    def _stored_parameter(
        self, saved: Mapping[str, StoredParameter], parameter: int
    ) -> StoredParameter:
        """Return the entry of the parameter with index `parameter` in `saved`, the parameters of a
        checkpoint by name.
        """
        return saved[self._manifest.parameters[parameter].value.name]

    def _restored_tensors(self, stored: StoredParameter) -> Iterator[tuple[str, StoredTensor]]:
        """Yield (name, tensor) for the optimizer states of a parameter. The average of weights is
        omitted if the program does not average weights.
        """
        averages = self._manifest.training.ema_decay is not None
        return (pair for pair in stored.state if averages or pair[0] != AVERAGE_STATE)

    def _restore_shard(
        self, reader: CheckpointReader, saved: Mapping[str, StoredParameter], shard: OptimizerShard
    ) -> dict[str, torch.Tensor]:
        """Return the optimizer state of the tensor of `shard`, by name, assembled from the states
        of the parameters in it. Elements of parameters that have no saved state are 0.
        """
        found: dict[str, torch.Tensor] = {}
        for run in shard.runs:
            for name, tensor in self._restored_tensors(
                self._stored_parameter(saved, run.parameter)
            ):
                row = found.setdefault(name, torch.zeros_like(shard.tensor))
                at = run.at
                for box in slices_of_range(run, self._boxes[run.parameter]):
                    row[at : at + box.elements] = _read_tensor(reader, tensor, box).reshape(-1)
                    at += box.elements
        return found | _merge_scalars(
            self._stored_parameter(saved, run.parameter) for run in shard.runs
        )

    def restore_generators(self, states: Mapping[str, torch.Tensor]) -> None:
        """Set the states of torch's random generators, by device type."""
        torch.set_rng_state(states["cpu"])
        if self.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.device)


def _merge_scalars(stored: Iterable[StoredParameter]) -> dict[str, torch.Tensor]:
    """Return, by name, the scalar optimizer states of several parameters that one tensor contains:
    the maximum over the parameters, as tensors.
    """
    found: dict[str, float] = {}
    for name, value in (scalar for each in stored for scalar in each.scalars):
        found[name] = max(value, found.get(name, value))
    return {name: torch.tensor(value) for name, value in found.items()}


def _read_tensor(reader: CheckpointReader, tensor: StoredTensor, box: TensorSlice) -> torch.Tensor:
    """Return the slice `box` of a tensor in a checkpoint."""
    return tensor_from_array(reader.read(tensor, box), tensor.dtype)
