"""Outputs of inference, brought together on rank 0 and written to an `.npz` file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from autopipe.backends.torch.runtime.manifest import Manifest, OutputEntry, OutputShard
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
        self._kept: dict[int, dict[int, torch.Tensor]] = {}

    def keep(self, stage: int, micro_batch: int, rank: int, results: tuple[torch.Tensor, ...]) -> None:
        """Keep what a forward gave, if anyone asked for outputs."""
        if self._path is None:
            return
        for index, entry in enumerate(self._manifest.outputs):
            if entry.stage == stage and any(shard.rank == rank for shard in _needed(entry)):
                self._kept.setdefault(index, {})[micro_batch] = results[entry.position].detach().cpu().contiguous()

    def finish(self) -> None:
        """Send the blocks to rank 0, which writes the file, whole or not at all."""
        if self._path is None or self._manifest.train:
            return
        found = {}
        for index, entry in enumerate(self._manifest.outputs):
            parts = [(shard, self._fetch(index, entry, shard)) for shard in _needed(entry)]
            if self._transport.rank == 0:
                found[f"output_{index}"] = _joined(entry, [(shard, part) for shard, part in parts if part is not None])
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

    def _fetch(self, index: int, entry: OutputEntry, shard: OutputShard) -> torch.Tensor | None:
        """A rank's blocks of all micro-batches, stacked, on rank 0; None elsewhere."""
        own = self._transport.rank
        stacked = torch.stack([each for _, each in sorted(self._kept[index].items())]) if shard.rank == own else None
        if shard.rank == 0:
            return stacked
        tag = _TAG + index
        if stacked is not None:
            count = torch.tensor([len(stacked)])
            dist.send(count, 0, tag=tag)
            dist.send(stacked, 0, tag=tag)
        elif own == 0:
            count = torch.empty(1, dtype=torch.int64)
            dist.recv(count, shard.rank, tag=tag)
            shape = tuple(stop - start for start, stop in zip(shard.starts, shard.stops, strict=True))
            stacked = torch.empty((int(count), *shape), dtype=torch_dtype(entry.dtype))
            dist.recv(stacked, shard.rank, tag=tag)
            return stacked
        return None


def _needed(entry: OutputEntry) -> tuple[OutputShard, ...]:
    """One holder for each block; all of them where each holds a share of a sum or mean."""
    if entry.combine != "concat":
        return entry.shards
    return tuple({(shard.starts, shard.stops): shard for shard in reversed(entry.shards)}.values())


def _joined(entry: OutputEntry, parts: list[tuple[OutputShard, torch.Tensor]]) -> np.ndarray:
    """The output over all micro-batches: samples one after the other; values without samples stacked in front."""
    count = len(parts[0][1])
    whole = torch.zeros((count, *entry.shape), dtype=parts[0][1].dtype)
    for shard, part in parts:
        region = tuple(slice(start, stop) for start, stop in zip(shard.starts, shard.stops, strict=True))
        if entry.combine == "concat":
            whole[(slice(None), *region)] = part
        else:
            whole[(slice(None), *region)] += part / (len(parts) if entry.combine == "mean" else 1)
    if entry.batch_axis is None:
        return whole.float().numpy() if whole.dtype is torch.bfloat16 else whole.numpy()
    joined = torch.cat(list(whole), dim=entry.batch_axis)
    return joined.float().numpy() if joined.dtype is torch.bfloat16 else joined.numpy()
