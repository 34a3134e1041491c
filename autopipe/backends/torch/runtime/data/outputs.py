"""Outputs of inference: rank 0 gathers each step's while the next one runs, and appends them to
files that become one `.npz` or `.npy` in the end, so that no rank holds more than two steps of
them.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.distributed as dist

from autopipe.backends.torch.runtime.communication.transport import Transport
from autopipe.backends.torch.runtime.manifest import Manifest, partial_folder, remove_partial
from autopipe.backends.torch.runtime.state.parameters import torch_dtype
from autopipe.ir.layout import TensorSlice
from autopipe.ir.output_files import followed, naming, put_in_place
from autopipe.ir.program import Output, OutputPlace, OutputShard

_TAG = 1 << 20  # Above every channel's tag.
_HEADER = 256
"""Bytes of a `.npy` file before its numbers: room for any shape, which is known in the end."""
_PIECE = 1 << 24  # Bytes moved at a time where rows do not lie in front.


class RowFile:
    """A `.npy` file to which rows are appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] = path.open("wb")
        self._file.write(bytes(_HEADER))
        self._rows = 0
        self._shape: tuple[int, ...] = ()
        self._dtype = np.dtype(np.float32)

    def append(self, rows: np.ndarray) -> None:
        self._rows += len(rows)
        self._shape = rows.shape[1:]
        self._dtype = rows.dtype
        with naming(self.path):
            self._file.write(np.ascontiguousarray(rows).data)

    def finish(self, axis: int = 0) -> None:
        """Write the header; the rows come to lie along `axis`."""
        shape = self._rows, *self._shape
        with naming(self.path):
            self._file.seek(0)
            self._file.write(_header(shape, self._dtype))
            self._file.close()
        if not axis:
            return
        rows = np.moveaxis(np.load(self.path, mmap_mode="r", allow_pickle=False), 0, axis)
        moved = self.path.with_suffix(".moved")
        target = np.lib.format.open_memmap(moved, "w+", self._dtype, rows.shape)
        count = max(1, _PIECE * len(rows) // max(1, rows.nbytes))
        for start in range(0, len(rows), count):
            target[start : start + count] = rows[start : start + count]
        target.flush()
        os.replace(moved, self.path)


def _header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """Of format 1.0, row-major
    (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html).
    """
    described = repr(
        {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    magic = b"\x93NUMPY\x01\x00"
    length = _HEADER - 10
    return (
        magic + length.to_bytes(2, "little") + described.encode("latin1").ljust(length - 1) + b"\n"
    )


class OutputCollector:
    """This rank's part in gathering the outputs. Blocks are sent to rank 0 when a step ends; rank 0
    takes those of the step before, which are there by then.
    """

    def __init__(self, manifest: Manifest, transport: Transport, path: Path | None) -> None:
        self._manifest = manifest
        self._transport = transport
        self._path = None if manifest.train or path is None else followed(path)
        self._kept: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        """By output and stage, the results of the step by micro-batch."""
        self._sends: list[tuple[dist.Work | None, torch.Tensor]] = []
        self._waiting: tuple[dict[tuple[int, int], torch.Tensor], int] | None = None
        """On rank 0 its own blocks of the step before, by output and stage, and that step's
        samples.
        """
        self._files: list[RowFile] = []
        if self._path is not None and transport.rank == 0:
            folder = partial_folder(self._path)
            remove_partial(self._path)
            folder.mkdir()
            self._files = [
                RowFile(folder / f"{index}.npy") for index in range(len(manifest.outputs))
            ]

    def keep(self, stage: int, micro_batch: int, results: tuple[torch.Tensor, ...]) -> None:
        """Keep what a forward gave, if outputs are to be written; micro-batches are counted over
        all steps.
        """
        if self._path is None:
            return
        for index, output in enumerate(self._manifest.outputs):
            for place in output.places:
                if place.stage == stage and any(
                    shard.rank == self._transport.rank for shard in needed_shards(place)
                ):
                    result = results[place.position].detach().cpu().contiguous()
                    self._kept.setdefault((index, stage), {})[micro_batch] = result

    def end_step(self, samples: int) -> None:
        """Send off the outputs of a step, of which the first `samples` are data."""
        if self._path is None:
            return
        stacked = {
            key: torch.stack([part for _, part in sorted(parts.items())])
            for key, parts in self._kept.items()
        }
        self._kept.clear()
        if self._transport.rank == 0:
            self._write()
            self._waiting = stacked, samples
            return
        self._wait_until_sent()
        for index, place, shard in self._blocks():
            if shard.rank == self._transport.rank:
                block = stacked[index, place.stage]
                self._sends.append((dist.isend(block, 0, tag=_TAG + index), block))

    def finish(self) -> None:
        """Put the file in its place, when all steps have ended."""
        if self._path is None:
            return
        self._wait_until_sent()
        if self._transport.rank != 0:
            return
        self._write()
        for file, output in zip(self._files, self._manifest.outputs, strict=True):
            file.finish(output.batch_axis or 0)
        whole = self._files[0].path
        if self._path.suffix != ".npy":
            whole = whole.with_name("whole.npz")
            with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                for file, key in zip(self._files, self._manifest.output_keys, strict=True):
                    archive.write(file.path, f"{key}.npy")
                    file.path.unlink()
        put_in_place(whole, self._path)
        remove_partial(self._path)

    def _wait_until_sent(self) -> None:
        with self._transport.heartbeat.waiting():
            for work, _ in self._sends:
                if work is not None:
                    work.wait()
        self._sends.clear()

    def _blocks(self) -> Iterator[tuple[int, OutputPlace, OutputShard]]:
        """All that rank 0 needs of a step, by output, in the order in which each rank sends it."""
        for index, output in enumerate(self._manifest.outputs):
            for place in output.places:
                if self._manifest.micro_batches_of(place.stage):
                    yield from ((index, place, shard) for shard in needed_shards(place))

    def _write(self) -> None:
        """Append the step before, as far as there is one."""
        if self._waiting is None:
            return
        (own, samples) = self._waiting
        self._waiting = None
        parts: dict[int, list[tuple[OutputPlace, TensorSlice, torch.Tensor]]] = {}
        for index, place, shard in self._blocks():
            if shard.rank == 0:
                block = own[index, place.stage]
            else:
                count = len(self._manifest.micro_batches_of(place.stage))
                dtype = torch_dtype(self._manifest.outputs[index].value.dtype)
                block = torch.empty((count, *shard.box.shape), dtype=dtype)
                with self._transport.heartbeat.waiting(shard.rank):
                    dist.recv(block, shard.rank, tag=_TAG + index)
            parts.setdefault(index, []).append((place, shard.box, block))
        for index, found in parts.items():
            self._files[index].append(self._rows(self._manifest.outputs[index], found, samples))

    def _rows(
        self,
        output: Output,
        parts: Sequence[tuple[OutputPlace, TensorSlice, torch.Tensor]],
        samples: int,
    ) -> np.ndarray:
        """A step's output from the blocks of its places, rows of the first `samples` in front; of
        values without samples one for each micro-batch.
        """
        manifest = self._manifest
        count = manifest.micro_batches_at(parts[0][0].stage)
        whole = torch.zeros((count, *output.value.shape), dtype=parts[0][2].dtype)
        for place, box, part in parts:
            own = manifest.micro_batches_of(place.stage)
            block = whole[(slice(own.start, None, own.step), *box.slices)]
            if place.combine == "concat":
                block.copy_(part.reshape(block.shape))
            else:
                block.add_(part.reshape(block.shape) / place.copies)
        axis = output.batch_axis
        size = manifest.batch_size // count
        if axis is not None:
            whole = whole.movedim(axis + 1, 1).flatten(0, 1)
        length = -(-samples // size) if axis is None else output.value.shape[axis] * samples // size
        rows = whole[:length]
        return rows.float().numpy() if rows.dtype is torch.bfloat16 else rows.numpy()


def needed_shards(place: OutputPlace) -> tuple[OutputShard, ...]:
    """One holder for each block; all of them where each holds a share of a sum."""
    if place.combine != "concat":
        return place.shards
    return tuple({shard.box: shard for shard in reversed(place.shards)}.values())
