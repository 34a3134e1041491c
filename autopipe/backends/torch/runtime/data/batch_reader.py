"""Readers from which the forward passes of a rank get their inputs. A forward pass requests a
block: the slice of a graph input that this rank needs for one micro-batch.

`BatchReader` reads a block when it is requested. `PrefetchingReader` reads blocks ahead on a thread
and copies them to the GPU.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TypeVar

import torch

from autopipe.backends.torch.runtime.data.random_batches import RandomSource
from autopipe.backends.torch.runtime.data.sample_source import BlockRanges, SampleSource
from autopipe.backends.torch.runtime.data.sources import read_block, read_filled_block
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.state.parameters import torch_dtype


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """A request for the slice `box` of graph input `name`, for one micro-batch of a stage.
    `micro_batch` is its number in the step.
    """

    stage: int
    micro_batch: int
    name: str
    box: BlockRanges


@dataclass(frozen=True, slots=True)
class StepData:
    """The samples of one step.

    samples: number of samples that come from the data. Filler samples, copies that complete a
    batch, do not count.
    epoch: the epoch of the samples, counted from 1.
    skipped_samples: number of samples at the end of an epoch that are skipped, because they do not
    fill a batch.
    """

    samples: int
    epoch: int
    skipped_samples: int


class BatchReader:
    """Reads each block at the time of its request."""

    def __init__(self, manifest: Manifest, source: SampleSource, device: torch.device) -> None:
        self.source = source
        self._manifest = manifest
        self._device = device
        self._inputs = {entry.value.name: entry for entry in manifest.inputs}

    def begin_step(self, step: int) -> int:
        """Return the number of samples that the data have for `step`; 0 if the data have ended.
        Call this with the first step of the run, then with each following step in order.
        """
        return self.source.sample_count(step)

    def read(self, step: int, request: BlockRequest) -> torch.Tensor:
        """Return the requested block for `step`, on the device, in the element type of the graph
        input.
        """
        return self._read_block(step, request).to(
            self._device, self._dtype_of(request), non_blocking=True
        )

    def end_step(self, step: int) -> StepData:
        """Return the samples that `step` has used."""
        return StepData(
            self.source.sample_count(step), self.source.epoch(step), self.source.skipped_samples
        )

    def close(self) -> None:
        """Stop the thread of a reader that reads ahead. This class has no thread, so nothing
        happens.
        """

    def _read_block(self, step: int, request: BlockRequest) -> torch.Tensor:
        """Return a block in the element type of the source. It is on the device if random values
        are drawn for it, otherwise in host memory. If the step has less than a batch of samples,
        filler samples (copies of the step's first sample) complete the block.
        """
        size = self._manifest.micro_batch_size_at(request.stage)
        entry = self._inputs[request.name]
        offset = request.micro_batch * size
        if offset + size <= self.source.sample_count(step):
            sample = self.source.first_sample(step) + offset
            if isinstance(self.source, RandomSource):
                return self.source.block(entry, sample, request.box, self._device)
            return torch.from_numpy(
                read_block(self.source, self._manifest, entry, sample, request.box)
            )
        return torch.from_numpy(
            read_filled_block(self.source, self._manifest, entry, step, offset, request.box)
        )

    def _dtype_of(self, request: BlockRequest) -> torch.dtype:
        """Return the element type of the graph input that a request names."""
        return torch_dtype(self._inputs[request.name].value.dtype)


_PREFETCHED_MICRO_BATCHES = 2
"""Number of micro-batches that are read ahead: one that the device uses next, and one that is being
copied.
"""


@dataclass(frozen=True, slots=True)
class _PrefetchedBlock:
    """A block on the GPU for `request`. Its contents are valid after the event `copied`."""

    request: BlockRequest
    tensor: torch.Tensor
    copied: torch.cuda.Event


class _ReaderClosed(Exception):
    """Raised on the thread of a `PrefetchingReader` to end the thread."""


_Item = TypeVar("_Item", int, StepData, _PrefetchedBlock)


class PrefetchingReader(BatchReader):
    """Reads blocks on a thread before they are requested.

    In the first step, blocks are read on request, and the order of the requests is recorded. Later
    steps must request blocks in the same order. The thread reads the blocks of later steps in this
    order into pinned host memory, about `_PREFETCHED_MICRO_BATCHES` micro-batches ahead, and copies
    them to the GPU on a separate stream. Once the thread runs, no other thread may use the source.
    """

    def __init__(
        self, manifest: Manifest, source: SampleSource, device: torch.device, steps: int
    ) -> None:
        """`steps` is the number of steps after which the run ends: the thread reads no step with
        this index or a larger one.
        """
        super().__init__(manifest, source, device)
        self._steps = steps
        self._requests: list[BlockRequest] = []
        self._stream = torch.cuda.Stream(device)
        self._thread: threading.Thread | None = None
        self._items: queue.Queue[int | StepData | _PrefetchedBlock | BaseException]
        self._closing = False

    def begin_step(self, step: int) -> int:
        return super().begin_step(step) if self._thread is None else self._next_item(int)

    def read(self, step: int, request: BlockRequest) -> torch.Tensor:
        if self._thread is None:
            self._requests.append(request)
            return super().read(step, request)
        item = self._next_item(_PrefetchedBlock)
        assert item.request == request, (
            f"{request} is asked for where a first step asked for {item.request}"
        )
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(item.copied)
        # The copy stream owns the memory of the block. Without `record_stream`, torch's allocator
        # could reuse this memory before the kernels of `stream` have read it.
        item.tensor.record_stream(stream)
        return item.tensor

    def end_step(self, step: int) -> StepData:
        if self._thread is not None:
            return self._next_item(StepData)
        found = super().end_step(step)
        if self._requests:
            a_micro_batch = max(
                Counter((each.stage, each.micro_batch) for each in self._requests).values()
            )
            self._items = queue.Queue(_PREFETCHED_MICRO_BATCHES * a_micro_batch)
            self._thread = threading.Thread(
                target=self._read_ahead, args=(step + 1,), name="data", daemon=True
            )
            self._thread.start()
        return found

    def close(self) -> None:
        self._closing = True
        while self._thread is not None and self._thread.is_alive():
            while not self._items.empty():
                self._items.get_nowait()
            self._thread.join(0.01)

    def _next_item(self, kind: type[_Item]) -> _Item:
        """Return the next item in the queue of the thread, which must have type `kind`. If an error
        ended the thread, raise the error instead.
        """
        item = self._items.get()
        if isinstance(item, BaseException):
            raise item
        assert isinstance(item, kind), f"{item} comes where {kind.__name__} is due"
        return item

    def _queue_item(self, item: int | StepData | _PrefetchedBlock | BaseException) -> None:
        """Put an item into the queue, on the thread. Blocks while the queue is full. Raise
        `_ReaderClosed` if the reader is being closed.
        """
        self._items.put(item)
        if self._closing:
            raise _ReaderClosed

    def _read_ahead(self, first: int) -> None:
        """Read the data of the steps from `first` on, in the recorded order, and put them into the
        queue. Runs on the thread.
        """
        try:
            torch.cuda.set_device(self._device)
            with torch.cuda.stream(self._stream):
                for step in range(first, self._steps):
                    found = super().begin_step(step)
                    self._queue_item(found)
                    if not found:
                        return
                    for request in self._requests:
                        self._queue_item(self._prefetch_block(step, request))
                    self._queue_item(super().end_step(step))
        except _ReaderClosed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that takes it
            self._items.put(error)

    def _prefetch_block(self, step: int, request: BlockRequest) -> _PrefetchedBlock:
        """Read a block and start its copy to the GPU, on the thread."""
        block = self._read_block(step, request)
        if block.device.type == "cpu":
            # No reference to the pinned buffer is stored, because torch reuses pinned memory only
            # after the copies from it have ended.
            block = torch.empty(block.shape, dtype=self._dtype_of(request), pin_memory=True).copy_(
                block
            )
        tensor = block.to(self._device, self._dtype_of(request), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return _PrefetchedBlock(request, tensor, copied)
