"""Optimizer state of a rank's parameters, by parameter and block, for optimizers that update parameters or shards of
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from autopipe.backends.torch.checkpoint.form import StoredParameter, StoredTensor
from autopipe.backends.torch.runtime.manifest import Manifest, ShardEntry
from autopipe.backends.torch.runtime.shares import OptimizerShard
from autopipe.ir.layout import Box
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
