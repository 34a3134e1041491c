"""Check that a device and the CPU generate the same random numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from autopipe.backends.torch.runtime.operators import bernoulli, dropout, normal, uniform
from autopipe.backends.torch.runtime.random_numbers import philox
from autopipe.backends.torch.runtime.random_numbers.normal_numbers import standard_normal
from autopipe.backends.torch.runtime.random_numbers.random_streams import RandomStreams
from autopipe.backends.torch.runtime.state.parameters import init_shard
from autopipe.ir.graph import DType, Initializer, Parameter, Value
from autopipe.ir.layout import TensorSlice

_CPU = torch.device("cpu")
_SEED = 3
_LARGE_SLICE = TensorSlice((1, 3), (1500, 2001))
_SHAPE = (1501, 2003)
"""Shape of the tested parameter. Its sizes are multiples neither of the number of words that one
call of the random generator gives nor of the block size of a kernel, so incomplete blocks are
tested too.
"""


def compare_random_numbers(device: torch.device, compiled: bool = False) -> dict[str, bool]:
    """Compare the random numbers that `device` generates with those of the CPU. Return, by the
    description of each test, True if all bits are equal.

    With `compiled`, also test random operators in functions that torch compiles, which takes about
    a minute.
    """
    found = {}
    for name, draw in _draw_functions().items():
        found[name] = _are_equal(draw(_CPU), draw(device))
    if compiled:
        for name, operator in _operator_functions().items():
            run = torch.compile(operator, dynamic=False)
            found[f"{name}, compiled"] = _are_equal(
                operator(_make_random(_CPU)), run(_make_random(device))
            )
    return found


def _draw_functions() -> Mapping[str, Callable[[torch.device], Tensor]]:
    """Return the tests by description. Each test is a function that generates random numbers on a
    device.
    """
    found = {
        "words": _draw_words,
        "words of rows": _draw_words_of_rows,
        "words by torch operators": _draw_words_without_kernel,
        "standard normal numbers": lambda device: standard_normal(_draw_words(device)),
        "integers": lambda device: philox.integers_below(_draw_words(device), 50257),
    }
    for scheme in ("normal", "uniform"):
        for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16):
            found[f"parameter, {scheme}, {dtype.value}"] = _init_parameter_function(scheme, dtype)
    for name, operator in _operator_functions().items():
        found[name] = _function_on_device(operator)
    return found


def _draw_words(device: torch.device) -> Tensor:
    """Draw random words (32-bit integers) of 2^20 consecutive blocks of the generator Philox. The
    counter of the blocks starts 100 below 2^32, so that it exceeds 32 bits.
    """
    first = torch.full((1,), 2**32 - 100, dtype=torch.int64, device=device)
    return philox.draw_words(philox.CounterRows.from_first(first), 0, 1 << 20, (5, 2**32 - 1))


def _draw_words_of_rows(device: torch.device) -> Tensor:
    """Draw random words (32-bit integers) of blocks 3 to 1002 of the generator Philox, for several
    rows with counters of up to 2^40.
    """
    first = torch.arange(0, 2**40, 2**36 + 1, device=device)
    return philox.draw_words(philox.CounterRows.from_first(first), 3, 1003, (5, 2**32 - 1))


def _draw_words_without_kernel(device: torch.device) -> Tensor:
    """Draw random words (integers from the generator Philox). On a GPU, use the implementation from
    torch operators, which runs if the faster kernel is not available; on the CPU, use the usual
    implementation.
    """
    draw = philox.draw_words if device.type == "cpu" else philox.draw_words_by_operators
    first = torch.arange(0, 2**40, 2**37 + 1, device=device)
    return draw(philox.CounterRows.from_first(first), 3, 1003, (5, 2**32 - 1))


def _init_parameter_function(scheme: str, dtype: DType) -> Callable[[torch.device], Tensor]:
    """Return a function that generates the initial values of a slice of a parameter of type `dtype`
    on a device. `scheme` is the distribution.
    """
    parameter = Parameter(Value("weight", dtype, _SHAPE), Initializer(scheme, 0.02))
    return lambda device: init_shard(parameter, _LARGE_SLICE, _SEED, 1, device)


def _function_on_device(
    operator: Callable[[RandomStreams], Tensor],
) -> Callable[[torch.device], Tensor]:
    """Return a function of a device that runs the random operator `operator` with a random state on
    this device.
    """
    return lambda device: operator(_make_random(device))


def _make_random(device: torch.device) -> RandomStreams:
    random = RandomStreams(device, draws=True)
    random.begin(_SEED, 5, 7, 7)
    return random


def _operator_functions() -> Mapping[str, Callable[[RandomStreams], Tensor]]:
    """Return random operators by description, as functions of a random state."""
    return {
        "dropout": lambda random: dropout(
            torch.ones(17, 33, 257, device=random.device), 0.1, random(1, (), 0)
        ),
        "dropout, samples last": lambda random: dropout(
            torch.ones(33, 258, device=random.device), 0.1, random(1, (), 1)
        ),
        "normal operator": lambda random: normal(
            (17, 33, 257), 0.3, 0.7, random(2, (), 0), torch.float32
        ),
        "uniform operator": lambda random: uniform(
            (17, 33, 257), -0.3, 0.7, random(3, (), 0), torch.float32
        ),
        "bernoulli operator": lambda random: bernoulli(
            torch.full((17, 33, 257), 0.3, device=random.device), random(4, (), 0), torch.float32
        ),
    }


def _are_equal(expected: Tensor, found: Tensor) -> bool:
    return torch.equal(expected, found.cpu())
