"""Settings of a rank on a GPU: how much memory its tensors may take, and how its optimizer
updates.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopipe.backends.torch.fork_server import rank_environment
from autopipe.backends.torch.runtime.startup import limit_memory
from autopipe.backends.torch.runtime.step.optimizers import TensorGroup, make_optimizer

GIB = 2**30


@pytest.mark.parametrize(("limit", "share"), [(20 * GIB, 0.25), (80 * GIB, 1.0), (96 * GIB, 1.0)])
def test_tensors_take_no_more_than_the_plan_allows(
    limit: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB)
    )
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: set_to.append(given)
    )
    limit_memory(limit, torch.device("cuda", 1))
    assert set_to == [(share, torch.device("cuda", 1))]


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_of_memory_grow_unless_the_user_has_settings(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    with rank_environment():
        assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    monkeypatch.setenv(name, "max_split_size_mb:64")
    with rank_environment():
        found = {
            each: os.environ.get(each) for each in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        }
    assert [value for value in found.values() if value] == ["max_split_size_mb:64"] and found[name]


class OnGpu(torch.nn.Parameter):
    """A parameter that says it is on a GPU. The update itself is the CPU's kernel of the same
    name.
    """

    is_cuda = True


SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8},
    "momentum": {"name": "sgd", "lr": 0.01, "weight_decay": 0.1, "momentum": 0.9},
    "sgd": {"name": "sgd", "lr": 0.01, "weight_decay": 0.0, "momentum": 0.0},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_update_in_one_kernel_gives_the_same_numbers(name: str) -> None:
    torch.manual_seed(0)
    starts = [torch.randn(7, 5), torch.randn(3)]
    there, here = ([kind(each.clone()) for each in starts] for kind in (OnGpu, torch.nn.Parameter))
    fused, usual = (
        make_optimizer(SETTINGS[name], [TensorGroup(tuple(each), SETTINGS[name]["weight_decay"])])
        for each in (there, here)
    )
    assert fused is not None and usual is not None
    assert fused.defaults["fused"] is True and not usual.defaults["fused"]
    for _ in range(20):
        for first, second in zip(there, here, strict=True):
            first.grad = torch.randn(first.shape)
            second.grad = first.grad.clone()
        fused.step()
        usual.step()
    for first, second in zip(there, here, strict=True):
        assert torch.linalg.vector_norm(
            first.data - second.data
        ) <= 1e-6 * torch.linalg.vector_norm(second.data)
