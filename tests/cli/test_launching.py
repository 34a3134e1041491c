"""Where a launch says that its ranks run."""

from __future__ import annotations

import pytest
import torch

from autopipe.api.launch_config import placement_note
from autopipe.ir.errors import ConfigurationError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As many CUDA devices as the test asks for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("gpus", "device", "ranks", "note"),
    [
        (0, "cpu", 4, "4 ranks on the CPU, over gloo"),
        (0, "auto", 4, "no CUDA device: 4 ranks on the CPU, over gloo"),
        (2, "cpu", 4, "4 ranks on the CPU, over gloo"),
        (4, "auto", 4, "4 ranks on 4 GPUs"),
        (1, "cuda", 4, "4 ranks share 1 GPU"),
        (0, "cpu", 1, "1 rank on the CPU, over gloo"),
        (2, "auto", 1, "1 rank on 1 GPU"),
    ],
    indirect=["gpus"],
)
def test_the_note_says_where_the_ranks_run(device: str, ranks: int, note: str) -> None:
    assert placement_note(device, ranks) == note


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("gpus", [0], indirect=True)
def test_cuda_without_a_device_is_refused_before_any_rank_starts() -> None:
    with pytest.raises(ConfigurationError, match="this machine lacks a CUDA device"):
        placement_note("cuda", 4)
