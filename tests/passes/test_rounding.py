"""The roundings that follow one another in a step, and the bound that they give."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from autopipe.ir.rounding import UNIT_ROUNDOFF, Rounding
from autopipe.passes.analysis.rounding import count_roundings
from autopipe.passes.frontend import read_model
from tests.distributed.support.zoo import small_graph
from tests.passes.cost.graphs import perceptron
from tests.passes.frontend.building import integers, model, node, saved

GRAPH = perceptron([16, 32, 4], batch=8)
"""Two products, each with an activation."""


def test_terms_of_products_add_up_forwards_and_back() -> None:
    """Forwards 16 and 32 terms, and a rounding each activation. Back each activation again, 4 terms
    through the second product, and the first matrix's gradient adds up over 8 samples.
    """
    assert count_roundings(GRAPH, "fp32", False, 0, 0) == Rounding("float32", 16 + 1 + 32 + 1)
    assert count_roundings(GRAPH, "fp32", True, 6, 0) == Rounding(
        "float32", (16 + 1 + 32 + 1) + (8 + 1 + 4 + 1) + 6
    )


@pytest.mark.parametrize(
    ("precision", "dtype", "narrowed", "messages"),
    [("bf16", "bfloat16", 8, 6), ("fp16", "float16", 8, 6)],
)
def test_narrow_types_are_rounded_to_as_well(
    precision: str, dtype: str, narrowed: int, messages: int
) -> None:
    """Each of four results, and each gradient, is rounded, and messages over three boundaries each
    way.
    """
    found = count_roundings(GRAPH, precision, True, 0, 3)
    assert (found.dtype, found.narrowed, found.messages) == (dtype, narrowed, messages)
    assert found.bound > 10 * count_roundings(GRAPH, "fp32", True, 0, 3).bound


def test_the_bound_is_the_square_root_of_the_roundings() -> None:
    assert Rounding("float32", 400).bound == pytest.approx(20 * 2.0**-24)
    assert Rounding("float64", 400).bound == pytest.approx(20 * 2.0**-53)
    narrow = Rounding("bfloat16", 400, 7, 2)
    assert narrow.bound == pytest.approx(math.hypot(20 * 2.0**-24, 3 * 2.0**-8))
    assert str(narrow) == (
        "3.9e-03 (bfloat16) x sqrt(7 roundings and 2 of messages), and 6.0e-08 (float32) x "
        "sqrt(400 roundings)"
    )


def test_depth_and_width_of_a_model_count() -> None:
    deep, shallow = (
        count_roundings(small_graph(name)[0], "fp32", True, 0, 0) for name in ("unet", "alexnet")
    )
    assert deep.bound > shallow.bound > UNIT_ROUNDOFF["float32"]


def test_places_between_pixels_are_rounded_by_their_size(tmp_path: Path) -> None:
    """Not halves of pixels: those are exact."""
    found = []
    for size in (48, 36):
        held = {"sizes": integers(1, 1, size, 24)}
        resize = node("Resize", "x _ _ sizes", "y", mode="linear")
        graph = read_model(saved(model([resize], {"x": [1, 1, 24, 24]}, "y", held), tmp_path)).graph
        found.append(count_roundings(graph, "fp32", False, 0, 0).accumulated)
    assert found == [1, 1 + 2 * 24**2]


def test_programs_at_tf32_are_compared_in_ieee_precision() -> None:
    assert count_roundings(GRAPH, "tf32", True, 0, 3) == count_roundings(GRAPH, "fp32", True, 0, 3)


@pytest.mark.parametrize("terms", [100, 1000, 10000])
def test_sums_in_sequence_keep_the_bound(terms: int) -> None:
    """Products of random vectors, summed one term after another in single precision: the difference
    of two orders.
    """
    generator = np.random.default_rng(0)
    left, right = generator.standard_normal((2, 64, terms)).astype(np.float32)
    parts = left * right
    forwards, backwards = (
        np.add.accumulate(each, axis=1)[:, -1] for each in (parts, parts[:, ::-1])
    )
    relative = np.linalg.norm(forwards.astype(float) - backwards) / np.linalg.norm(
        backwards.astype(float)
    )
    assert relative < Rounding("float32", terms).bound < 100 * relative
