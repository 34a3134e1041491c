"""What a launch shows while steps run and when they have ended."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from autopipe.api.launching import Run
from autopipe.backends.torch.runtime.manifest import Manifest, read_manifest
from autopipe.cli.bars import PrintedBar
from autopipe.cli.launch_display import StepDisplay, clock_text, core_line, live_line, show_measured
from autopipe.cli.output import Output, Verbosity
from tests.distributed.support.launching import write_chain


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return read_manifest(write_chain(tmp_path_factory.mktemp("display") / "program"))


def record(step: int, **figures: Any) -> dict[str, Any]:
    return {
        "step": step, "loss": 2.34567, "learning_rate": 3e-4, "grad_norm": 1.5, "step_time_s": 0.0612,
        "samples_per_s": 196.1, "tokens_per_s": 8366.0, "tflops_per_device": 0.5, "mfu": 0.25, "bubble_rate": 0.2,
        "predicted_bubble_rate": 0.1, "peak_memory_bytes": [103 * 2**20, 101 * 2**20],
        "communication_bytes": {"send": 64}, "loss_scale": None, "skipped": False, **figures,
    }  # fmt: skip


def output(width: int | None, **options: Any) -> Output:
    """With stdout a terminal of `width` columns, or a file."""
    stdout = Console(
        file=io.StringIO(),
        force_terminal=width is not None,
        width=width,
        markup=False,
        highlight=False,
    )
    return Output(stdout=stdout, stderr=Console(file=io.StringIO()), **options)


def written(to: Output) -> str:
    assert isinstance(to.stdout.file, io.StringIO)
    return to.stdout.file.getvalue()


def test_the_live_line_has_all_figures_in_80_columns_and_leaves_out_the_last_where_there_is_less_room(
    manifest: Manifest,
) -> None:
    run = Run(manifest, steps=300, ranks=2, gpus=0)
    assert live_line(run, record(119), 62 / 180, 80) == (
        "120/300 loss 2.346 lr 3e-4 61.2 ms (pred. 100) 8.37k tok/s RSS 103M 1:02 left"
    )
    for width in range(20, 120):
        line = live_line(run, record(119), 62 / 180, width)
        assert len(line) <= width
        assert width < 50 or ("loss 2.346" in line and "1:02 left" in line)
    long = live_line(replace(run, steps=1_000_000, gpus=2), record(99_999), 0.4, 80)
    assert len(long) <= 80 and "100000/1000000" in long and "100:00:00 left" in long
    assert live_line(replace(run, steps=None), record(119), 1.0, 80).startswith("120  loss")
    assert "GPU 103M" in live_line(replace(run, gpus=2), record(0), None, 100)


def test_a_terminal_has_one_line_that_changes(manifest: Manifest) -> None:
    to = output(80)
    with StepDisplay(
        Run(manifest, 3, 2, 0), to, 1, PrintedBar(to.note, "steps", None, 10)
    ) as display:
        display.take({"note": "resuming at step 0"})
        for step in range(3):
            display.take(record(step, loss=float(step)))
    shown = written(to)
    assert "resuming at step 0\n" in shown
    assert shown.count("\n") == 2, "the note's and that after the last line"
    assert all(f"{step + 1}/3" in shown for step in range(3))


def test_elsewhere_every_nth_step_has_a_line(manifest: Manifest) -> None:
    to = output(None)
    with StepDisplay(
        Run(manifest, 6, 2, 0), to, 2, PrintedBar(to.note, "steps", None, 10)
    ) as display:
        for step in range(6):
            display.take(record(step, step_time_s=0.1 + step))
    lines = written(to).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 0", "step 2", "step 4", "step 5"]
    assert lines[1].split("  ")[:5] == [
        "step 2",
        "loss 2.345670",
        "lr 0.0003",
        "norm 1.5",
        "1600.0 ms",
    ]


def test_json_is_a_line_a_step(manifest: Manifest) -> None:
    to = output(None, as_json=True)
    with StepDisplay(
        Run(manifest, 2, 2, 0), to, 2, PrintedBar(to.note, "steps", None, 10)
    ) as display:
        display.take({"note": "said on stderr"})
        for step in range(2):
            display.take(record(step))
    assert [json.loads(line)["step"] for line in written(to).splitlines()] == [0, 1]


def test_in_the_end_what_was_predicted_stands_beside_what_was_measured(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = output(None)
    run = Run(
        replace(manifest, predicted_memory_bytes=2**20, model_flops=1e9, peak_flops=1e11), 3, 2, 0
    )
    show_measured(run, [record(0, step_time_s=9.0), record(1), record(2)], to)
    text = written(to)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["step"] == ["100", "ms", "61.2", "ms", "median", "of", "2", "steps"]
    assert rows["MFU"][:2] == ["10.0%", "25.0%"]
    assert rows["memory"][:5] == ["1.00", "MiB", "103", "MiB", "resident"]
    assert all(len(line) <= 80 for line in text.splitlines())
    quiet = output(None, verbosity=Verbosity.QUIET)
    show_measured(run, [record(0)], quiet)
    assert not written(quiet)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert core_line(replace(run, ranks=3)).startswith("3 ranks share 2 cores, 1.5 on each")
    assert not core_line(run) and not core_line(replace(run, ranks=3, gpus=3))


def test_time_left() -> None:
    assert [clock_text(each) for each in (3.4, 62, 3723)] == ["0:03", "1:02", "1:02:03"]


@pytest.mark.parametrize(("every", "waits_s"), [(1, 10.0), (100, 2.0)])
def test_a_stderr_that_is_no_terminal_hears_of_steps_that_are_not_shown(
    manifest: Manifest, every: int, waits_s: float
) -> None:
    to = output(None)
    seconds = [0.0]
    lines = PrintedBar(to.note, "steps", 300, 10, lambda: seconds[0])
    display = StepDisplay(Run(manifest, 300, 2, 0), to, every, lines)
    seconds[0] = 8.0
    display.take(record(3))
    assert lines.line() == "steps: 4 of 300, 8 s, loss 2.346"
    assert lines.wait_s() == waits_s
