"""Outputs of inference. Rank 0 gathers the outputs of a step at the end of the next step and
appends them to files, one per output. After the last step the files become one `.npz` or `.npy`
file. No rank holds the outputs of more than two steps.
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
from autopipe.backends.torch.runtime.manifest import (
    Manifest,
    partial_folder,
    remove_partial_outputs,
)
from autopipe.backends.torch.runtime.state.parameters import torch_dtype
from autopipe.ir.layout import TensorSlice
from autopipe.ir.output_files import add_path_to_errors, follow_links, move_into_place
from autopipe.ir.program import Output, OutputShard, OutputStage

# First tag of gloo messages with outputs. It is larger than the tags of all channels, so that no
# output uses the tag of a channel.
_OUTPUT_TAG = 1 << 20
_HEADER_BYTES = 256
"""Bytes that are reserved at the start of a `.npy` file for its header. The header is written at
the end, when the number of rows is known. The size suffices for the shapes of all outputs.
"""
_COPY_BYTES = 1 << 24
"""Approximate bytes that are copied at a time when rows are moved to another axis."""


class RowFile:
    """A new `.npy` file to which rows (slices along axis 0) are appended. The file is valid after
    `finish`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] = path.open("wb")
        self._file.write(bytes(_HEADER_BYTES))
        self._rows = 0
        self._shape: tuple[int, ...] = ()
        self._dtype = np.dtype(np.float32)

    def append(self, rows: np.ndarray) -> None:
        """Append `rows`, an array [rows, ...], to the file. All calls must pass rows of equal shape
        and element type.
        """
        self._rows += len(rows)
        self._shape = rows.shape[1:]
        self._dtype = rows.dtype
        with add_path_to_errors(self.path):
            self._file.write(np.ascontiguousarray(rows).data)

    def finish(self, axis: int = 0) -> None:
        """Write the header and close the file. If `axis` is not 0, also rewrite the file so that
        the rows are along this axis.
        """
        shape = self._rows, *self._shape
        with add_path_to_errors(self.path):
            self._file.seek(0)
            self._file.write(_npy_header(shape, self._dtype))
            self._file.close()
        if not axis:
            return
        rows = np.moveaxis(np.load(self.path, mmap_mode="r", allow_pickle=False), 0, axis)
        moved = self.path.with_suffix(".moved")
        target = np.lib.format.open_memmap(moved, "w+", self._dtype, rows.shape)
        count = max(1, _COPY_BYTES * len(rows) // max(1, rows.nbytes))
        for start in range(0, len(rows), count):
            target[start : start + count] = rows[start : start + count]
        target.flush()
        os.replace(moved, self.path)


def _npy_header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """Return the header of a `.npy` file, version 1.0, for an array in row-major order
    (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html). The header has
    `_HEADER_BYTES` bytes.
    """
    described = repr(
        {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    magic = b"\x93NUMPY\x01\x00"
    length = _HEADER_BYTES - 10
    return (
        magic + length.to_bytes(2, "little") + described.encode("latin1").ljust(length - 1) + b"\n"
    )


class OutputCollector:
    """Gathers the outputs of inference on rank 0. At the end of a step, each rank starts to send
    its shards of the outputs to rank 0. Rank 0 receives them at the end of the next step.
    """

    def __init__(self, manifest: Manifest, transport: Transport, path: Path | None) -> None:
        """`path` is the `.npz` or `.npy` file to write. If it is None, or in training, all methods
        do nothing.
        """
        self._manifest = manifest
        self._transport = transport
        self._path = None if manifest.train or path is None else follow_links(path)
        self._kept: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        """This rank's shards of the current step's outputs: (output, stage) -> micro-batch ->
        shard.
        """
        self._sends: list[tuple[dist.Work | None, torch.Tensor]] = []
        self._waiting: tuple[dict[tuple[int, int], torch.Tensor], int] | None = None
        """On rank 0: its own shards of the previous step by (output, stage), and the number of
        samples of that step. None if there is nothing to write.
        """
        self._files: list[RowFile] = []
        if self._path is not None and transport.rank == 0:
            folder = partial_folder(self._path)
            remove_partial_outputs(self._path)
            folder.mkdir()
            self._files = [
                RowFile(folder / f"{index}.npy") for index in range(len(manifest.outputs))
            ]

    def keep(self, stage: int, micro_batch: int, results: tuple[torch.Tensor, ...]) -> None:
        """Copy this rank's shards of outputs among `results`, the results of a forward, to host
        memory. `micro_batch` is numbered over all steps.
        """
        if self._path is None:
            return
        for index, output in enumerate(self._manifest.outputs):
            for place in output.places:
                if place.stage == stage and any(
                    shard.rank == self._transport.rank for shard in shards_to_gather(place)
                ):
                    result = results[place.position].detach().cpu().contiguous()
                    self._kept.setdefault((index, stage), {})[micro_batch] = result

    def end_step(self, samples: int) -> None:
        """Start to send this rank's shards of the step to rank 0; on rank 0, write the previous
        step. The first `samples` samples of the step come from the data. The others are filler
        samples, copies that complete the batch; they are not written.
        """
        if self._path is None:
            return
        stacked = {
            key: torch.stack([part for _, part in sorted(parts.items())])
            for key, parts in self._kept.items()
        }
        self._kept.clear()
        if self._transport.rank == 0:
            self._write_previous_step()
            self._waiting = stacked, samples
            return
        self._wait_until_sent()
        for index, place, shard in self._shards_in_send_order():
            if shard.rank == self._transport.rank:
                block = stacked[index, place.stage]
                self._sends.append((dist.isend(block, 0, tag=_OUTPUT_TAG + index), block))

    def finish(self) -> None:
        """Write the output file after the last step. Must be called on all ranks."""
        if self._path is None:
            return
        self._wait_until_sent()
        if self._transport.rank != 0:
            return
        self._write_previous_step()
        for file, output in zip(self._files, self._manifest.outputs, strict=True):
            file.finish(output.batch_axis or 0)
        whole = self._files[0].path
        if self._path.suffix != ".npy":
            whole = whole.with_name("whole.npz")
            with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                for file, key in zip(self._files, self._manifest.output_keys, strict=True):
                    archive.write(file.path, f"{key}.npy")
                    file.path.unlink()
        move_into_place(whole, self._path)
        remove_partial_outputs(self._path)

    def _wait_until_sent(self) -> None:
        """Wait until the sends of the previous step have ended."""
        with self._transport.heartbeat.record_wait():
            for work, _ in self._sends:
                if work is not None:
                    work.wait()
        self._sends.clear()

    def _shards_in_send_order(self) -> Iterator[tuple[int, OutputStage, OutputShard]]:
        """Yield (index of the output, stage that computes it, shard) for each shard that rank 0
        gathers in a step. The order is the order in which ranks send.
        """
        for index, output in enumerate(self._manifest.outputs):
            for place in output.places:
                if self._manifest.micro_batches_of(place.stage):
                    yield from ((index, place, shard) for shard in shards_to_gather(place))

    def _write_previous_step(self) -> None:
        """On rank 0, receive the outputs of the previous step, if there is one, and append them to
        the files.
        """
        if self._waiting is None:
            return
        (own, samples) = self._waiting
        self._waiting = None
        parts: dict[int, list[tuple[OutputStage, TensorSlice, torch.Tensor]]] = {}
        for index, place, shard in self._shards_in_send_order():
            if shard.rank == 0:
                block = own[index, place.stage]
            else:
                count = len(self._manifest.micro_batches_of(place.stage))
                dtype = torch_dtype(self._manifest.outputs[index].value.dtype)
                block = torch.empty((count, *shard.box.shape), dtype=dtype)
                with self._transport.heartbeat.record_wait(shard.rank):
                    dist.recv(block, shard.rank, tag=_OUTPUT_TAG + index)
            parts.setdefault(index, []).append((place, shard.box, block))
        for index, found in parts.items():
            self._files[index].append(
                self._assemble_output(self._manifest.outputs[index], found, samples)
            )

    def _assemble_output(
        self,
        output: Output,
        parts: Sequence[tuple[OutputStage, TensorSlice, torch.Tensor]],
        samples: int,
    ) -> np.ndarray:
        """Return one output of a step, without the outputs of filler samples (copies that complete
        the batch). It is assembled from `parts`: (stage, slice of the output, shards of all
        micro-batches, [micro-batches, ...]). `samples` is the number of samples that come from the
        data.

        Rows of the result, along axis 0, are slices along the output's batch axis, or micro-batches
        if the output has no batch axis.
        """
        manifest = self._manifest
        count = manifest.micro_batch_count(parts[0][0].stage)
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


def shards_to_gather(place: OutputStage) -> tuple[OutputShard, ...]:
    """Return the shards that rank 0 needs for an output of one stage: one rank's copy of each
    slice, or the shards of all ranks if the output is their sum.
    """
    if place.combine != "concat":
        return place.shards
    return tuple({shard.box: shard for shard in reversed(place.shards)}.values())
