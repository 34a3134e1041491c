"""Training state of a rank: its blocks of parameters, the optimizer's state, and random generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autopipe.backends.torch.checkpoint.form import StoredParameter, StoredTensor
from autopipe.backends.torch.checkpoint.reading import Reader
from autopipe.backends.torch.runtime.checkpointing.optimizer_state import OptimizerState
from autopipe.backends.torch.runtime.checkpointing.ownership import WriteBlock
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.layout import Box


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
