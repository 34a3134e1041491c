"""Outputs of inference, brought together on rank 0 and written to an `.npz` file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from autopipe.backends.torch.runtime.manifest import Manifest, OutputEntry, OutputPlace, OutputShard
from autopipe.backends.torch.runtime.parameters import torch_dtype
from autopipe.backends.torch.runtime.transport import Transport

_TAG = 1 << 20
"""Above every channel's tag."""


class OutputCollector:
    """Keeps this rank's blocks of the graph's outputs, micro-batch by micro-batch, and joins them in the end."""

    def __init__(self, manifest: Manifest, transport: Transport, path: Path | None) -> None:
        self._manifest = manifest
        self._transport = transport
        self._path = path
        self._kept: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        """By output and stage, the results by micro-batch, counted over all steps."""

    def keep(self, stage: int, micro_batch: int, rank: int, results: tuple[torch.Tensor, ...]) -> None:
        """Keep what a forward gave, if anyone asked for outputs; micro-batches are counted over all steps."""
        if self._path is None:
            return
        for index, entry in enumerate(self._manifest.outputs):
            for place in entry.places:
                if place.stage == stage and any(shard.rank == rank for shard in _needed(place)):
                    result = results[place.position].detach().cpu().contiguous()
                    self._kept.setdefault((index, stage), {})[micro_batch] = result

    def finish(self, samples: int) -> None:
        """Send the blocks to rank 0, which writes the file, whole or not at all: the results of the first `samples`,
        without those of what filled the last batch up."""
        if self._path is None or self._manifest.train:
            return
        found = {}
        for index, entry in enumerate(self._manifest.outputs):
            parts = [
                (place, shard, self._fetch(index, entry, place, shard))
                for place in entry.places
                for shard in (_needed(place) if self._manifest.micro_batches_of(place.stage) else ())
            ]
            if self._transport.rank == 0:
                whole = self._whole(entry, [(place, shard, part) for place, shard, part in parts if part is not None])
                found[f"output_{index}"] = _joined(whole, entry.batch_axis, self._share(entry, samples))
        if self._transport.rank == 0:
            names = np.array([entry.name for entry in self._manifest.outputs])
            self._path.parent.mkdir(parents=True, exist_ok=True)
            made = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            try:
                with made.open("wb") as file:
                    np.savez(file, names=names, **found)  # type: ignore[arg-type]
                os.replace(made, self._path)
            finally:
                made.unlink(missing_ok=True)

    def _share(self, entry: OutputEntry, samples: int) -> int:
        """Rows of an output, or values without samples, of `samples` samples out of all micro-batches."""
        stage = entry.places[0].stage
        size = self._manifest.batch_size // self._manifest.micro_batches_at(stage)
        if entry.batch_axis is None:
            return -(-samples // size)
        return entry.shape[entry.batch_axis] * samples // size

    def _fetch(self, index: int, entry: OutputEntry, place: OutputPlace, shard: OutputShard) -> torch.Tensor | None:
        """A rank's blocks of all micro-batches that a place had, stacked, on rank 0; None elsewhere."""
        own = self._transport.rank
        stacked = None
        if shard.rank == own:
            stacked = torch.stack([block for _, block in sorted(self._kept[index, place.stage].items())])
        if shard.rank == 0:
            return stacked
        tag = _TAG + index
        if stacked is not None:
            count = torch.tensor([len(stacked)])
            with self._transport.heartbeat.waiting():
                dist.send(count, 0, tag=tag)
                dist.send(stacked, 0, tag=tag)
        elif own == 0:
            count = torch.empty(1, dtype=torch.int64)
            with self._transport.heartbeat.waiting():
                dist.recv(count, shard.rank, tag=tag)
            shape = tuple(stop - start for start, stop in zip(shard.starts, shard.stops, strict=True))
            stacked = torch.empty((int(count), *shape), dtype=torch_dtype(entry.dtype))
            with self._transport.heartbeat.waiting():
                dist.recv(stacked, shard.rank, tag=tag)
            return stacked
        return None

    def _whole(self, entry: OutputEntry, parts: list[tuple[OutputPlace, OutputShard, torch.Tensor]]) -> torch.Tensor:
        """The output of every micro-batch, of the stage that gives it, of every step, one after the other."""
        place, _, part = parts[0]
        steps = len(part) // len(self._manifest.micro_batches_of(place.stage))
        whole = torch.zeros((steps, self._manifest.micro_batches_at(place.stage), *entry.shape), dtype=part.dtype)
        for place, shard, part in parts:
            own = self._manifest.micro_batches_of(place.stage)
            region = (slice(start, stop) for start, stop in zip(shard.starts, shard.stops, strict=True))
            block = whole[(slice(None), slice(own.start, None, own.step), *region)]
            found = part.reshape(block.shape)
            if place.combine == "concat":
                block.copy_(found)
            else:
                block.add_(found / place.copies)
        return whole.flatten(0, 1)


def _needed(place: OutputPlace) -> tuple[OutputShard, ...]:
    """One holder for each block; all of them where each holds a share of a sum."""
    if place.combine != "concat":
        return place.shards
    return tuple({(shard.starts, shard.stops): shard for shard in reversed(place.shards)}.values())


def _joined(whole: torch.Tensor, batch_axis: int | None, length: int) -> np.ndarray:
    """Micro-batches as users get them: the first `length` rows of all, samples one after the other; values without
    samples stacked in front."""
    joined = whole if batch_axis is None else torch.cat(list(whole), dim=batch_axis)
    joined = joined.narrow(batch_axis or 0, 0, length)
    return joined.float().numpy() if joined.dtype is torch.bfloat16 else joined.numpy()
