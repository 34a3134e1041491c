"""Sizes, rates and times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.configs.yaml_source import BYTES, BYTES_PER_SECOND, FLOPS, SECONDS


@pytest.mark.parametrize(
    ("text", "size"),
    [("14GiB", 14 * 2**30), ("512MB", 512 * 10**6), ("1.5 KiB", 1536), ("7", 7), ("2kB", 2000)],
)
def test_sizes(text: str, size: int) -> None:
    assert BYTES.parse(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "3Mi", "14 gib", "14GiBs", "-1B", "0.5B", "1e3B", "14GB/s", "٣B", "nan", "1.2.3B"],
)
def test_what_is_no_size(text: str) -> None:
    assert BYTES.parse(text) is None


def test_rates_and_times() -> None:
    assert BYTES_PER_SECOND.parse("900GB/s") == 900e9
    assert BYTES_PER_SECOND.parse("900GB") is None
    assert [BYTES_PER_SECOND.parse(text) for text in ("400Gb/s", "400 Gbit/s", "400Gbps")] == [
        50e9
    ] * 3
    assert BYTES_PER_SECOND.parse("100") == 100
    assert FLOPS.parse("400Gb/s") is None
    assert FLOPS.parse("15.7TFLOP/s") == 15.7e12
    assert SECONDS.parse("15us") == 15e-6
    assert SECONDS.parse("10s") == 10.0
    assert SECONDS.parse("1Ms") is None


@given(st.integers(0, 2**62))
def test_a_size_is_printed_exactly(size: int) -> None:
    assert BYTES.parse(BYTES.format(size)) == size


def test_a_size_is_printed_in_the_largest_exact_unit() -> None:
    assert [BYTES.format(size) for size in (14 * 2**30, 10**9, 1536, 1000, 7)] == [
        "14GiB",
        "1GB",
        "1536B",
        "1kB",
        "7B",
    ]
