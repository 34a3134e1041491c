"""Blocks that a thread reads before they are needed are those that would be read where they are
asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autopipe.backends.torch.runtime.data.batch_reader import (
    BatchReader,
    BlockRequest,
    PrefetchingReader,
)
from autopipe.backends.torch.runtime.data.random_batches import RandomSource
from autopipe.backends.torch.runtime.data.sample_source import BlockRanges, SampleSource
from autopipe.backends.torch.runtime.data.sources import open_source
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import DType, Value
from autopipe.ir.program import InputBounds, InputRange, Output
from tests.backends.torch.runtime.stand_in_cuda import Device

CPU = torch.device("cpu")
IDS = InputRange(
    Value("ids", DType.INT64, (2, 3)),
    0,
    7,
    allowed=(InputBounds(starts=(0, 0), stops=(2, 3), least=0, below=1000),),
)
NARROW = InputRange(Value("narrow", DType.BFLOAT16, (2, 2)), 0, None)
BATCH = 6


@dataclass(frozen=True)
class Batches:
    """The fields of a manifest that readers use: three micro-batches of two samples; stage 1 has two
    micro-batches of one sample for each.
    """

    train: bool = True
    inputs: tuple[InputRange, ...] = (IDS, NARROW)
    micro_batches: int = 3
    micro_batch_size: int = 2
    batch_size: int = BATCH
    outputs: tuple[Output, ...] = ()

    stages: tuple[SimpleNamespace, ...] = (
        SimpleNamespace(micro_batch_ratio=1),
        SimpleNamespace(micro_batch_ratio=2),
    )

    def micro_batch_size_at(self, stage: int) -> int:
        return self.micro_batch_size // int(self.stages[stage].micro_batch_ratio)


WHOLE: BlockRanges = ((0, 2), (0, 3))
REQUESTS = (
    BlockRequest(1, 0, "narrow", ((0, 1), (0, 2))),
    *(
        BlockRequest(0, number, name, box)
        for number in (0, 2, 1)
        for name, box in (("ids", WHOLE), ("narrow", ((1, 2), (0, 1))))
    ),
    BlockRequest(1, 5, "narrow", ((0, 1), (1, 2))),
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    made.install(monkeypatch)
    return made


FUNCTION = """
import numpy as np

def batches():
    for step in range(2):
        yield {"ids": np.full((6, 3), step), "narrow": np.arange(12.0).reshape(6, 2) + step / 3}
"""


def write_data(folder: Path, samples: int) -> str:
    ids = np.arange(3 * samples).reshape(samples, 3)
    np.savez(
        folder / "data.npz",
        ids=ids,
        narrow=np.linspace(0, 1, 2 * samples, dtype=np.float32).reshape(samples, 2),
    )
    return str(folder / "data.npz")


@pytest.fixture(params=["random", "file", "function"])
def data(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str | None:
    if request.param == "random":
        return None
    if request.param == "file":
        return write_data(tmp_path, 15)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "batches_read_early", raising=False)
    (tmp_path / "batches_read_early.py").write_text(FUNCTION, encoding="utf-8")
    return "batches_read_early:batches"


@pytest.fixture
def closing() -> Iterator[list[BatchReader]]:
    """Readers whose threads end with the test."""
    made: list[BatchReader] = []
    yield made
    for each in made:
        each.close()


def walk(reader: BatchReader, steps: int) -> list[object]:
    """All that a rank gets of `steps` steps, as far as there are so many."""
    found: list[object] = []
    for step in range(steps):
        if not reader.begin_step(step):
            return [*found, "no more"]
        found += [reader.read(step, each) for each in REQUESTS]
        found.append(reader.end_step(step))
    return found


@pytest.mark.parametrize("train", [True, False])
def test_a_thread_reads_what_would_be_read_where_it_is_asked_for(
    data: str | None, train: bool, device: Device, closing: list[BatchReader]
) -> None:
    manifest = Batches(train)
    wanted = walk(BatchReader(manifest, open_source(manifest, data, 3), CPU), 5)  # type: ignore[arg-type]
    closing.append(PrefetchingReader(manifest, open_source(manifest, data, 3), CPU, 5))  # type: ignore[arg-type]
    found = walk(closing[0], 5)
    assert len(found) == len(wanted) and ("no more" in found) == (not train and data is not None)
    for ours, theirs in zip(found, wanted, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert (
                isinstance(ours, torch.Tensor)
                and ours.dtype is theirs.dtype
                and torch.equal(ours, theirs)
            )
        else:
            assert ours == theirs


def test_the_computing_stream_waits_for_each_copy_and_keeps_its_memory(
    device: Device, closing: list[BatchReader]
) -> None:
    manifest = Batches()
    closing.append(PrefetchingReader(manifest, RandomSource(manifest, 0), CPU, 3))  # type: ignore[arg-type]
    walk(closing[0], 3)
    current = torch.cuda.current_stream()
    assert (
        len(current.waited_for) == len(device.kept_for) == len(device.pinned) == 2 * len(REQUESTS)
    )  # type: ignore[attr-defined]
    assert len(set(current.waited_for)) == 2 * len(REQUESTS)  # type: ignore[attr-defined]
    assert set(device.kept_for) == {current} and current not in device.entered


class CountingSource(RandomSource):
    """Counts what is read of it."""

    reads = 0

    def rows(self, entry: InputRange, start: int, stop: int) -> np.ndarray:
        self.reads += 1
        return super().rows(entry, start, stop)


def test_no_more_than_two_micro_batches_are_read_in_advance(
    device: Device, closing: list[BatchReader]
) -> None:
    manifest = Batches()
    source = CountingSource(manifest, 0)  # type: ignore[arg-type]
    reader = PrefetchingReader(manifest, source, CPU, 1000)  # type: ignore[arg-type]
    closing.append(reader)
    walk(reader, 1)
    while not reader._items.full():
        pass
    assert source.reads <= len(REQUESTS) + 2 * 2 + 1, "two blocks each, and one that is being read"
    thread = reader._thread
    reader.close()
    assert thread is not None and not thread.is_alive(), "though nobody took what it has read"


def test_an_error_is_raised_where_the_block_is_taken_and_names_array_and_row(
    tmp_path: Path, device: Device, closing: list[BatchReader]
) -> None:
    ids = np.zeros((18, 3), np.int64)
    ids[14, 2] = 5000
    np.savez(tmp_path / "data.npz", ids=ids, narrow=np.zeros((18, 2), np.float32))
    manifest = Batches()
    source: SampleSource = open_source(manifest, str(tmp_path / "data.npz"), 0)  # type: ignore[arg-type]
    closing.append(PrefetchingReader(manifest, source, CPU, 9))  # type: ignore[arg-type]
    walk(closing[0], 2)
    assert closing[0].begin_step(2) == 6
    good = [closing[0].read(2, each) for each in REQUESTS[:5]]
    assert len(good) == 5
    with pytest.raises(ConfigurationError, match=r"'ids' row 14 contains 5000"):
        closing[0].read(2, REQUESTS[5])
