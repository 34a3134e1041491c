"""The blocks of the batch that a rank's forwards take: read where they are asked for, or by a
thread that has the next ones on the GPU by then.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TypeVar

import torch

from autopipe.backends.torch.runtime.data.random_batches import RandomSource
from autopipe.backends.torch.runtime.data.sample_source import Slices, Source
from autopipe.backends.torch.runtime.data.sources import read_block, read_filled_block
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.state.parameters import torch_dtype


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """The block `box` of a graph input, of one of a stage's micro-batches."""

    stage: int
    micro_batch: int
    name: str
    box: Slices


@dataclass(frozen=True, slots=True)
class StepData:
    """Of a step whose data was read: how many of its samples are data, its epoch, and the samples
    at an epoch's end that are left out (see `Source`).
    """

    samples: int
    epoch: int
    left_over: int


class BatchReader:
    """Reads each block where a forward asks for it."""

    def __init__(self, manifest: Manifest, source: Source, device: torch.device) -> None:
        self.source = source
        self._manifest = manifest
        self._device = device
        self._inputs = {entry.value.name: entry for entry in manifest.inputs}

    def begin_step(self, step: int) -> int:
        """The samples that there are for a step, the first or that behind the one that was read
        last; 0 for none.
        """
        return self.source.count(step)

    def read(self, step: int, request: BlockRequest) -> torch.Tensor:
        """A block of a step, on the device."""
        return self._block(step, request).to(self._device, self._dtype(request), non_blocking=True)

    def end_step(self, step: int) -> StepData:
        return StepData(self.source.count(step), self.source.epoch(step), self.source.left_over)

    def close(self) -> None:
        """Read no more."""

    def _block(self, step: int, request: BlockRequest) -> torch.Tensor:
        """Return a block in the type of the data: on the device if it is random, otherwise in host
        memory.
        """
        size = (
            self._manifest.micro_batch_size
            // self._manifest.stages[request.stage].micro_batch_ratio
        )
        entry = self._inputs[request.name]
        offset = request.micro_batch * size
        if offset + size <= self.source.count(step):
            sample = self.source.sample(step) + offset
            if isinstance(self.source, RandomSource):
                return self.source.block(entry, sample, request.box, self._device)
            return torch.from_numpy(
                read_block(self.source, self._manifest, entry, sample, request.box)
            )
        return torch.from_numpy(
            read_filled_block(self.source, self._manifest, entry, step, offset, request.box)
        )

    def _dtype(self, request: BlockRequest) -> torch.dtype:
        return torch_dtype(self._inputs[request.name].value.dtype)


_MICRO_BATCHES = 2
"""As many are read before they are needed: one that the device takes next, and one that is being
copied to it.
"""


@dataclass(frozen=True, slots=True)
class _Prefetched:
    request: BlockRequest
    tensor: torch.Tensor
    copied: torch.cuda.Event


class _Closed(Exception):
    pass


_Item = TypeVar("_Item", int, StepData, _Prefetched)


class PrefetchingReader(BatchReader):
    """Reads the blocks of the first step where they are asked for, and notes their order, which is
    every step's. Then a thread reads them in that order, a few micro-batches before they are
    needed, into pinned memory, and copies them beside what the GPU computes. It alone uses the
    source then.
    """

    def __init__(
        self, manifest: Manifest, source: Source, device: torch.device, steps: int
    ) -> None:
        """For steps below number `steps`."""
        super().__init__(manifest, source, device)
        self._steps = steps
        self._requests: list[BlockRequest] = []
        self._stream = torch.cuda.Stream(device)
        self._thread: threading.Thread | None = None
        self._items: queue.Queue[int | StepData | _Prefetched | BaseException]
        self._closing = False

    def begin_step(self, step: int) -> int:
        return super().begin_step(step) if self._thread is None else self._take(int)

    def read(self, step: int, request: BlockRequest) -> torch.Tensor:
        if self._thread is None:
            self._requests.append(request)
            return super().read(step, request)
        item = self._take(_Prefetched)
        assert item.request == request, (
            f"{request} is asked for where a first step asked for {item.request}"
        )
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(item.copied)
        item.tensor.record_stream(
            stream
        )  # Its memory is the copying stream's, which must not use it again too soon.
        return item.tensor

    def end_step(self, step: int) -> StepData:
        if self._thread is not None:
            return self._take(StepData)
        found = super().end_step(step)
        if self._requests:
            a_micro_batch = max(
                Counter((each.stage, each.micro_batch) for each in self._requests).values()
            )
            self._items = queue.Queue(_MICRO_BATCHES * a_micro_batch)
            self._thread = threading.Thread(
                target=self._run, args=(step + 1,), name="data", daemon=True
            )
            self._thread.start()
        return found

    def close(self) -> None:
        self._closing = True
        while self._thread is not None and self._thread.is_alive():
            while not self._items.empty():
                self._items.get_nowait()
            self._thread.join(0.01)

    def _take(self, kind: type[_Item]) -> _Item:
        """The next item of the thread. Raises the error that ended it, where it came to that."""
        item = self._items.get()
        if isinstance(item, BaseException):
            raise item
        assert isinstance(item, kind), f"{item} comes where {kind.__name__} is due"
        return item

    def _give(self, item: int | StepData | _Prefetched | BaseException) -> None:
        self._items.put(item)
        if self._closing:
            raise _Closed

    def _run(self, first: int) -> None:
        """On the thread: all that the steps from `first` on ask for, in order."""
        try:
            torch.cuda.set_device(self._device)
            with torch.cuda.stream(self._stream):
                for step in range(first, self._steps):
                    found = super().begin_step(step)
                    self._give(found)
                    if not found:
                        return
                    for request in self._requests:
                        self._give(self._prefetched(step, request))
                    self._give(super().end_step(step))
        except _Closed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that takes it
            self._items.put(error)

    def _prefetched(self, step: int, request: BlockRequest) -> _Prefetched:
        block = self._block(step, request)
        if block.device.type == "cpu":
            # Torch keeps pinned memory for its next use, once copies from it are done.
            block = torch.empty(block.shape, dtype=self._dtype(request), pin_memory=True).copy_(
                block
            )
        tensor = block.to(self._device, self._dtype(request), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return _Prefetched(request, tensor, copied)
