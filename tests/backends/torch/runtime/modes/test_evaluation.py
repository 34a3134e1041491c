"""Validation counts each sample of the data once, however it falls into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.backends.torch.runtime.data.sample_source import SampleSource
from autopipe.backends.torch.runtime.data.sources import open_source
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.modes.evaluation import ValidationSource
from autopipe.ir.problem import LossDivision
from autopipe.ir.program import InputRange
from tests.backends.torch.runtime.data.test_sources import Batches, input_range

VALUES = input_range("values", "float32", (6, 1), 0, None)
LABELS = input_range("labels", "int64", (6,), 0, 9)


@dataclass(frozen=True)
class Counted:
    """A source of numbered samples, which ends behind the last."""

    manifest: Manifest
    samples: int

    def sample_count(self, step: int) -> int:
        return max(0, min(self.manifest.batch_size, self.samples - step * self.manifest.batch_size))

    def rows(self, entry: InputRange, start: int, stop: int) -> np.ndarray:
        assert 0 <= start < stop <= self.samples, "a sample that is not there"
        return np.arange(start, stop).reshape(-1, *entry.value.shape[1:])


def manifest_of(*inputs: InputRange, micro_batches: int = 2) -> Manifest:
    return cast(
        Manifest, Batches(inputs, micro_batches=micro_batches, micro_batch_size=6, train=False)
    )


@given(
    samples=st.integers(1, 60), micro_batches=st.integers(1, 3), size=st.sampled_from([1, 2, 3, 6])
)
def test_losses_add_up_to_that_of_every_sample(samples: int, micro_batches: int, size: int) -> None:
    """A stage's micro-batch has `size` samples; its loss is the mean of theirs."""
    manifest = manifest_of(VALUES, micro_batches=micro_batches)
    data = ValidationSource(manifest, cast(SampleSource, Counted(manifest, samples)))
    total = 0.0
    step = 0
    while data.sample_count(step):
        for start in range(step * manifest.batch_size, (step + 1) * manifest.batch_size, size):
            loss = float(np.mean(data.rows(VALUES, start, start + size) ** 2.0))
            total += loss * data.weight(start, size)
        step += 1
    assert data.samples == samples
    assert total == pytest.approx(sum(number**2.0 for number in range(samples)))


@given(samples=st.integers(1, 60), micro_batches=st.integers(1, 3))
def test_ignored_labels_count_for_nothing(samples: int, micro_batches: int) -> None:
    """Losses are means over the labels that are not ignored."""
    labels = replace(LABELS, ignored=-100)
    manifest = manifest_of(labels, micro_batches=micro_batches)
    data = ValidationSource(manifest, cast(SampleSource, Counted(manifest, samples)))
    total = 0.0
    step = 0
    while data.sample_count(step):
        for start in range(step * manifest.batch_size, (step + 1) * manifest.batch_size, 6):
            if weight := data.weight(start, 6):
                row = data.rows(labels, start, start + 6)
                total += float(row[row != -100].mean()) * weight
        step += 1
    assert total == pytest.approx(sum(range(samples)))


def test_batches_that_cannot_be_divided_are_taken_whole() -> None:
    manifest = manifest_of(VALUES)
    indivisible = cast(
        Manifest, replace(cast(Batches, manifest), loss_division=LossDivision(divisible=False))
    )
    for samples, whole in ((12, 12), (23, 12), (24, 24), (11, 0)):
        data = ValidationSource(indivisible, cast(SampleSource, Counted(manifest, samples)))
        step = 0
        while data.sample_count(step):
            assert data.weight(step * 12, 6) == data.weight(step * 12 + 6, 6) == 6
            step += 1
        assert (data.samples, step) == (whole, whole // 12)


def test_functions_and_files_are_gone_through_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_of(VALUES)
    every = np.arange(20, dtype=np.float32).reshape(20, 1)
    np.savez(tmp_path / "held_out.npz", values=every)
    text = f"""
import numpy as np

def batches():
    every = np.load({str(tmp_path / "held_out.npz")!r})["values"]
    yield {{"values": every[:12]}}
    yield {{"values": every[12:]}}
"""
    (tmp_path / "held_out_source.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def taken(name: str) -> Any:
        data = ValidationSource(manifest, open_source(manifest, name, 0))
        found = []
        while data.sample_count(len(found)):
            start = len(found) * 12
            found.append(
                np.concatenate(
                    [data.rows(VALUES, start + each, start + each + 4) for each in (0, 4, 8)]
                )
            )
        return np.concatenate(found)

    by_file = taken(str(tmp_path / "held_out.npz"))
    np.testing.assert_array_equal(by_file, np.concatenate([every, np.full((16, 1), 19)]))
    np.testing.assert_array_equal(taken("held_out_source:batches"), by_file)
