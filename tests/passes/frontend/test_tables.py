"""Tables that are computed from positions are distinguished from random and trained tensors."""

from __future__ import annotations

import numpy as np
import pytest

from autopipe.passes.frontend.tables import is_uniform, kind_of_table
from tests.passes.frontend.building import floats

PLACES = np.arange(64, dtype=np.float64)[:, None]
ANGLES = PLACES / 10000 ** (np.arange(8) / 8)
TABLES = {
    "cosines": np.cos(ANGLES),
    "sines from place 2 on": np.sin(ANGLES + 2 / 10000 ** (np.arange(8) / 8))[None],
    "both side by side": np.concatenate([np.sin(ANGLES), np.cos(ANGLES)], axis=1)[None, :, :],
    "a causal mask": np.triu(np.full((8, 8), -np.inf), 1),
    "a lower triangle": np.tril(np.ones((8, 8))),
    "distances": np.abs(PLACES - PLACES.T),
    "positions": np.arange(5.0),
    "frequencies": 1 / 10000 ** (np.arange(8) / 8),
    "slopes": 2.0 ** -np.arange(1, 9),
}
WEIGHTS = {
    "drawn": floats(64, 8),
    "a drawn vector": floats(64),
    "small": floats(64, 8, scale=1e-3),
    "ones": np.ones(8),
    "two numbers": np.array([0.3, -0.1]),
    "smooth but drawn": np.cumsum(floats(64, 8), axis=0),
    "a pruned matrix": floats(64, 8) * (floats(64, 8, seed=1) > 0),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_recognised(name: str) -> None:
    assert kind_of_table(TABLES[name].astype(np.float32), named=False)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_no_tables(name: str) -> None:
    assert not kind_of_table(WEIGHTS[name].astype(np.float32), named=False)


def test_a_series_with_a_name_may_be_a_parameter() -> None:
    assert not kind_of_table(np.linspace(-6, 1, 16), named=True)


def test_tensors_of_equal_elements_are_no_tables() -> None:
    assert is_uniform(np.ones((3, 4))) and is_uniform(np.zeros(0))
    assert not is_uniform(np.array([1.0, 2.0, 1.0]))
