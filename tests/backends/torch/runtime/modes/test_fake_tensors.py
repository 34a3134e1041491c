"""Tensors without values: their forms are those of tensors with values, and what they would take is
counted.
"""

from __future__ import annotations

import pytest
import torch

from autopipe.backends.torch.runtime.modes.dry_run import use_fake_tensors
from autopipe.ir.errors import LaunchError


def test_memory_is_counted_while_a_tensor_is_alive_and_not_taken() -> None:
    with use_fake_tensors(torch.device("cpu")) as tensors:
        huge = torch.empty(1 << 40)
        view = huge.view(1 << 20, 1 << 20).t()
        assert tensors.peak_bytes == 4 << 40
        del huge
        other = torch.zeros(1 << 30)
        assert tensors.peak_bytes == (4 << 40) + (4 << 30)
        del view, other
        assert torch.ones(1 << 40, dtype=torch.bool).shape == (1 << 40,)
        assert tensors.peak_bytes == (4 << 40) + (4 << 30)


def test_autocast_gives_the_types_that_it_gives_with_values() -> None:
    weight = torch.ones(4, 4)
    x = torch.ones(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        types = [(x @ weight).dtype, torch.softmax(x @ weight, 1).dtype, (x + weight[:2]).dtype]
    with use_fake_tensors(torch.device("cpu")), torch.autocast("cpu", dtype=torch.bfloat16):
        weight = torch.empty(4, 4)
        x = torch.empty(2, 4)
        assert [
            (x @ weight).dtype,
            torch.softmax(x @ weight, 1).dtype,
            (x + weight[:2]).dtype,
        ] == types


@pytest.mark.parametrize(
    "operation", [torch.nonzero, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy]
)
def test_an_operator_that_needs_values_says_so(operation: object) -> None:
    assert callable(operation)
    with (
        pytest.raises(LaunchError, match="reads values") as caught,
        use_fake_tensors(torch.device("cpu")),
    ):
        operation(torch.empty(1))
    assert "--device cpu" in caught.value.hint
