"""Terminal output of `autopipe launch`: the progress of the steps (a live line, plain lines, or
JSON lines), a table of predicted and measured values at the end, and the timelines of `launch
--profile`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from autopipe.api.launching import Record, Run
from autopipe.backends.torch.metrics import average_step_records
from autopipe.cli.bars import PrintedBar
from autopipe.cli.output import Output, Verbosity, plain_table
from autopipe.ir.cluster import usable_cpu_cores
from autopipe.ir.words import bytes_text, plural, seconds_text

if TYPE_CHECKING:
    from autopipe.api.launch_profile import StepProfile


@contextmanager
def shown_steps(output: Output, every: int, run: Run) -> Iterator[StepDisplay]:
    """Context manager that yields a display of the steps of `run`, which prints a line every
    `every` steps if stdout is no terminal.
    """
    with (
        output.progress_lines("steps", run.steps) as lines,
        StepDisplay(run, output, every, lines) as display,
    ):
        lines.reach(run.done)
        yield display


class StepDisplay:
    """Shows the records of steps as the ranks report them.

    With --json, each record is a line of stdout. On a terminal, one live line is updated.
    Otherwise, a line is printed every `every` steps. `lines` reports progress on a stderr that is
    no terminal.
    """

    def __init__(self, run: Run, output: Output, every: int, lines: PrintedBar) -> None:
        from rich.live import Live

        self._run = run
        self._output = output
        self._every = every
        self._lines = lines
        console = output.stderr if output.as_json else output.stdout
        shown = console.is_terminal and output.verbosity > Verbosity.QUIET
        self._live = Live(console=console, auto_refresh=False) if shown else None
        self._since: list[Record] = []
        # Number of the first reported step, and the time of its report.
        self._first: tuple[int, float] | None = None

    def __enter__(self) -> StepDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self._flush()

    def note(self, text: str) -> None:
        if self._live is None:
            self._output.line(text)
        else:
            self._live.console.print(text, soft_wrap=True)

    def take(self, record: Record) -> None:
        """Show one record of the report file: a note, a step, or an evaluation."""
        from autopipe.backends.torch.runtime.modes.evaluation import EvaluationReport

        if "note" in record:
            self.note(record["note"])
            return
        self._output.record(record)
        if "step_time_s" not in record:
            if not self._output.as_json:
                self._flush()
                self.note(EvaluationReport(**record).line())
            return
        self._lines.reach(
            record["step"] + 1, "" if record["loss"] is None else f"loss {record['loss']:.4g}"
        )
        if self._live is not None:
            now = time.monotonic()
            self._first = self._first or (record["step"], now)
            first, began = self._first
            done = record["step"] - first
            each_s = (now - began) / done if done > 0 else None
            self._live.update(
                Text(live_line(self._run, record, each_s, self._live.console.width)), refresh=True
            )
        elif not self._output.as_json:
            self._since.append(record)
            if record["step"] % self._every == 0:
                self._flush()

    def _flush(self) -> None:
        from autopipe.backends.torch.runtime.watch.report import StepReport

        if self._since:
            self._output.line(StepReport(**average_step_records(self._since)).line())
            self._lines.postpone()
            self._since = []


def live_line(run: Run, record: Record, each_s: float | None, width: int) -> str:
    """Return the progress as one line of at most `width` characters.

    If the line is too long, the memory is omitted first, then the learning rate, then the samples
    or tokens per second. `each_s` is the mean wall-clock time per step in seconds, including the
    time between steps; None if it is not known yet.
    """
    done = record["step"] + 1
    left = ""
    if run.steps is not None and each_s is not None:
        left = f"{clock_text(each_s * (run.steps - done))} left"
    unit = "tok/s" if record["tokens_per_s"] is not None else "samples/s"
    rate = record["tokens_per_s"] or record["samples_per_s"]
    milliseconds, predicted = (
        _three_digits(each * 1e3) for each in (record["step_time_s"], run.manifest.predicted_step_s)
    )
    memory = bytes_text(max(record["peak_memory_bytes"])).removesuffix("iB").replace(" ", "")
    parts = {
        "step": f"{done}" if run.steps is None else f"{done}/{run.steps}",
        "loss": "" if record["loss"] is None else f"loss {record['loss']:.4g}",
        "learning rate": ""
        if record["learning_rate"] is None
        else f"lr {_short_exponent(record['learning_rate'])}",
        "time": f"{milliseconds} ms (pred. {predicted})",
        "rate": f"{_with_thousands(rate)} {unit}",
        "memory": f"{'GPU' if run.gpus else 'RSS'} {memory}",
        "left": left,
    }
    for dropped in (
        (),
        ("memory",),
        ("memory", "learning rate"),
        ("memory", "learning rate", "rate"),
    ):
        kept = [text for name, text in parts.items() if text and name not in dropped]
        for gap in ("  ", " "):
            if len(line := gap.join(kept)) <= width:
                return line
    return line[:width]


def _three_digits(value: float) -> str:
    """Format a value with about three digits: `61.2`, `9000`."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _short_exponent(value: float) -> str:
    """Format a value below 0.01 as `3e-4`, other values with two significant digits."""
    if not 0 < value < 1e-2:
        return f"{value:.2g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _with_thousands(value: float) -> str:
    """Format a value with the suffix k or M: `8.4k`."""
    for unit, scale in (("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{_three_digits(value / scale)}{unit}"
    return _three_digits(value)


def clock_text(seconds: float) -> str:
    """Format a duration as minutes and seconds, or hours, minutes and seconds: `1:02`,
    `3:04:05`.
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_profile(profile: StepProfile, output: Output) -> None:
    """Print how the ranks spent their time in the profiled steps, and the name of the written
    trace.
    """
    from autopipe.cli.drawing.bubbles import bubble_screen

    if not output.as_json:
        for part in bubble_screen(profile.measured, profile.predicted):
            output.line(part)
    path = profile.path
    output.note(
        f"{path.name}, and torch's profile of each rank, in {path.parent}: see ui.perfetto.dev"
    )


def show_measured(run: Run, steps: Sequence[Record], output: Output) -> None:
    """Print the table of predicted and measured values, and a note if ranks share cores. Print
    nothing if no step was measured, or if the output is JSON or quiet.
    """
    if steps and not output.as_json and output.verbosity > Verbosity.QUIET:
        output.line(measured_table(run, steps))
        if line := core_line(run):
            output.line(line)


def measured_table(run: Run, steps: Sequence[Record]) -> Table:
    """Return a table that compares the plan's predictions with the measured steps.

    The measured values are medians over all steps but the first, which includes warm-up. The memory
    is the peak of all steps.
    """
    manifest = run.manifest
    settled = steps[1:] or steps
    table = plain_table("", "predicted", "measured", right=1, no_wrap=True)
    table.add_column("")

    def median(name: str) -> float:
        return float(statistics.median(each[name] for each in settled))

    predicted_s = manifest.predicted_step_s

    def add_rate(name: str, each_step: float, measured: float, form: str, note: str = "") -> None:
        # The predicted step time is 0 for a graph that only moves data.
        predicted = f"{each_step / predicted_s:{form}}" if predicted_s else "-"
        table.add_row(name, predicted, f"{measured:{form}}", note)

    size = manifest.batch_size
    of = (
        f"median of {len(settled)} {plural(len(settled), 'step')}"
        if len(settled) > 1
        else "one step"
    )
    table.add_row("step", seconds_text(predicted_s), seconds_text(median("step_time_s")), of)
    samples_per_s = median("samples_per_s")
    add_rate("samples/s", size, samples_per_s, ",.1f")
    if (tokens := manifest.tokens_per_sample) is not None:
        add_rate("tokens/s", size * tokens, samples_per_s * tokens, ",.0f")
    if manifest.model_flops and manifest.peak_flops:
        ideal_s = manifest.model_flops / manifest.peak_flops
        add_rate("MFU", ideal_s, median("mfu"), ".1%", "of the peak of the plan's devices")
    table.add_row("bubble", f"{manifest.predicted_bubble:.1%}", f"{median('bubble_rate'):.1%}", "")
    predicted = manifest.predicted_memory_bytes
    measured = max(max(each["peak_memory_bytes"]) for each in steps)
    what = "allocated by torch" if run.gpus else "resident (RSS) beyond Python and torch"
    table.add_row(
        "memory", "" if predicted is None else bytes_text(predicted), bytes_text(measured), what
    )
    return table


def core_line(run: Run) -> str:
    """Return a note that several ranks share a CPU core of this node, or "" if each rank has its
    own core or a GPU.
    """
    cores = usable_cpu_cores()
    if run.gpus or run.ranks <= cores:
        return ""
    shared = f"{cores} {plural(cores, 'core')}" if cores > 1 else "one core"
    return (
        f"{run.ranks} {plural(run.ranks, 'rank')} share {shared}, "
        f"{run.ranks / cores:.3g} on each: a step takes that much longer"
    )
