"""On a GPU a checkpoint is copied beside the steps that go on, and no update overtakes it."""

from __future__ import annotations

import pytest
import torch

from autopipe.backends.torch.runtime.state.checkpoint import HostCopies
from tests.backends.torch.runtime.stand_in_cuda import Device


def test_copies_are_made_on_a_stream_of_their_own_and_writes_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    device.install(monkeypatch)
    computing = torch.cuda.current_stream()
    copies = HostCopies(torch.device("cuda"))
    copies.delay_until_copied()
    assert not computing.waited_for, "nothing is being copied"  # type: ignore[attr-defined]
    copies.start_copies({"w": torch.arange(3.0), "b": torch.ones(2)})
    (copying,) = device.entered
    assert copying is not computing
    assert copying.waited_for == [computing], "what was launched before is in the copies"
    assert device.pinned == [(3,), (2,)]
    copies.delay_until_copied()
    assert len(computing.waited_for) == 1, "the next update comes behind them"  # type: ignore[attr-defined]
    contents = {each.key: bytes(each.data) for each in copies.contents()}
    assert contents["w"] == torch.arange(3.0).numpy().tobytes()
    copies.start_copies({"w": torch.zeros(3)})
    assert device.pinned == [(3,), (2,)], "buffers are used again"
