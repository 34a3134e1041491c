"""Reports of a run: metrics of each step over all ranks, which rank 0 prints or writes to a report
file.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.modes.evaluation import EvaluationReport
from autopipe.backends.torch.runtime.step.stage import RankContext
from autopipe.backends.torch.runtime.watch.clock import StepTimes
from autopipe.ir.errors import LaunchError
from autopipe.ir.graph import DType
from autopipe.ir.output_files import add_path_to_errors
from autopipe.ir.program import COMMUNICATION_KINDS, order_by_kind


@dataclass(frozen=True, slots=True)
class StepReport:
    """Metrics of a step over all ranks. `peak_memory_bytes` has, for each rank, the peak since the
    start of the run. `communication_bytes` has the bytes of all ranks by kind of communication. A
    bubble rate is the fraction of the ranks' time in which they do not compute.
    """

    step: int
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    """2-norm of the gradients of all parameters before clipping; None if gradients are not
    clipped.
    """
    step_time_s: float
    samples_per_s: float
    tokens_per_s: float | None
    """Tokens per second over all ranks; None if the inputs are not sequences of tokens."""
    tflops_per_device: float | None
    """Model FLOPs per second and device, in 10^12. Recomputation does not count. None if
    unknown.
    """
    mfu: float | None
    """Model FLOPs utilisation: model FLOPs per second, as a fraction of the peak of all devices.
    None if unknown.
    """
    bubble_rate: float
    predicted_bubble_rate: float
    peak_memory_bytes: tuple[int, ...]
    communication_bytes: dict[str, int]
    loss_scale: float | None = None
    """The loss scale of the step; None without loss scaling."""
    skipped: bool = False
    """True if gradients overflowed, so that the update was skipped."""

    def line(self) -> str:
        """Return the report as one line of text."""
        parts = [f"step {self.step}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.6f}")
        if self.learning_rate is not None:
            parts.append(f"lr {self.learning_rate:.3g}")
        if self.grad_norm is not None:
            parts.append(f"norm {self.grad_norm:.3g}")
        parts.append(f"{self.step_time_s * 1e3:.1f} ms")
        parts.append(f"{self.samples_per_s:.1f} samples/s")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        parts.append(f"bubble {self.bubble_rate:.1%} (predicted {self.predicted_bubble_rate:.1%})")
        parts.append(f"peak memory {max(self.peak_memory_bytes) / 2**20:.0f} MiB")
        if self.skipped:
            parts.append(f"skipped: gradients overflow at loss scale {self.loss_scale:g}")
        return "  ".join(parts)


_NO_BAD_STAGE = -1.0
"""Value of `bad_stage` and `bad_micro_batch` if all losses of the rank are finite."""
_REPORT_INTERVAL_S = 0.25
"""Approximate seconds between two reports of short steps. Several short steps are reported at a
time, because exchanging and writing metrics takes as long as some tasks of a small model, and the
launcher needs a CPU core to read reports.
"""
_MAX_UNREPORTED_STEPS = 16
"""Maximum number of steps that are reported at a time. Later steps may take longer than the steps
from which the number is derived.
"""


class _Metrics(NamedTuple):
    """Metrics of one step on one rank, as numbers that ranks exchange. In the exchanged list, the
    rank's bytes of communication by kind (`COMMUNICATION_KINDS`) follow.
    """

    loss: float
    """The rank's contribution to the loss, which is a sum over all ranks."""
    bad_stage: float
    """Number of the first stage on the rank with a loss that is not finite; `_NO_BAD_STAGE` if
    there is none.
    """
    bad_micro_batch: float
    seconds: float
    busy_s: float
    loss_scale: float
    """The loss scale; 0 without loss scaling."""
    skipped: float
    """1 if the update was skipped, otherwise 0."""
    grad_norm: float
    """Norm of the gradients; NaN if gradients are not clipped."""
    learning_rate: float
    """Learning rate of the update; NaN if there was none."""
    counted: float
    """Divisor of the summed loss: the fraction of labels that are not ignored, or 1 if the loss is
    not divided by a number of labels.
    """


_METRIC_COUNT = len(_Metrics._fields)
_NUMBERS_PER_STEP = _METRIC_COUNT + len(COMMUNICATION_KINDS)


@dataclass(frozen=True, slots=True)
class _EndedStep:
    """A step whose kernels have all been launched. The device may still run them."""

    number: int
    times: StepTimes
    losses: torch.Tensor | None
    """Losses on the device, [n], in the order of `origins`; None if the rank computes no loss."""
    grad_norm: torch.Tensor | None
    """Norm of the gradients, [1] on the device; None if gradients are not clipped."""
    counted: torch.Tensor | None
    """Divisor of the loss, [1] on the device; None if the loss is not divided by a number of
    labels.
    """
    learning_rate: float
    origins: tuple[tuple[int, int], ...]
    """(stage, micro-batch) of each loss in `losses`."""
    moved: list[float]
    """Bytes of communication, in the order of `COMMUNICATION_KINDS`."""
    scaling: torch.Tensor | None
    """`LossScaler.outcome` of the step; None without loss scaling."""


class Reporter:
    """Collects the metrics of each step on a rank. The ranks exchange the metrics, of several steps
    at a time if steps are short, and rank 0 prints or writes them. If a loss is not finite,
    LaunchError is raised on all ranks.

    On a GPU, a step is reported after the kernels of the next step have been launched, so that the
    device does not wait for the report.
    """

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank
        self._late = rank.device.type == "cuda"
        # Losses are copied to the host on a separate stream. On the default stream, the copies of a
        # step's losses would wait for the next step, which already runs.
        self._stream = torch.cuda.Stream(rank.device) if self._late else None
        self._launched: _EndedStep | None = None
        """On a GPU, the last step, which the device may still run; otherwise None."""
        self._kept: list[_EndedStep] = []
        """Steps that the device has ended and that have not been reported."""
        self._together = 1
        """Number of steps that are reported at a time, equal on all ranks."""

    def end_step(self) -> None:
        """End the current step. Report it now, together with earlier steps, or keep it for a later
        report. Raise LaunchError as `report` does.
        """
        rank = self._rank
        losses = [
            (number, micro_batch, loss)
            for number, stage in rank.stages.items()
            for micro_batch, loss in sorted(stage.losses.items())
        ]
        row = torch.cat([loss.reshape(1) for *_, loss in losses]) if losses else None
        origins = tuple((number, micro_batch) for number, micro_batch, _ in losses)
        scaling = None if rank.loss_scaler is None else rank.loss_scaler.outcome
        moved = [float(rank.transport.traffic[kind]) for kind in COMMUNICATION_KINDS]
        # The norm and the divisor must be computed before the event that ends the step, because
        # they are read after a wait for this event.
        norm = None if rank.grad_norm is None else rank.grad_norm.reshape(1)
        counted = None if rank.counted is None else rank.counted.reshape(1)
        times = rank.clock.end_step()
        rate = math.nan if rank.learning_rate is None else rank.learning_rate
        launched = _EndedStep(
            rank.steps_done, times, row, norm, counted, rate, origins, moved, scaling
        )
        ended: _EndedStep | None = launched
        if self._late:
            ended = self._launched
            self._launched = launched
        if ended is not None:
            self._queue_step(ended)
            if len(self._kept) >= self._together:
                self._report_queued()

    def _queue_step(self, ended: _EndedStep) -> None:
        """Wait until the device has ended a step, write its times, and keep it for the next
        report.
        """
        with self._rank.heartbeat.record_wait():
            ended.times.wait()
        self._kept.append(ended)
        options = self._rank.options
        self._write_times(ended, options.trace)
        if ended.number in options.profiled_steps:
            self._write_times(ended, options.profile_times)

    def _write_times(self, ended: _EndedStep, folder: Path | None) -> None:
        """Append the times of a step, its tasks and its waits to this rank's file in `folder`. Do
        nothing if `folder` is None.
        """
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        times = ended.times
        form = {
            "step": ended.number,
            "began": times.began,
            "seconds": times.seconds,
            "spans": [asdict(span) for span in times.spans()],
            "waits": [asdict(wait) for wait in times.waits()],
        }
        path = folder / f"rank_{self._rank.number:03d}.jsonl"
        with add_path_to_errors(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(form) + "\n")

    def report(self) -> None:
        """Exchange and report the metrics of all steps that have not been reported. Collective over
        all ranks, which must call this after the same step. Raise LaunchError if a loss is not
        finite.
        """
        if self._launched is not None:
            ended = self._launched
            self._launched = None
            self._queue_step(ended)
        if self._kept:
            self._report_queued()

    def _report_queued(self) -> None:
        """Exchange and report the metrics of the steps in `_kept`, and determine how many steps the
        next report contains.
        """
        kept = self._kept
        self._kept = []
        numbers: list[float] = []
        for ended, (losses, scaling, norm, counted) in zip(
            kept, self._read_metrics(kept), strict=True
        ):
            busy = sum(span.end - span.start for span in ended.times.spans())
            times = ended.times.seconds, busy
            own = _Metrics(
                *self._own_loss_metrics(ended, losses),
                *times,
                *scaling,
                norm,
                ended.learning_rate,
                counted,
            )
            numbers += [*own, *ended.moved]
        gathered = self._rank.transport.gather_numbers(
            [float(peak_memory(self._rank.device)), *numbers]
        )
        peaks = tuple(int(peak) for peak, *_ in gathered)
        reports: list[StepReport] = []
        try:
            for index, ended in enumerate(kept):
                by_rank = [
                    own[1 + index * _NUMBERS_PER_STEP :][:_NUMBERS_PER_STEP] for own in gathered
                ]
                reports.append(self._make_step_report(ended.number, by_rank, peaks))
        finally:
            self.publish(*reports)
        slowest = max(each.step_time_s for each in reports)
        self._together = min(_MAX_UNREPORTED_STEPS, max(1, int(_REPORT_INTERVAL_S / slowest)))

    def publish(self, *reports: StepReport | EvaluationReport) -> None:
        """On rank 0, print reports or append them to the report file."""
        if reports and self._rank.number == 0:
            self._write_records(
                [asdict(each) for each in reports], [each.line() for each in reports]
            )

    def print_on_rank_0(self, text: str) -> None:
        """On rank 0, print a line, or append it to the report file as a note."""
        if self._rank.number == 0:
            self._write_records([{"note": text}], [text])

    def _write_records(self, records: Sequence[dict[str, Any]], lines: Sequence[str]) -> None:
        """Append `records`, one JSON object each, to the report file, which the launcher reads
        while it grows. Without a report file, print `lines`.
        """
        path = self._rank.options.report
        if path is None:
            print("\n".join(lines), flush=True)
            return
        with add_path_to_errors(path), path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(each) + "\n" for each in records))

    def _read_metrics(
        self, kept: Sequence[_EndedStep]
    ) -> list[tuple[list[float], tuple[float, float], float, float]]:
        """Return, for each step, (losses, (loss scale, skipped), gradient norm, divisor of the
        loss). All values are copied from the device at once. Without loss scaling, the pair is (0,
        0); without clipping, the norm is NaN; without a number of labels, the divisor is 1.
        """
        parts = ((each.losses, each.scaling, each.grad_norm, each.counted) for each in kept)
        rows = [row for own in parts for row in own if row is not None]
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            found = iter(torch.cat(rows).tolist() if rows else ())
        return [
            (
                [next(found) for _ in ended.origins],
                (0.0, 0.0) if ended.scaling is None else (next(found), next(found)),
                math.nan if ended.grad_norm is None else next(found),
                1.0 if ended.counted is None else next(found),
            )
            for ended in kept
        ]

    def _own_loss_metrics(
        self, ended: _EndedStep, losses: Sequence[float]
    ) -> tuple[float, float, float]:
        """Return (loss, stage, micro-batch) of a step on this rank. If all losses are finite: the
        rank's contribution to the loss, and `_NO_BAD_STAGE` twice. Otherwise: 0, and the stage and
        micro-batch of the first loss that is not finite.
        """
        total = 0.0
        for (number, micro_batch), loss in zip(ended.origins, losses, strict=True):
            if not math.isfinite(loss):
                return 0.0, float(number), float(micro_batch)
            total += loss * self._rank.stages[number].loss_share
        return (
            total / self._rank.manifest.training.gradient_accumulation_steps,
            _NO_BAD_STAGE,
            _NO_BAD_STAGE,
        )

    def _make_step_report(
        self, step: int, numbers: Sequence[Sequence[float]], peaks: tuple[int, ...]
    ) -> StepReport:
        """Return the report of a step. `numbers` has a list for each rank: the numbers of its
        `_Metrics`, then its bytes of communication by kind. `peaks` has the peak memory of each
        rank in bytes. Raise LaunchError if a loss is not finite.
        """
        by_rank = [_Metrics(*own[:_METRIC_COUNT]) for own in numbers]
        for rank, each in enumerate(by_rank):
            if each.bad_stage != _NO_BAD_STAGE:
                raise LaunchError(
                    f"the loss at step {step} is infinite or NaN",
                    hint=_memory_hint(self._rank.manifest),
                    where=(
                        f"rank {rank}, stage {int(each.bad_stage)}, micro-batch "
                        f"{int(each.bad_micro_batch)}"
                    ),
                )
        manifest = self._rank.manifest
        seconds = max(each.seconds for each in by_rank)
        moved = map(sum, zip(*(own[_METRIC_COUNT:] for own in numbers), strict=True))
        tokens = manifest.tokens_per_sample
        flops = manifest.model_flops
        loss = manifest.loss_division.loss(sum(each.loss for each in by_rank) / by_rank[0].counted)
        return StepReport(
            step=step,
            loss=loss if self._rank.train else None,
            learning_rate=next(
                (each.learning_rate for each in by_rank if not math.isnan(each.learning_rate)), None
            ),
            grad_norm=next(
                (each.grad_norm for each in by_rank if not math.isnan(each.grad_norm)), None
            ),
            step_time_s=seconds,
            samples_per_s=manifest.batch_size / seconds,
            tokens_per_s=None if tokens is None else manifest.batch_size * tokens / seconds,
            tflops_per_device=None if flops is None else flops / seconds / len(by_rank) / 1e12,
            mfu=None
            if flops is None or not manifest.peak_flops
            else flops / seconds / manifest.peak_flops,
            bubble_rate=1.0 - sum(each.busy_s for each in by_rank) / (len(by_rank) * seconds),
            predicted_bubble_rate=manifest.predicted_bubble,
            peak_memory_bytes=peaks,
            communication_bytes=order_by_kind(
                {kind: int(each) for kind, each in zip(COMMUNICATION_KINDS, moved, strict=True)}
            ),
            loss_scale=by_rank[0].loss_scale or None,
            skipped=bool(by_rank[0].skipped),
        )


def _resident_memory() -> tuple[int, int]:
    """Return (maximum, current) bytes of this process's resident set, without pages of mapped
    files.

    Pages of mapped files are mostly libraries, and a forked rank starts with few of them in its
    count. `getrusage` is a fallback only, because it starts with the maximum of the parent process.
    """
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            name, _, text = line.partition(":")
            if name in ("VmHWM", "VmRSS", "RssFile"):  # VmHWM ("high water mark") is the maximum.
                found[name] = int(text.split()[0]) * 1024
    if len(found) < 3:
        maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return maximum, maximum
    return found["VmHWM"] - found["RssFile"], found["VmRSS"] - found["RssFile"]


_INTERPRETER_BYTES = _resident_memory()[1]
"""Resident bytes of Python and torch before the program has loaded anything."""


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes since the start of the process. On a GPU: of torch's
    allocator. On a CPU: of the resident set without mapped files, minus Python and torch.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return max(0, _resident_memory()[0] - _INTERPRETER_BYTES)


def _memory_hint(manifest: Manifest) -> str:
    """Return a hint for the user how to avoid a loss that is not finite."""
    held = {each.value.dtype for each in manifest.parameters if each.trainable}
    if DType.FLOAT16 in held and "eps" in manifest.optimizer:
        return (
            "squares of gradients are 0 in float16: optimizer.eps: 1e-4, or float32 weights with "
            "precision: fp16"
        )
    return "lower the learning rate or look at the data"
