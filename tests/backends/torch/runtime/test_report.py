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

from autopipe.backends.torch.runtime.clock import Clock
from autopipe.backends.torch.runtime.report import Reporter
from autopipe.ir.errors import LaunchError
from tests.backends.torch.runtime.stand_in_cuda import Device


class AlonePulse:
    @contextlib.contextmanager
    def waiting(self) -> Any:
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
        device=torch.device("cpu"),
        heartbeat=AlonePulse(),
        clock=Clock(torch.device("cpu")),
        manifest=SimpleNamespace(batch_size=4, predicted_bubble=0.0),
        options=SimpleNamespace(trace=None, report=tmp_path / "report.jsonl"),
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
    reporter = Reporter(rank)
    run(reporter, rank, device, 1, 0.06)
    assert capsys.readouterr().out.startswith("step 0 ")
    run(reporter, rank, device, 3, 0.06)
    assert steps(rank.options.report) == [0], "a quarter of a second holds four"
    run(reporter, rank, device, 2, 0.06)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1", "2", "3", "4"]
    reporter.report()
    reporter.report()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["5"], "each is shown once"
    assert steps(rank.options.report) == list(range(6))


def test_a_report_of_a_long_step_is_shown_at_once(
    rank: Any, device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
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
    lines = [json.loads(line) for line in rank.options.report.read_text(encoding="utf-8").splitlines()]
    assert [(each["step"], each["step_time_s"]) for each in lines] == [
        (0, pytest.approx(0.125)),
        (1, pytest.approx(0.2)),
        (2, pytest.approx(0.4)),
    ]
    assert all(len(each["peak_memory_bytes"]) == 2 for each in lines[1:])


def stage(*losses: float) -> Any:
    return SimpleNamespace(losses={1 + place: torch.tensor(loss) for place, loss in enumerate(losses)}, loss_share=1.0)


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
    reporter = Reporter(gpu_rank)
    for number in range(4):
        launch(reporter, gpu_rank, device, 0.5, number, 1.0)
        line = capsys.readouterr().out
        assert line.startswith(f"step {number - 1}  loss {number:.6f}  50") if number else not line
    assert not device.drained, "the device always had the next step to do"
    reporter.report()
    assert capsys.readouterr().out.startswith("step 3  loss 4.000000  500.0 ms")


def test_on_a_gpu_the_losses_of_a_report_are_read_together_beside_the_step(gpu_rank: Any, device: Device) -> None:
    reporter = Reporter(gpu_rank)
    for number in range(9):
        launch(reporter, gpu_rank, device, 0.06, float(number), 1.0)
    assert steps(gpu_rank.options.report) == [0, 1, 2, 3, 4]
    assert len(device.entered) == 2, "one copy a report, on a stream of its own"


def test_on_a_gpu_a_loss_that_is_no_number_is_found_a_step_on_with_its_place(gpu_rank: Any, device: Device) -> None:
    reporter = Reporter(gpu_rank)
    launch(reporter, gpu_rank, device, 0.5, 1.0, 2.0)
    launch(reporter, gpu_rank, device, 0.5, 3.0, float("inf"))
    with pytest.raises(LaunchError, match=r"rank 0, stage 4, micro-batch 2.* at step 1"):
        launch(reporter, gpu_rank, device, 0.5, 4.0, 5.0)
    assert steps(gpu_rank.options.report) == [0]
