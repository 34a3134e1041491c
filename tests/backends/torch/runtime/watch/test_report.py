"""Reports of steps: those of short ones are shown several at a time, and none is lost."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopipe.backends.torch.runtime.options import RankOptions
from autopipe.backends.torch.runtime.watch.clock import Clock
from autopipe.backends.torch.runtime.watch.report import Reporter
from autopipe.ir.errors import LaunchError
from autopipe.ir.problem import AVERAGED_LOSS
from autopipe.ir.training import Training
from tests.backends.torch.runtime.stand_in_cuda import Device


class AlonePulse:
    @contextlib.contextmanager
    def record_wait(self) -> Any:
        yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    made.install(monkeypatch)
    return made


@pytest.fixture
def rank(tmp_path: Path, device: Device) -> Any:
    """Rank 0, alone, as far as a reporter looks at it, on a CPU whose clock the tests set."""
    return SimpleNamespace(
        number=0,
        train=False,
        steps_done=0,
        stages={},
        loss_scaler=None,
        learning_rate=None,
        grad_norm=None,
        counted=None,
        device=torch.device("cpu"),
        heartbeat=AlonePulse(),
        clock=Clock(torch.device("cpu")),
        manifest=SimpleNamespace(
            training=Training(),
            loss_division=AVERAGED_LOSS,
            parameters=(),
            batch_size=4,
            predicted_bubble=0.0,
            tokens_per_sample=None,
            model_flops=None,
            peak_flops=None,
        ),
        options=RankOptions(report=tmp_path / "report.jsonl"),
        transport=SimpleNamespace(traffic=Counter(), gather_numbers=lambda numbers: [numbers]),
    )


def steps(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text(encoding="utf-8").splitlines()]


def run(reporter: Reporter, rank: Any, device: Device, count: int, seconds: float) -> None:
    for _ in range(count):
        rank.clock.begin_step()
        device.host += seconds
        reporter.end_step()
        rank.steps_done += 1


def test_the_first_report_is_shown_at_once_and_those_of_short_steps_together(
    rank: Any, device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.options = RankOptions()
    reporter = Reporter(rank)
    run(reporter, rank, device, 1, 0.06)
    assert capsys.readouterr().out.startswith("step 0 ")
    run(reporter, rank, device, 3, 0.06)
    assert not capsys.readouterr().out, "a quarter of a second holds four"
    run(reporter, rank, device, 2, 0.06)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [
        "1",
        "2",
        "3",
        "4",
    ]
    reporter.report()
    reporter.report()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["5"], (
        "each is shown once"
    )


def test_what_a_launcher_reads_is_not_printed(
    rank: Any, device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter(rank)
    run(reporter, rank, device, 1, 0.06)
    reporter.print_on_rank_0("compiled")
    first, second = map(json.loads, rank.options.report.read_text(encoding="utf-8").splitlines())
    assert first["step"] == 0 and second == {"note": "compiled"}
    assert not capsys.readouterr().out


def test_times_of_profiled_steps_are_left_with_their_waits(
    rank: Any, device: Device, tmp_path: Path
) -> None:
    rank.options = RankOptions(profile_times=tmp_path / "times", profile_from=1, profile_to=2)
    rank.clock.keeps_waits = True
    reporter = Reporter(rank)
    for number in range(4):
        rank.clock.begin_step()
        with rank.clock.record_wait("0B0", 3, 7):
            device.host += 0.25
        start = rank.clock.mark()
        device.host += 0.5
        rank.clock.add("0B0", start)
        reporter.end_step()
        rank.steps_done = number + 1
    found = [
        json.loads(line)
        for line in (tmp_path / "times" / "rank_000.jsonl").read_text().splitlines()
    ]
    assert [each["step"] for each in found] == [1, 2]
    assert found[0]["waits"] == [
        {"task": "0B0", "peer": 3, "channel": 7, "start": 0.0, "end": 0.25}
    ]
    assert found[0]["spans"] == [{"task": "0B0", "start": 0.25, "end": 0.75}]
    assert found[0]["seconds"] == 0.75


def test_rates_norm_and_use_of_the_devices(rank: Any, device: Device) -> None:
    rank.train = True
    rank.manifest.tokens_per_sample = 8
    rank.manifest.model_flops = 1e12
    rank.manifest.peak_flops = 8e12
    rank.learning_rate = 0.25
    rank.grad_norm = torch.tensor(3.0)
    rank.stages = {4: stage(2.0)}
    run(Reporter(rank), rank, device, 1, 0.5)
    report = json.loads(rank.options.report.read_text(encoding="utf-8"))
    found = {
        name: report[name] for name in ("loss", "learning_rate", "grad_norm", "tokens_per_s", "mfu")
    }
    assert found == {
        "loss": 2.0,
        "learning_rate": 0.25,
        "grad_norm": 3.0,
        "tokens_per_s": 64.0,
        "mfu": 0.25,
    }
    assert report["tflops_per_device"] == 2.0


def test_a_report_of_a_long_step_is_shown_at_once(
    rank: Any, device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.options = RankOptions()
    reporter = Reporter(rank)
    for number in range(3):
        run(reporter, rank, device, 1, 0.3)
        assert capsys.readouterr().out.startswith(f"step {number} ")


def test_never_more_than_so_many_steps_wait_for_their_report(rank: Any, device: Device) -> None:
    reporter = Reporter(rank)
    run(reporter, rank, device, 17, 1e-6)
    assert steps(rank.options.report) == list(range(17))


def test_figures_of_ranks_come_together_by_step(rank: Any, device: Device) -> None:
    def gather(numbers: list[float]) -> list[list[float]]:
        other = list(numbers)
        for place in (4, 4 + (len(numbers) - 1) // 2):  # Each step's seconds.
            other[place] *= 2
        return [numbers, other]

    reporter = Reporter(rank)
    run(reporter, rank, device, 1, 0.125)
    rank.transport.gather_numbers = gather
    run(reporter, rank, device, 1, 0.1)
    run(reporter, rank, device, 1, 0.2)
    lines = [
        json.loads(line) for line in rank.options.report.read_text(encoding="utf-8").splitlines()
    ]
    assert [(each["step"], each["step_time_s"]) for each in lines] == [
        (0, pytest.approx(0.125)),
        (1, pytest.approx(0.2)),
        (2, pytest.approx(0.4)),
    ]
    assert all(len(each["peak_memory_bytes"]) == 2 for each in lines[1:])


def stage(*losses: float) -> Any:
    return SimpleNamespace(
        losses={1 + place: torch.tensor(loss) for place, loss in enumerate(losses)}, loss_share=1.0
    )


def test_steps_before_a_loss_that_is_no_number_are_shown(rank: Any, device: Device) -> None:
    rank.train = True
    reporter = Reporter(rank)
    run(reporter, rank, device, 1, 0.06)
    for loss in (2.0, float("nan"), 3.0):
        rank.stages = {4: stage(loss)}
        run(reporter, rank, device, 1, 0.06)
    with pytest.raises(LaunchError, match=r"rank 0, stage 4, micro-batch 1.* at step 2"):
        reporter.report()
    assert steps(rank.options.report) == [0, 1]


@pytest.fixture
def gpu_rank(rank: Any) -> Any:
    """The same on a GPU, which takes simulated time."""
    rank.device = torch.device("cuda")
    rank.clock = Clock(rank.device)
    rank.train = True
    return rank


def launch(reporter: Reporter, rank: Any, device: Device, seconds: float, *losses: float) -> None:
    """A step that the host launches in a millisecond and the device does in `seconds`."""
    rank.clock.begin_step()
    device.host += 1e-3
    device.work(seconds)
    rank.stages = {4: stage(*losses)}
    reporter.end_step()
    rank.steps_done += 1


def test_on_a_gpu_a_step_is_reported_when_the_next_has_been_launched(
    gpu_rank: Any, device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_rank.options = RankOptions()
    reporter = Reporter(gpu_rank)
    for number in range(4):
        launch(reporter, gpu_rank, device, 0.5, number, 1.0)
        line = capsys.readouterr().out
        assert line.startswith(f"step {number - 1}  loss {number:.6f}  50") if number else not line
    assert not device.drained, "the device always had the next step to do"
    reporter.report()
    assert capsys.readouterr().out.startswith("step 3  loss 4.000000  500.0 ms")


def test_on_a_gpu_the_losses_of_a_report_are_read_together_beside_the_step(
    gpu_rank: Any, device: Device
) -> None:
    reporter = Reporter(gpu_rank)
    for number in range(9):
        launch(reporter, gpu_rank, device, 0.06, float(number), 1.0)
    assert steps(gpu_rank.options.report) == [0, 1, 2, 3, 4]
    assert len(device.entered) == 2, "one copy a report, on a stream of its own"


def test_on_a_gpu_a_loss_that_is_no_number_is_found_a_step_on_with_its_place(
    gpu_rank: Any, device: Device
) -> None:
    reporter = Reporter(gpu_rank)
    launch(reporter, gpu_rank, device, 0.5, 1.0, 2.0)
    launch(reporter, gpu_rank, device, 0.5, 3.0, float("inf"))
    with pytest.raises(LaunchError, match=r"rank 0, stage 4, micro-batch 2.* at step 1"):
        launch(reporter, gpu_rank, device, 0.5, 4.0, 5.0)
    assert steps(gpu_rank.options.report) == [0]
