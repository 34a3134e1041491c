"""A rank's part of a checkpoint as it is taken: copies on the host, and the manifest of what they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from autopipe.backends.torch.checkpoint.form import (
    Block,
    Checkpoint,
    StoredFile,
    StoredGenerator,
    StoredParameter,
    StoredTensor,
)
from autopipe.backends.torch.runtime.checkpointing.host_copies import HostCopies, dtype_name
from autopipe.backends.torch.runtime.checkpointing.ownership import WriteBlock
from autopipe.backends.torch.runtime.checkpointing.training_state import SavedBlock, TrainingState
from autopipe.backends.torch.runtime.data import Position
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.layout import Box


def take_snapshot(
    manifest: Manifest,
    rank: int,
    state: TrainingState,
    pieces: Sequence[WriteBlock],
    position: Position,
    seed: int,
    copies: HostCopies,
) -> Checkpoint:
    """Start to copy what the rank writes into `copies`. Returns its manifest, which lacks file and offsets."""
    blocks = list(state.blocks(pieces))
    generators = {f"random.{device}": (device, tensor) for device, tensor in state.generators().items()}
    copies.take(
        {block.key: block.tensor for block in blocks} | {key: tensor for key, (_, tensor) in generators.items()}
    )
    return Checkpoint(
        model=str(manifest.model),
        model_digest=manifest.model_digest,
        plan=manifest.plan,
        world_size=manifest.world_size,
        step=position.steps,
        samples=position.samples,
        seed=seed,
        optimizer=manifest.optimizer,
        files=(),
        parameters=tuple(_parameters(manifest, state, blocks)),
        random=tuple(
            StoredGenerator(rank, device, _stored(key, tensor, tuple(tensor.shape), Box((0,), tuple(tensor.shape))))
            for key, (device, tensor) in generators.items()
        ),
    )


def _parameters(manifest: Manifest, state: TrainingState, blocks: Sequence[SavedBlock]) -> Iterable[StoredParameter]:
    """The parameters of which there are blocks."""
    by_parameter: dict[int, dict[str, list[SavedBlock]]] = {}
    for block in blocks:
        by_parameter.setdefault(block.piece.parameter, {}).setdefault(block.state, []).append(block)
    for index, found in by_parameter.items():
        entry = manifest.parameters[index]
        tensors = {name: _joined(own, entry.shape) for name, own in found.items()}
        value = tensors.pop("")
        yield StoredParameter(entry.name, entry.trainable, value, tuple(tensors.items()), state.counters(index))


def _joined(blocks: Sequence[SavedBlock], shape: tuple[int, ...]) -> StoredTensor:
    parts = [_stored(block.key, block.tensor, shape, block.piece.box) for block in blocks]
    return replace(parts[0], blocks=tuple(block for part in parts for block in part.blocks))


def _stored(key: str, tensor: torch.Tensor, shape: tuple[int, ...], box: Box) -> StoredTensor:
    return StoredTensor(dtype_name(tensor), shape, (Block(box, 0, 0, key),))


def located(part: Checkpoint, file: StoredFile, offsets: Mapping[str, int]) -> Checkpoint:
    """The manifest, now that the file is written."""

    def found(tensor: StoredTensor) -> StoredTensor:
        return replace(tensor, blocks=tuple(replace(block, offset=offsets[block.key]) for block in tensor.blocks))

    return replace(
        part,
        files=(file,),
        parameters=tuple(
            replace(each, value=found(each.value), state=tuple((name, found(own)) for name, own in each.state))
            for each in part.parameters
        ),
        random=tuple(replace(each, state=found(each.state)) for each in part.random),
    )
