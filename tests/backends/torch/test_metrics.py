"""The log of a run: lines of JSON, TensorBoard's events, W&B's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopipe.backends.torch.metrics import (
    JsonLines,
    LogSettings,
    MetricsLog,
    TensorBoard,
    WeightsAndBiases,
)
from autopipe.ir.errors import ConfigurationError
from tests.full_disk import small_files


def record(step: int, **figures: Any) -> dict[str, Any]:
    found = {
        "loss": 4.0 - step,
        "step_time_s": 0.5,
        "samples_per_s": 8.0,
        "peak_memory_bytes": [5, 7],
    }
    return {"step": step, **found, "communication_bytes": {"send": 64}, **figures}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_step_that_comes_again_replaces_it_and_later_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLines(path)
    for step in range(4):
        first.write(record(step))
    first.write({"step": 3, "eval_loss": 1.0})
    with path.open("a") as torn:
        torn.write('{"step": 4, "lo')
    again = JsonLines(path)
    for step in (2, 3):
        again.write(record(step, loss=9.0))
    assert [(each["step"], each["loss"]) for each in lines(path)] == [
        (0, 4.0),
        (1, 3.0),
        (2, 9.0),
        (3, 9.0),
    ]


def test_every_second_step_is_logged_with_the_mean_of_times_and_the_last_one(
    tmp_path: Path,
) -> None:
    warned: list[str] = []
    with MetricsLog([JsonLines(tmp_path / "metrics.jsonl")], 2, warned.append) as log:
        log.add({"note": "of no step"})
        for step, seconds in enumerate((9.0, 0.5, 1.5, 1.0)):
            log.add(
                record(step, step_time_s=seconds, samples_per_s=8 / seconds, grad_norm=float("inf"))
            )
    found = lines(tmp_path / "metrics.jsonl")
    assert [each["step"] for each in found] == [0, 2, 3]
    assert found[1]["loss"] == 2.0 and found[1]["step_time_s"] == 1.0
    assert found[1]["samples_per_s"] == pytest.approx(8.0), "sixteen samples in two seconds"
    assert found[1]["grad_norm"] is None, "JSON has no infinity"
    assert not warned


def test_a_writer_that_fails_is_left_out_with_a_warning(tmp_path: Path) -> None:
    class Full(JsonLines):
        def write(self, record: Any) -> None:
            raise OSError("no space left on device")

    warned: list[str] = []
    with MetricsLog(
        [Full(tmp_path / "full"), JsonLines(tmp_path / "metrics.jsonl")], 1, warned.append
    ) as log:
        log.add(record(0))
        log.add(record(1))
    assert warned == [
        f"Full writes no more to {tmp_path / 'full'}: OSError: no space left on device"
    ]
    assert len(lines(tmp_path / "metrics.jsonl")) == 2


def test_a_full_disk_is_told_once_in_one_line_with_the_files_name_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    warned: list[str] = []
    with small_files(400), MetricsLog([JsonLines(path)], 1, warned.append) as log:
        for step in range(6):
            log.add(record(step))
    assert warned == [f"JsonLines writes no more to {path}: File too large"]
    assert path.stat().st_size <= 400
    JsonLines(path).write(record(1))
    assert [each["step"] for each in lines(path)] == [0, 1], (
        "a resumed run goes on behind the last whole line"
    )


def test_a_disk_that_is_full_when_a_run_resumes_is_told_before_ranks_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}')
    with (
        small_files(11),
        pytest.raises(
            ConfigurationError, match="the metrics log cannot be written: File too large"
        ) as caught,
    ):
        LogSettings(tmp_path).open({}, print)
    assert caught.value.where == str(path)


def test_a_device_in_the_place_of_the_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(ConfigurationError, match="is not a regular file"):
        LogSettings(tmp_path).check(resume=True)


def test_tensorboard_reads_what_was_written_and_not_what_a_restart_replaced(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoard(tmp_path)
    for step, loss in ((0, 4.0), (1, 3.0), (2, 2.0), (1, 2.5), (2, 1.5)):
        writer.write(record(step, loss=loss, learning_rate=None))
    writer.write({"step": 2, "eval_loss": 0.5})
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {
        "train/loss", "eval/loss", "perf/step_time_s", "perf/samples_per_s", "memory/peak_bytes",
        "communication_bytes/send",
    }  # fmt: skip
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [
        (0, 4.0),
        (1, 2.5),
        (2, 1.5),
    ]
    assert events.Scalars("memory/peak_bytes")[0].value == 7


def test_wandb_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    writer = WeightsAndBiases("project", tmp_path, {"batch_size": 4})
    writer.write(record(0))
    writer.close()
    wandb.teardown()  # As at the process's end.
    (stored,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"train/loss" in stored.read_bytes()


def test_the_log_of_another_run_is_kept(tmp_path: Path) -> None:
    settings = LogSettings(tmp_path / "log")
    settings.check(resume=False)
    assert not settings.folder.exists(), "a check writes nothing"
    with settings.open({}, print) as log:
        log.add(record(0))
    with pytest.raises(ConfigurationError, match="log of another run"):
        settings.check(resume=False)
    settings.check(resume=True)
    (settings.folder / "metrics.jsonl").write_text("no JSON\n")
    with pytest.raises(ConfigurationError, match="line 1 is not an entry of a step"):
        settings.check(resume=True)


@pytest.mark.parametrize("text", ["my notes", '{"loss": 1}', "no JSON\n", '{"step": 1}\nmy notes'])
@pytest.mark.parametrize("resume", [False, True])
def test_a_file_that_is_no_log_is_kept(tmp_path: Path, text: str, resume: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"is not an entry of a step|log of another run"):
        LogSettings(tmp_path).check(resume=resume)
    with pytest.raises(ConfigurationError, match="is not an entry of a step"):
        JsonLines(path)
    assert path.read_text() == text


def test_a_last_line_without_its_end_is_kept_if_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}')
    LogSettings(tmp_path).check(resume=True)
    JsonLines(path).write({"step": 2})
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'
    for part in ("{", '{"step', '{"step": 3, "loss": 0.'):
        path.write_text('{"step": 0}\n' + part)
        JsonLines(path).write({"step": 1})
        assert path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        LogSettings(tmp_path / "file" / "log").check(resume=False)
