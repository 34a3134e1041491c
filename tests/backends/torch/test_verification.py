"""What counts as equal, and that what is not equal is found."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from autopipe.backends.torch.runtime.manifest import Manifest, read_manifest
from autopipe.backends.torch.runtime.modes.records import record_file
from autopipe.backends.torch.verification import (
    Difference,
    array_difference,
    max_tensor_difference,
    read_outputs,
    tensor_differences,
)
from autopipe.ir.errors import VerificationError
from autopipe.ir.graph import DType, Value
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.program import Output
from tests.distributed.support.builder import mlp
from tests.distributed.support.running import schedule_of, write

NUMBERS = arrays.arrays(np.float64, 5, elements=st.floats(-1e6, 1e6))
SPECIAL = [math.nan, math.inf, -math.inf]


@given(NUMBERS, NUMBERS)
def test_differences_are_relative_norms(ours: np.ndarray, reference: np.ndarray) -> None:
    distance = math.sqrt(
        sum((a - b) ** 2 for a, b in zip(ours.tolist(), reference.tolist(), strict=True))
    )
    norm = math.sqrt(sum(b**2 for b in reference.tolist()))
    expected = distance / norm if norm else distance
    assert array_difference("x", ours, reference).relative == pytest.approx(
        expected, rel=1e-9, abs=1e-300
    )


@given(NUMBERS)
def test_equal_arrays_do_not_differ(array: np.ndarray) -> None:
    for index, number in enumerate(SPECIAL):
        array[index] = number
    assert array_difference("x", array.copy(), array).relative == 0.0


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("other", [0.0, 1.0, *SPECIAL])
def test_infinities_and_nans_must_be_matched(special: float, other: float) -> None:
    pair = np.array([1.0, special]), np.array([1.0, other])
    same = special == other or (math.isnan(special) and math.isnan(other))
    for ours, reference in (pair, pair[::-1]):
        assert array_difference("x", ours, reference).relative == (0.0 if same else math.inf)


def test_shapes_and_whole_numbers() -> None:
    assert array_difference("x", np.zeros((2, 3)), np.zeros((3, 2))).relative == math.inf
    assert array_difference("x", np.array([1, 2]), np.array([1, 2])).relative == 0.0
    assert array_difference("x", np.array([1, 2]), np.array([1, 3])).relative == math.inf
    assert array_difference("x", np.array([True]), np.array([False])).relative == math.inf
    assert array_difference("x", np.array([1j]), np.array([1.0 + 0j])).relative == pytest.approx(
        math.sqrt(2)
    )


def test_single_precision_is_compared_in_double() -> None:
    reference = np.full(4, 1e30, np.float32)
    assert array_difference("x", reference * np.float32(1.5), reference).relative == pytest.approx(
        0.5, rel=1e-6
    )


def test_what_is_zero_but_for_rounding_is_compared_in_units_of_the_rest() -> None:
    tiny = np.array([1e-9])
    other = np.array([3e-9])
    assert array_difference("x", other, tiny).relative == pytest.approx(2.0)
    assert array_difference("x", other, tiny, scale=1.0).relative == pytest.approx(2e-9)
    assert array_difference("x", np.array([0.5]), tiny, scale=1.0).relative == pytest.approx(0.5)
    assert array_difference(
        "x", np.array([2e-3]), np.array([1e-3]), scale=1.0
    ).relative == pytest.approx(1.0)


@pytest.fixture
def ranks(tmp_path: Path) -> Manifest:
    """A program that holds one parameter in halves on two ranks, another whole on a third."""
    graph, loss = mlp(2)
    splits = ((0, (Split("n", 2),)),)
    placement = Placement((Stage((0, 1), (0, 1), 4, splits), Stage((2, 3, 4, 5), (2,), 4)))
    write(graph, placement, schedule_of(graph, placement, 2), loss, tmp_path / "program")
    return read_manifest(tmp_path / "program")


def record(folder: Path, gradients: list[dict[str, np.ndarray]]) -> Path:
    folder.mkdir()
    for rank, found in enumerate(gradients):
        np.savez(record_file(folder, "gradients", 0, rank), **found)  # type: ignore[arg-type]
    return folder


WHOLE = {"0": np.arange(1.0, 17.0).reshape(4, 4), "1": np.ones((4, 4))}


def parts() -> list[dict[str, np.ndarray]]:
    return [
        {"0": WHOLE["0"][:, :2].copy()},
        {"0": WHOLE["0"][:, 2:].copy()},
        {"1": WHOLE["1"].copy()},
    ]


def test_blocks_are_compared_with_their_part_of_the_whole(ranks: Manifest, tmp_path: Path) -> None:
    expected = record(tmp_path / "one", [WHOLE])
    found = list(tensor_differences(ranks, record(tmp_path / "ranks", parts()), expected))
    assert [(each.tensor, each.relative) for each in found] == [("w0", 0.0), ("w1", 0.0)]


@pytest.mark.parametrize(("rank", "name"), [(0, "0"), (1, "0"), (2, "1")])
def test_one_wrong_block_is_found(ranks: Manifest, tmp_path: Path, rank: int, name: str) -> None:
    wrong = parts()
    wrong[rank][name][1, 1] += 1
    expected = record(tmp_path / "one", [WHOLE])
    found = list(tensor_differences(ranks, record(tmp_path / "ranks", wrong), expected))
    assert [each.relative > 0.01 for each in found] == [name == "0", name == "1"]


def test_gradients_that_are_missing(ranks: Manifest, tmp_path: Path) -> None:
    expected = record(tmp_path / "one", [WHOLE])
    without = parts()
    del without[1]["0"]
    with pytest.raises(VerificationError, match="no gradient was recorded for 'w0'"):
        list(tensor_differences(ranks, record(tmp_path / "less", without), expected))
    with pytest.raises(VerificationError, match="gradients of the step were not recorded"):
        list(tensor_differences(ranks, record(tmp_path / "fewer", parts()[:2]), expected))
    held = Manifest(
        **{name: getattr(ranks, name) for name in ranks.__slots__} | {"shards": ranks.shards[:2]}
    )
    with pytest.raises(VerificationError, match="no rank recorded the parameter 'w1'"):
        list(tensor_differences(held, record(tmp_path / "parts", parts()), expected))


def test_outputs_by_name(ranks: Manifest, tmp_path: Path) -> None:
    names = ("b/0", "a", "../c", "d\\e")
    outputs = tuple(Output(Value(name, DType.FLOAT32, ()), None, ()) for name in names)
    manifest = replace(ranks, outputs=outputs)
    assert manifest.output_keys == ("b/0", "a", "output_2", "output_3")
    np.savez(
        tmp_path / "outputs.npz",
        **{key: np.ones(each) for each, key in enumerate(manifest.output_keys)},
    )
    found = read_outputs(tmp_path / "outputs.npz", manifest)
    assert [(name, array.shape) for name, array in found.items()] == [
        (name, (i,)) for i, name in enumerate(names)
    ]


def test_outputs_whose_names_are_no_files_have_keys_of_their_own(
    ranks: Manifest, tmp_path: Path
) -> None:
    names = (
        "output_1",
        "../../x",
        "/etc/x",
        "output_2",
        "output_2_",
        "a.npy",
        "a",
        "A",
        "..",
        "x" * 250,
    )
    outputs = tuple(Output(Value(name, DType.FLOAT32, ()), None, ()) for name in names)
    manifest = replace(ranks, outputs=outputs)
    keys = (
        "output_1",
        "output_1_",
        "output_2__",
        "output_2",
        "output_2_",
        "output_5",
        "a",
        "A",
        "output_8",
        "output_9",
    )
    assert manifest.output_keys == keys
    np.savez(tmp_path / "outputs.npz", **{key: np.ones(each) for each, key in enumerate(keys)})
    with np.load(tmp_path / "outputs.npz") as stored:
        assert [stored[key].shape for key in keys] == [(each,) for each in range(len(keys))]


BOUND = 4e-6


def test_the_limit_of_a_tensor_follows_what_a_rounding_changes_it_by() -> None:
    gradient = Difference("w", 1e-3)
    assert max_tensor_difference(BOUND, gradient, 0.0) == BOUND
    assert max_tensor_difference(BOUND, gradient, 1e-5) == pytest.approx(4e-5 + BOUND)
    assert max_tensor_difference(BOUND, gradient, 1e-4) < 1e-3, "a factor of 1.001 is found"


def test_what_has_no_digits_is_held_against_all_that_is_compared() -> None:
    """A rounding changes it by a half; of all gradients together it is little or a tenth."""
    assert max_tensor_difference(BOUND, Difference("bias", 0.9, share=1e-6), 0.5) == 1.0
    assert max_tensor_difference(BOUND, Difference("bias", 0.9, share=1e-5), 0.5) == pytest.approx(
        BOUND * 1e5
    )
    assert max_tensor_difference(BOUND, Difference("bias", 0.9, share=0.1), 0.5) < 1e-4
