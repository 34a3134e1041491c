"""Checkpoints of one rank: what is saved comes back, and no crash loses the last."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from autopipe.backends.torch import checkpoint as shard_file
from autopipe.backends.torch.checkpoint import (
    MANIFEST_FILE,
    committed_steps,
    manifest_text,
    rank_file,
    read_checkpoint,
)
from autopipe.backends.torch.runtime.communication.transport import ControlGroup
from autopipe.backends.torch.runtime.data.sample_order import RunProgress
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.state.checkpoint import Checkpointer
from autopipe.backends.torch.runtime.state.checkpoint_state import TrainingState
from autopipe.backends.torch.runtime.step.optimizers import TensorGroup, make_optimizer
from autopipe.backends.torch.runtime.watch.heartbeat import Heartbeat
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.graph import DType, Parameter
from autopipe.ir.layout import full_slice
from autopipe.ir.program import ParameterShard
from tests.backends.torch.runtime.state.checkpointing.saving import ADAMW, drawn, manifest_with

MOMENTUM = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "shard": False}
PLAIN = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "shard": False}
HOSTILE = "../../w'\"\n"
BATCH = 8


def manifest_of(optimizer: dict[str, Any], **changes: Any) -> Manifest:
    parameters = (drawn(HOSTILE, (4, 3)), drawn("frozen", (4, 3), trainable=False))
    shards = (
        ParameterShard(0, full_slice((4, 3)), (0,), None),
        ParameterShard(1, full_slice((4, 3)), (0,), None),
    )
    form: dict[str, Any] = {
        "micro_batches": 2,
        "micro_batch_size": BATCH // 2,
        "optimizer": optimizer,
    }
    return manifest_with(**form | {"parameters": parameters, "shards": (shards,)} | changes)


class Training:
    """One rank's training, small enough to follow."""

    def __init__(self, folder: Path, settings: dict[str, Any] = ADAMW, **changes: Any) -> None:
        manifest = manifest_of(settings, **changes)
        torch.manual_seed(3)
        self.parameters = {0: torch.randn(4, 3, requires_grad=True), 1: torch.randn(4, 3)}
        self.optimizer = make_optimizer(
            settings, [TensorGroup((self.parameters[0],), settings["weight_decay"])]
        )
        cpu = torch.device("cpu")
        state = TrainingState(manifest, 0, self.parameters, self.optimizer, cpu)
        self.saved = Checkpointer(folder, manifest, state, ControlGroup(0, 1, 60.0, Heartbeat()))

    def step(self) -> float:
        loss = ((self.parameters[0] - torch.rand(4, 3)) ** 2).sum()
        loss.backward()
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def start_save(self, step: int) -> None:
        self.saved.save(RunProgress(step, step * BATCH), 7)

    def save(self, step: int) -> None:
        self.start_save(step)
        self.saved.wait()

    def restore(self) -> int:
        found = self.saved.restore()
        return 0 if found is None else found.step


def resumed(folder: Path, settings: dict[str, Any] = ADAMW, **changes: Any) -> tuple[Training, int]:
    """A training that goes on from the newest checkpoint, and its step; it leaves the folder to
    others.
    """
    training = Training(folder, settings, **changes)
    try:
        return training, training.restore()
    finally:
        training.saved.close()


def saved_once(folder: Path) -> Path:
    """A committed checkpoint after step 1."""
    training = Training(folder)
    training.step()
    training.save(1)
    training.saved.close()
    return folder / "step_00000001"


@pytest.mark.parametrize("settings", [ADAMW, MOMENTUM, PLAIN], ids=["adamw", "momentum", "sgd"])
def test_a_restored_rank_goes_on_bit_by_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    first = Training(tmp_path, settings)
    first.step()
    first.step()
    first.save(2)
    expected = [first.step() for _ in range(3)]
    first.saved.close()
    second, step = resumed(tmp_path, settings)
    assert step == 2
    assert [second.step() for _ in range(3)] == expected
    assert torch.equal(second.parameters[1], first.parameters[1])


def test_random_numbers_under_another_plan_follow_from_the_seed_and_repeat_none(
    tmp_path: Path,
) -> None:
    saved_once(tmp_path)
    drawn = []
    for plan in ("plan", "other", "other"):
        resumed(tmp_path, plan=plan)
        drawn.append(torch.rand(8).tolist())
    torch.manual_seed(3)
    assert drawn[1] == drawn[2] and drawn[1] not in (drawn[0], torch.rand(8).tolist())


def test_what_is_saved_is_the_state_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go on while files are written, and change nothing of them."""
    goes_on = threading.Event()
    write = shard_file.os.fsync

    def late(descriptor: int) -> None:
        assert goes_on.wait(60)
        write(descriptor)

    first = Training(tmp_path)
    first.step()
    kept = first.parameters[0].detach().clone()
    monkeypatch.setattr(os, "fsync", late)
    first.start_save(1)
    first.step()
    assert committed_steps(tmp_path) == []
    goes_on.set()
    first.saved.close()
    second, step = resumed(tmp_path)
    assert step == 1
    assert torch.equal(second.parameters[0], kept) and not torch.equal(first.parameters[0], kept)


def test_a_folder_without_checkpoints_starts_at_zero(tmp_path: Path) -> None:
    assert resumed(tmp_path / "none")[1] == 0


def test_the_manifest_says_what_each_tensor_is_and_keys_are_safe(tmp_path: Path) -> None:
    path = saved_once(tmp_path)
    found = read_checkpoint(path)
    assert (found.step, found.samples, found.seed, found.optimizer) == (1, BATCH, 7, ADAMW)
    parameter = found.parameter(HOSTILE)
    assert parameter is not None and parameter.trainable
    assert [name for name, _ in parameter.state] == ["exp_avg", "exp_avg_sq"]
    assert parameter.scalars == (("step", 1.0),)
    with safe_open(path / found.files[0].name, "pt") as stored:
        keys = set(stored.keys())
    assert keys == {"p0.0", "p0.0.exp_avg", "p0.0.exp_avg_sq", "p1.0", "random.cpu"}


def test_the_two_newest_are_kept(tmp_path: Path) -> None:
    training = Training(tmp_path)
    for step in range(1, 5):
        training.start_save(step)
    training.saved.close()
    assert committed_steps(tmp_path) == [3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "step_00000003",
        "step_00000004",
    ]


def test_two_runs_do_not_save_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopipe.backends.torch.checkpoint._REPLACED_RUN_PATIENCE_S", 0.2)
    training = Training(tmp_path)
    with pytest.raises(ConfigurationError, match="another run is writing checkpoints"):
        Training(tmp_path)
    training.saved.close()
    resumed(tmp_path)


class Crash(BaseException):
    """The machine stops here."""


CALLS: list[tuple[Any, str]] = [
    (os, "fsync"),
    (os, "rename"),
    (shutil, "rmtree"),
    (Path, "mkdir"),
    (Path, "open"),
    (Path, "write_text"),
]


def test_a_crash_at_any_instant_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"
    training = Training(folder)
    state: dict[int, torch.Tensor] = {}

    def save(step: int) -> None:
        training.step()
        state[step] = training.parameters[0].detach().clone()
        training.save(step)

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
        training.saved.close()
        again, step = resumed(folder)
        assert max(last, 3) <= step <= instant + 4
        last = step
        assert torch.equal(again.parameters[0], state[step])
        training.saved._lock_folder()
    training.saved.close()
    assert crashes > 8, "the crashes did not reach every call"
    assert last > 3, "no crash came after the commit"
    assert len(list(folder.iterdir())) == 3, "the save after the last crash cleans up"


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
    path = saved_once(tmp_path) / rank_file(0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    if change == "remove":
        path.unlink()
    else:
        path.write_bytes(data if change == "flip" else data[:-1])
    with pytest.raises(LaunchError, match="damaged") as caught:
        resumed(tmp_path)
    assert caught.value.hint == "remove step_00000001 to go on from the one before"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": "other/1"}', '{"format": "autopipe.checkpoint/2"}']
)
def test_a_strange_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (saved_once(tmp_path) / MANIFEST_FILE).write_text(text)
    with pytest.raises(LaunchError, match=r"damaged|format"):
        resumed(tmp_path)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    saved_once(tmp_path)
    hostile, frozen = manifest_of(ADAMW).parameters

    def changed(parameter: Parameter, **changes: Any) -> Parameter:
        return replace(parameter, value=replace(parameter.value, **changes))

    shards = ((ParameterShard(0, full_slice((4, 3)), (0,), None),),)
    for changes, difference in (
        ({"model_digest": "other"}, "another model: m.onnx had digest model, the program's m.onnx has other"),
        ({"parameters": (changed(hostile, name="v"), frozen)}, "another model: it has no parameter 'v'"),
        ({"parameters": (hostile, changed(frozen, shape=(4, 4)))}, r"'frozen' is float32 .4, 3., .* float32 .4, 4."),
        ({"parameters": (hostile, changed(frozen, dtype=DType.FLOAT16))}, "is float32 .* float16"),
        ({"parameters": (hostile,), "shards": shards}, "it has a parameter 'frozen', the program has none"),
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=difference):
            resumed(tmp_path, **changes)
    with pytest.raises(
        ConfigurationError, match="another optimizer: adamw, the program's is sgd with momentum"
    ):
        resumed(tmp_path, MOMENTUM)
    assert resumed(tmp_path, ADAMW | {"lr": 0.2}, plan="other")[1] == 1


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
def test_a_full_disk_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    training = Training(tmp_path)
    training.save(1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        training.start_save(2)
        with pytest.raises(
            LaunchError, match="cannot be written: No space left on device"
        ) as caught:
            training.saved.close()
    assert "earlier checkpoints are unchanged" in str(caught.value)
    training.saved.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step_00000001"]
    assert resumed(tmp_path)[1] == 1


def test_a_failed_save_is_seen_while_steps_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path)
    training.saved.has_ended()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "rename", full)
    training.start_save(1)
    with pytest.raises(LaunchError, match="No space left"):
        for _ in range(1000):
            training.step()
            training.saved.has_ended()
            threading.Event().wait(0.01)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot be written: Not a directory"):
        Training(tmp_path / "file" / "saved")


def test_a_parameter_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    path = saved_once(tmp_path)
    found = read_checkpoint(path)
    first = found.parameters[0]
    short = replace(first, value=replace(first.value, blocks=()))
    (path / MANIFEST_FILE).write_text(
        manifest_text(replace(found, parameters=(short, *found.parameters[1:])))
    )
    with pytest.raises(LaunchError, match="lacks 12 of 12 elements"):
        resumed(tmp_path)
    json.loads((path / MANIFEST_FILE).read_text())
