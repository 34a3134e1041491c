"""Checkpoints of one rank: what is saved comes back, and no crash loses the last."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from autopipe.backends.torch.runtime import checkpoint, checkpoint_folder
from autopipe.backends.torch.runtime.checkpoint import Checkpointer, TrainingState
from autopipe.backends.torch.runtime.manifest import Manifest, ParameterEntry, ShardEntry, Storage
from autopipe.backends.torch.runtime.optimizers import make_optimizer
from autopipe.backends.torch.runtime.transport import Transport
from autopipe.ir.errors import ConfigurationError, LaunchError

ADAMW = {"name": "adamw", "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
MOMENTUM = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
PLAIN = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
HOSTILE = "../../w'\"\n"


def manifest_of(optimizer: dict[str, Any], plan: str = "plan") -> Manifest:
    entries = tuple(
        ParameterEntry(name, "float32", (4, 3), trainable, Storage("draw"))
        for name, trainable in ((HOSTILE, True), ("frozen", False))
    )
    shards = (ShardEntry(0, (2, 0), (4, 3), (0,)), ShardEntry(1, (0, 0), (4, 3), (0,)))
    form: dict[str, Any] = dict.fromkeys(Manifest.__dataclass_fields__, ())
    form |= {"folder": Path(), "model": Path(), "model_digest": "model", "plan": plan, "world_size": 1}
    form |= {"train": True, "micro_batches": 2, "micro_batch_size": 4, "optimizer": optimizer}
    return Manifest(**form | {"parameters": entries, "shards": (shards,)})


class Training:
    """One rank's training, small enough to follow."""

    def __init__(self, folder: Path, settings: dict[str, Any] = ADAMW, plan: str = "plan") -> None:
        manifest = manifest_of(settings, plan)
        torch.manual_seed(3)
        self.parameters = {0: torch.randn(2, 3, requires_grad=True), 1: torch.randn(4, 3)}
        self.optimizer = make_optimizer(settings, [self.parameters[0]])
        shards = manifest.shards[0]
        self.state = TrainingState(manifest, shards, self.parameters, self.optimizer, torch.device("cpu"))
        self.saved = Checkpointer(folder, manifest, Transport("cpu"), self.state)

    def step(self) -> float:
        loss = ((self.parameters[0] - torch.rand(2, 3)) ** 2).sum()
        loss.backward()
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@pytest.mark.parametrize("settings", [ADAMW, MOMENTUM, PLAIN], ids=["adamw", "momentum", "sgd"])
def test_a_restored_rank_goes_on_bit_by_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    first = Training(tmp_path, settings)
    first.step()
    first.step()
    first.saved.save(2)
    expected = [first.step() for _ in range(3)]
    second = Training(tmp_path, settings)
    second.parameters[1].zero_()
    assert second.saved.restore() == 2
    assert [second.step() for _ in range(3)] == expected
    assert torch.equal(second.parameters[1], first.parameters[1])


def test_a_folder_without_checkpoints_starts_at_zero(tmp_path: Path) -> None:
    assert Training(tmp_path / "none").saved.restore() == 0


def test_the_manifest_says_what_each_tensor_is_and_keys_are_safe(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step()
    training.saved.save(1)
    path = tmp_path / "step_00000001"
    form = json.loads((path / "manifest.json").read_text())
    assert (form["format"], form["step"], form["samples"]) == ("autopipe.checkpoint/1", 1, 8)
    entry = form["ranks"][0]["tensors"][0]
    assert (entry["name"], entry["shape"], entry["starts"], entry["stops"]) == (HOSTILE, [4, 3], [2, 0], [4, 3])
    with safe_open(path / form["ranks"][0]["file"], "pt") as stored:
        keys = set(stored.keys())
    assert keys == {"p0", "p0.exp_avg", "p0.exp_avg_sq", "p0.step", "p1", "random.cpu"}
    assert set(entry["state"].values()) < keys


def test_the_two_newest_are_kept(tmp_path: Path) -> None:
    training = Training(tmp_path)
    for step in range(1, 5):
        training.saved.save(step)
    assert checkpoint_folder.committed_steps(tmp_path) == [3, 4]
    assert len(list(tmp_path.iterdir())) == 2


class Crash(BaseException):
    """The machine stops here."""


CALLS: list[tuple[Any, str]] = [
    (os, "fsync"),
    (os, "rename"),
    (shutil, "rmtree"),
    (checkpoint, "save_file"),
    (Path, "mkdir"),
    (Path, "write_text"),
]


def test_a_crash_at_any_instant_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "saved"
    training = Training(folder)
    state: dict[int, torch.Tensor] = {}

    def save(step: int) -> None:
        training.step()
        state[step] = training.parameters[0].detach().clone()
        training.saved.save(step)

    for step in (1, 2, 3):
        save(step)
    last = crashes = 0
    for instant in range(100):
        remaining = [instant]
        with monkeypatch.context() as patch:
            for owner, name in CALLS:
                patch.setattr(owner, name, _crashing(getattr(owner, name), remaining))
            try:
                save(instant + 4)
            except Crash:
                crashes += 1
            else:
                break
        again = Training(folder)
        step = again.saved.restore()
        assert max(last, 3) <= step <= instant + 4
        last = step
        assert torch.equal(again.parameters[0], state[step])
    assert crashes > 8, "the crashes did not reach every call"
    assert last > 3, "no crash came after the commit"
    assert len(list(folder.iterdir())) == 2, "the save after the last crash cleans up"


def _crashing(call: Callable[..., Any], remaining: list[int]) -> Callable[..., Any]:
    """The call, or a crash before it once `remaining` calls were made."""

    def run(*arguments: Any, **named: Any) -> Any:
        if remaining[0] == 0:
            raise Crash
        remaining[0] -= 1
        return call(*arguments, **named)

    return run


@pytest.mark.parametrize("change", ["flip", "cut", "remove"])
def test_a_damaged_file_is_found(tmp_path: Path, change: str) -> None:
    training = Training(tmp_path)
    training.saved.save(1)
    path = tmp_path / "step_00000001" / checkpoint_folder.rank_file(0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    if change == "remove":
        path.unlink()
    else:
        path.write_bytes(data if change == "flip" else data[:-1])
    with pytest.raises(LaunchError, match=r"damaged|cannot be read"):
        Training(tmp_path).saved.restore()


@pytest.mark.parametrize("text", ["", "[]", '{"format": "other/1"}', '{"format": "autopipe.checkpoint/1"}'])
def test_a_strange_manifest_is_refused(tmp_path: Path, text: str) -> None:
    Training(tmp_path).saved.save(1)
    (tmp_path / "step_00000001" / "manifest.json").write_text(text)
    with pytest.raises((LaunchError, ConfigurationError), match=r"damaged|format|another"):
        Training(tmp_path).saved.restore()


def test_a_checkpoint_of_another_plan_or_optimizer_is_refused(tmp_path: Path) -> None:
    Training(tmp_path).saved.save(1)
    with pytest.raises(ConfigurationError, match="another plan"):
        Training(tmp_path, plan="other").saved.restore()
    with pytest.raises(ConfigurationError, match="another optimizer"):
        Training(tmp_path, MOMENTUM).saved.restore()


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path)
    training.saved.save(1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(LaunchError, match="cannot be written: No space left on device"):
            training.saved.save(2)
    assert Training(tmp_path).saved.restore() == 1


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot be written: Not a directory"):
        Training(tmp_path / "file" / "saved").saved.save(1)
