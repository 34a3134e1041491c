"""Reports of a rank: metrics of each step over all ranks, printed or written to a report file."""

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
from autopipe.ir.program import COMMUNICATION_KINDS, in_kind_order


@dataclass(frozen=True, slots=True)
class StepReport:
    """Metrics of a step over all ranks. `peak_memory_bytes` has the peak since the start of the
    run, by rank.
    """

    step: int
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    """Norm of all gradients before clipping; None if gradients are not clipped."""
    step_time_s: float
    samples_per_s: float
    tokens_per_s: float | None
    """None if the inputs are not the tokens of a language model."""
    tflops_per_device: float | None
    """Model FLOPs per second and device, in 10^12. Recomputation is not counted."""
    mfu: float | None
    """Model FLOPs utilisation: the fraction of the peak FLOPs of the plan's devices."""
    bubble_rate: float
    predicted_bubble_rate: float
    peak_memory_bytes: tuple[int, ...]
    communication_bytes: dict[str, int]
    loss_scale: float | None = None
    """The loss scale of a step in fp16, None in other precisions."""
    skipped: bool = False
    """True if gradients overflowed at this loss scale, so that the update was skipped."""

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
"""Value of `bad_stage` and `bad_micro_batch` if all losses are finite."""
_REPORT_INTERVAL_S = 0.25
"""Target seconds between reports of short steps. Exchanging and writing metrics takes as long as
some tasks of a small model, and the launcher needs a CPU core to read them.
"""
_MAX_UNREPORTED_STEPS = 16
"""Maximum number of steps in one report, since later steps may be longer."""


class _Metrics(NamedTuple):
    """Metrics of one step on one rank. In the exchanged list, the bytes of its communication by
    kind (`ir/program.py`) follow.
    """

    loss: float
    """The rank's part of the sum over all ranks."""
    bad_stage: float
    """The first stage with a loss that is not finite, `_NO_BAD_STAGE` if there is none."""
    bad_micro_batch: float
    seconds: float
    busy_s: float
    loss_scale: float
    """0 without loss scaling."""
    skipped: float
    """1 if the update was skipped."""
    grad_norm: float
    """NaN if gradients are not clipped."""
    learning_rate: float
    """NaN if the rank updates nothing."""
    counted: float
    """The divisor of the summed loss: the fraction of labels that are not ignored, or 1."""


_METRIC_COUNT = len(_Metrics._fields)
_NUMBERS_PER_STEP = _METRIC_COUNT + len(COMMUNICATION_KINDS)


@dataclass(frozen=True, slots=True)
class _EndedStep:
    """A step whose kernels have been launched; the device may still run them."""

    number: int
    times: StepTimes
    losses: torch.Tensor | None
    """On the device, [n], in the order of `origins`; None if the rank computes no loss."""
    grad_norm: torch.Tensor | None
    """On the device, [1]; None if gradients are not clipped."""
    counted: torch.Tensor | None
    """On the device, [1]; None if the loss is not divided by a number of labels."""
    learning_rate: float
    origins: tuple[tuple[int, int], ...]
    """(stage, micro-batch) of each loss."""
    moved: list[float]
    """Bytes of communication by kind, in the order of `COMMUNICATION_KINDS`."""
    scaling: torch.Tensor | None
    """`LossScaler.outcome`, None without loss scaling."""


class Reporter:
    """Collects the metrics of each step. All ranks exchange them, for several short steps at a
    time, and rank 0 prints or writes them. Raises LaunchError on all ranks if a loss is not finite.

    On a GPU a step is reported after the kernels of the next step have been launched, so that the
    device does not wait for the report.
    """

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank
        self._late = rank.device.type == "cuda"
        # Copies of losses use a stream of their own: on the default stream they would wait for the
        # step that runs.
        self._stream = torch.cuda.Stream(rank.device) if self._late else None
        self._launched: _EndedStep | None = None
        """On a GPU, the last step, which the device may still run."""
        self._kept: list[_EndedStep] = []
        """Steps that the device has ended and that are not reported yet."""
        self._together = 1
        """Number of steps in a report, equal on all ranks."""

    def end_step(self) -> None:
        """End the step on the clock. Report it, alone or with earlier ones, or keep it for a later
        report. Raises LaunchError as `report` does.
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
        # These tensors are computed before the event of the step's end, so that they can be read
        # after a wait for it.
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
        with self._rank.heartbeat.waiting():
            ended.times.wait()
        self._kept.append(ended)
        options = self._rank.options
        self._write_times(ended, options.trace)
        if ended.number in options.profiled:
            self._write_times(ended, options.profile_times)

    def _write_times(self, ended: _EndedStep, folder: Path | None) -> None:
        """Append the times of a step's tasks, and of their waits, to the rank's file in `folder`;
        do nothing if it is None.
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
        """Exchange and report the metrics of all steps so far. Collective over all ranks, after the
        same step. Raises LaunchError if a loss is not finite.
        """
        if self._launched is not None:
            ended = self._launched
            self._launched = None
            self._queue_step(ended)
        if self._kept:
            self._report_queued()

    def _report_queued(self) -> None:
        kept = self._kept
        self._kept = []
        numbers: list[float] = []
        for ended, (losses, scaling, norm, counted) in zip(kept, self._read(kept), strict=True):
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
                reports.append(self._report(ended.number, by_rank, peaks))
        finally:
            self.publish(*reports)
        slowest = max(each.step_time_s for each in reports)
        self._together = min(_MAX_UNREPORTED_STEPS, max(1, int(_REPORT_INTERVAL_S / slowest)))

    def publish(self, *reports: StepReport | EvaluationReport) -> None:
        """Print reports or add them to the report file, on rank 0 only."""
        if reports and self._rank.number == 0:
            self._write_records(
                [asdict(each) for each in reports], [each.line() for each in reports]
            )

    def print_on_rank_0(self, text: str) -> None:
        """Print a line, or add it to the report file as a note, on rank 0 only."""
        if self._rank.number == 0:
            self._write_records([{"note": text}], [text])

    def _write_records(self, records: Sequence[dict[str, Any]], lines: Sequence[str]) -> None:
        """Append records to the report file, which the launcher reads while it grows; without a
        file, print `lines`.
        """
        path = self._rank.options.report
        if path is None:
            print("\n".join(lines), flush=True)
            return
        with add_path_to_errors(path), path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(each) + "\n" for each in records))

    def _read(
        self, kept: Sequence[_EndedStep]
    ) -> list[tuple[list[float], tuple[float, float], float, float]]:
        """Return (losses, (loss scale, skipped), gradient norm, counted labels) of each step, with
        a single copy from the device. Zeros without loss scaling, NaN without a norm, 1 if labels
        are not counted.
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
        """Return (loss, stage, micro-batch): this rank's part of the step's loss, and
        `_NO_BAD_STAGE` twice if all losses are finite; otherwise 0 and the first loss that is not.
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

    def _report(
        self, step: int, numbers: Sequence[Sequence[float]], peaks: tuple[int, ...]
    ) -> StepReport:
        """Return the report of a step from the lists of all ranks. Raise LaunchError if a loss is
        not finite.
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
            communication_bytes=in_kind_order(
                {kind: int(each) for kind, each in zip(COMMUNICATION_KINDS, moved, strict=True)}
            ),
            loss_scale=by_rank[0].loss_scale or None,
            skipped=bool(by_rank[0].skipped),
        )


def _resident_memory() -> tuple[int, int]:
    """Return (maximum, current) bytes of this process's resident set, without pages of mapped
    files.

    Most pages of mapped files are libraries; a forked rank starts with few of them in its count.
    `getrusage` starts with the maximum of the parent process, so it serves only as a fallback.
    """
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            name, _, text = line.partition(":")
            if name in ("VmHWM", "VmRSS", "RssFile"):  # VmHWM is the maximum ("high water mark").
                found[name] = int(text.split()[0]) * 1024
    if len(found) < 3:
        maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return maximum, maximum
    return found["VmHWM"] - found["RssFile"], found["VmRSS"] - found["RssFile"]


_INTERPRETER_BYTES = _resident_memory()[1]
"""Resident bytes of Python and torch before a program loads anything."""


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes since the start: of torch's allocator on a GPU; on the CPU, of the
    resident set without mapped files, minus Python and torch.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return max(0, _resident_memory()[0] - _INTERPRETER_BYTES)


def _memory_hint(manifest: Manifest) -> str:
    """Return a hint for a loss that is not finite."""
    held = {each.value.dtype for each in manifest.parameters if each.trainable}
    if DType.FLOAT16 in held and "eps" in manifest.optimizer:
        return (
            "squares of gradients are 0 in float16: optimizer.eps: 1e-4, or float32 weights with "
            "precision: fp16"
        )
    return "lower the learning rate or look at the data"
