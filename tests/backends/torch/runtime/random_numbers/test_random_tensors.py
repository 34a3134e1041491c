"""Drawn blocks equal the same blocks of the whole, however they are cut, read and shared among
threads.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopipe.backends.torch.runtime.random_numbers import random_tensors
from autopipe.backends.torch.runtime.random_numbers.normal_numbers import standard_normal
from autopipe.backends.torch.runtime.random_numbers.philox import (
    CounterRows,
    Purpose,
    draw_sequence,
    key_of,
)
from autopipe.backends.torch.runtime.state import parameters
from autopipe.backends.torch.runtime.state.parameters import init_shard
from autopipe.ir.graph import DType, Initializer, Parameter, Value
from autopipe.ir.layout import TensorSlice

NORMAL = Initializer("normal", 0.5)
Block = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """A shape and a block of it."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    starts = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    stops = tuple(
        draw(st.integers(start, extent)) for start, extent in zip(starts, shape, strict=True)
    )
    return shape, starts, stops


def drawn(
    shape: tuple[int, ...],
    starts: tuple[int, ...],
    stops: tuple[int, ...],
    dtype: str = "float32",
    name: str = "w",
    threads: int = 1,
) -> torch.Tensor:
    parameter = Parameter(Value(name, DType(dtype), shape), NORMAL)
    return init_shard(parameter, TensorSlice(starts, stops), 9, threads)


def whole(shape: tuple[int, ...], dtype: str = "float32", name: str = "w") -> torch.Tensor:
    return drawn(shape, (0,) * len(shape), shape, dtype, name)


@given(blocks(), st.integers(1, 20), st.integers(1, 3))
def test_blocks_in_pieces(block: Block, piece: int, threads: int) -> None:
    shape, starts, stops = block
    expected = whole(shape)[tuple(map(slice, starts, stops))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(random_tensors.PIECE_ELEMENTS, "cpu", piece)
        assert torch.equal(drawn(*block, threads=threads), expected)


def test_a_large_table_by_two_threads() -> None:
    block = (700, 400), (13, 30), (690, 370)
    assert torch.equal(drawn(*block, threads=2), drawn(*block))
    assert torch.equal(drawn(*block), whole((700, 400))[13:690, 30:370])


@given(st.integers(0, 2**20 - 8), st.integers(0, 2**20 - 8), st.integers(1, 8), st.integers(1, 8))
def test_blocks_far_inside_a_table_that_fits_nowhere(
    row: int, column: int, rows: int, columns: int
) -> None:
    """Element (i, j) of a tebi-element table is made from word 2^20 · i + j of its stream."""
    found = drawn((2**20, 2**20), (row, column), (row + rows, column + columns))
    key = key_of(9, Purpose.PARAMETER, parameters._key_number("w"))
    for index in range(rows):
        words = draw_sequence(key, 2**20 * (row + index) + column, columns)
        assert torch.equal(found[index], standard_normal(words) * 0.5)


def test_a_narrow_block_draws_little_more_than_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    draw = random_tensors.draw_words

    def counting(rows: CounterRows, start: int, stop: int, key: tuple[int, int]) -> torch.Tensor:
        words = draw(rows, start, stop, key)
        counted.append(words.numel())
        return words

    monkeypatch.setattr(random_tensors, "draw_words", counting)
    drawn((256, 4096), (0, 512), (256, 1024))
    assert sum(counted) == 256 * 512
    counted.clear()
    drawn((4096, 64), (0, 8), (4096, 16))
    assert sum(counted) == 4096 * 8
    counted.clear()
    drawn((4096, 63), (0, 8), (4096, 16))
    assert sum(counted) <= 4096 * (8 + 4)
    assert max(counted) <= 2 * random_tensors.PIECE_ELEMENTS["cpu"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_the_element_type_only_rounds(dtype: str) -> None:
    assert torch.equal(whole((37, 5), dtype=dtype), whole((37, 5)).to(getattr(torch, dtype)))


def test_parameters_are_told_apart_by_name_not_by_index() -> None:
    """Another plan may count them otherwise."""
    assert not torch.equal(whole((50,)), whole((50,), name="v"))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_parameters(shape: tuple[int, ...]) -> None:
    assert whole(shape).shape == shape


def test_scale_and_mean() -> None:
    numbers = whole((300, 300))
    assert abs(numbers.mean()) < 0.01
    assert abs(numbers.std() - 0.5) < 0.01
    assert len(numbers.unique()) > 0.99 * math.prod(numbers.shape)
