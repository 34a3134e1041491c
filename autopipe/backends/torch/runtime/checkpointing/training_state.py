"""What changes as a rank trains: its blocks of parameters, what the optimizer keeps of them, and random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autopipe.backends.torch.checkpoint.form import StoredParameter, StoredTensor
from autopipe.backends.torch.checkpoint.reading import Reader
from autopipe.backends.torch.runtime.checkpointing.ownership import Piece
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.layout import Box

COUNTERS = frozenset({"step"})
"""What torch's optimizers keep once a parameter, not of each element."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedBlock:
    """A block that a rank writes: of a parameter, or of what the optimizer keeps of it under the name `state`."""

    key: str
    piece: Piece
    state: str
    tensor: torch.Tensor


class TrainingState:
    """A rank's training state."""

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        parameters: Mapping[int, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
    ) -> None:
        self._manifest = manifest
        self._boxes = {shard.parameter: Box(shard.starts, shard.stops) for shard in manifest.shards[rank]}
        self._parameters = parameters
        self._optimizer = optimizer
        self._device = device

    def blocks(self, pieces: Sequence[Piece]) -> Iterator[SavedBlock]:
        """What is to be written of these pieces, as views."""
        for piece in pieces:
            parameter = self._parameters[piece.parameter]
            box = piece.box.within(self._boxes[piece.parameter])
            region = tuple(slice(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))
            key = f"p{piece.parameter}.{piece.number}"
            yield SavedBlock(key, piece, "", parameter.detach()[region])
            for name, tensor in self._kept(parameter).items():
                if name not in COUNTERS:
                    yield SavedBlock(f"{key}.{name}", piece, name, tensor[region])

    def counters(self, parameter: int) -> tuple[tuple[str, float], ...]:
        """What the optimizer keeps once of a parameter."""
        kept = self._kept(self._parameters[parameter])
        return tuple((name, float(value)) for name, value in kept.items() if name in COUNTERS)

    def _kept(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the optimizer keeps of a parameter."""
        state = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
        return {name: value for name, value in sorted(state.items()) if isinstance(value, torch.Tensor)}

    def generators(self) -> dict[str, torch.Tensor]:
        """The states of torch's generators of random numbers, by device."""
        found = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            found["cuda"] = torch.cuda.get_rng_state(self._device)
        return found

    def restore(self, reader: Reader, saved: Mapping[str, StoredParameter]) -> None:
        """Put this rank's blocks in place, of parameters that are all there, by name."""
        for index, parameter in self._parameters.items():
            stored = saved[self._manifest.parameters[index].name]
            with torch.no_grad():
                parameter.copy_(self._read(reader, stored.value, index))
        if self._optimizer is not None:
            self._restore_optimizer(self._optimizer, reader, saved)

    def _read(self, reader: Reader, tensor: StoredTensor, index: int) -> torch.Tensor:
        return tensor_of(reader.read(tensor, self._boxes[index]), tensor.dtype)

    def _restore_optimizer(
        self, optimizer: torch.optim.Optimizer, reader: Reader, saved: Mapping[str, StoredParameter]
    ) -> None:
        indices = {id(parameter): index for index, parameter in self._parameters.items()}
        form = optimizer.state_dict()
        form["state"] = {}
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for position, parameter in enumerate(trained):
            index = indices[id(parameter)]
            stored = saved[self._manifest.parameters[index].name]
            state = {name: self._read(reader, tensor, index) for name, tensor in stored.state}
            state |= {name: torch.tensor(value) for name, value in stored.scalars}
            if state:
                form["state"][position] = state
        optimizer.load_state_dict(form)

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
