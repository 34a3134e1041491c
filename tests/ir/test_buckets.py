"""Buckets cover every element once, in equal shares, and runs are boxes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir import program as buckets
from autopipe.ir.program import Bucket, BucketShard, ElementRange, make_buckets

WIDTHS = {"float32": 4, "float64": 8, "float16": 2}
SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def block(
    index: int, elements: int, ranks: tuple[int, ...], dtype: str = "float32", home: int | None = 0
) -> BucketShard:
    return BucketShard(index, elements, dtype, WIDTHS[dtype], ranks, home)


@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=9),
    st.sets(st.integers(0, 40), min_size=2, max_size=9).map(lambda ranks: tuple(sorted(ranks))),
    st.sampled_from(sorted(WIDTHS)),
)
def test_every_element_is_in_one_share(
    sizes: list[int], ranks: tuple[int, ...], dtype: str
) -> None:
    bucket = Bucket(tuple(block(index, size, ranks, dtype) for index, size in enumerate(sizes)))
    counted = [np.zeros(size, int) for size in sizes]
    for number, rank in enumerate(ranks):
        end = 0
        for run in bucket.element_ranges(rank):
            assert end <= run.at and run.at + run.stop - run.start <= bucket.part_elements
            assert (
                number * bucket.part_elements + run.at == bucket.starts[run.parameter] + run.start
            ), "where it is in the row"
            counted[run.parameter][run.start : run.stop] += 1
            end = run.at + run.stop - run.start
    assert all((each == 1).all() for each in counted)
    assert bucket.elements == len(ranks) * bucket.part_elements
    width = WIDTHS[dtype]
    assert all(start * width % 16 == 0 for start in (*bucket.starts, bucket.part_elements))
    assert bucket.elements * width <= sum(size * width + 16 for size in sizes) + 16 * len(ranks)


@given(SHAPES, st.data())
def test_a_run_is_its_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    numbers = np.arange(size).reshape(shape)
    boxes = list(ElementRange(0, start, stop, 0).boxes(shape))
    found = [
        numbers[tuple(slice(*each) for each in zip(box.starts, box.stops, strict=True))].reshape(-1)
        for box in boxes
    ]
    assert np.concatenate(found).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape))


def test_buckets_by_home_ranks_type_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 24)
    both = (0, 1)
    others = (0, 2)
    blocks = [block(index, 3, both) for index in range(4)]
    blocks += [
        block(4, 3, both, home=None),
        block(5, 3, others, home=1),
        block(6, 3, both, "float64"),
    ]
    found = [
        (each.home, each.ranks, [one.parameter for one in each.blocks])
        for each in make_buckets(blocks)
    ]
    assert found == [
        (None, both, [4]),
        (0, both, [6]),
        (0, both, [3, 2]),
        (0, both, [1, 0]),
        (1, others, [5]),
    ], "the last parameters come first, types stay apart"
