"""Devices, compiled functions and the kernel for GPUs draw equal numbers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from autopipe.backends.torch import random_comparison
from autopipe.backends.torch.random_comparison import compare_random_numbers
from autopipe.backends.torch.runtime.random_numbers import philox, philox_numpy


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.timeout(900)
def test_a_gpu_draws_the_bits_of_a_cpu() -> None:
    found = compare_random_numbers(torch.device("cuda"), compiled=True)
    assert [name for name, equal in found.items() if not equal] == []


def test_every_kind_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of another key are found to differ."""
    cpu = torch.device("cpu")
    assert all(compare_random_numbers(cpu).values())
    draws = random_comparison._draw_functions()
    expected = {name: draw(cpu) for name, draw in draws.items()}
    monkeypatch.setattr(philox_numpy, "_KEY_STEPS", (1, 2))
    monkeypatch.setattr(philox, "_KEY_STEPS", (1, 2))
    for name, draw in draws.items():
        assert not random_comparison._are_equal(expected[name], draw(cpu)), name


_BY_KERNEL = """
import torch
from autopipe.backends.torch.runtime.random_numbers.philox import CounterRows, draw_words
from autopipe.backends.torch.runtime.random_numbers.philox_kernel import draw_words_by_kernel

def column(*numbers):
    return torch.tensor(numbers)[:, None]

zero = column(0)
low, high = column(3, 2**32 - 1, 17), column(2**31, 5, 2**32 - 1)
rows = (
    CounterRows(column(2**32 - 3), zero, zero),
    CounterRows(column(0, 2**40, 2**33 - 1), low, high),
    CounterRows(column(7), zero, high, low),
    CounterRows(column(7), low, column(2**32 - 5), high),
)
for each in rows:
    for key in ((2**32 - 1, 5), (torch.tensor(9), torch.tensor(2**31))):
        for start, stop in ((0, 1), (3, 3), (5, 1400)):
            expected = draw_words(each, start, stop, key)
            found = draw_words_by_kernel(each.first, each.second, each.third, each.fourth, start, stop, key)
            assert torch.equal(found, expected)
print("equal")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton comes with CUDA builds of torch"
)
def test_the_kernel_draws_the_words_of_torch_operators() -> None:
    """By Triton's interpreter, which needs no GPU."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", _BY_KERNEL],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "equal\n", ran.stderr
