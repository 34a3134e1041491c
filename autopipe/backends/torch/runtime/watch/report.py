"""Files and lines that a rank leaves: figures of each step, gradients for verification."""

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
from autopipe.backends.torch.runtime.step.rank_context import RankContext
from autopipe.backends.torch.runtime.watch.clock import StepTimes
from autopipe.ir.errors import LaunchError
from autopipe.ir.graph import DType
from autopipe.ir.output_files import naming
from autopipe.ir.program import KINDS, by_kind


@dataclass(frozen=True, slots=True)
class StepReport:
    """Figures of a step, over all ranks; the peak of memory is so far, by rank."""

    step: int
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    """Of all gradients, before they are clipped; None where nothing needed it."""
    step_time_s: float
    samples_per_s: float
    tokens_per_s: float | None
    """None where the inputs are not the tokens of a language model."""
    tflops_per_device: float | None
    """10^12 operations of the model a second on each device; what recomputation repeats is not
    counted.
    """
    mfu: float | None
    """Model FLOPs utilisation: that as a share of the peak of the plan's devices."""
    bubble_rate: float
    predicted_bubble_rate: float
    peak_memory_bytes: tuple[int, ...]
    communication_bytes: dict[str, int]
    loss_scale: float | None = None
    """Of a step in fp16."""
    skipped: bool = False
    """True if a gradient overflowed at that scale, so that nothing was updated."""

    def line(self) -> str:
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


_FINE = -1.0
_EVERY_S = 0.25
"""Seconds between reports of short steps: to exchange figures, and print and write what they say,
takes as long as some tasks of a small model, and whoever reads it wants a processor that a rank
needs.
"""
_MOST_STEPS = 16  # In one report, since steps may turn out longer than those before.


class _Figures(NamedTuple):
    """Figures of one step on one rank; behind them come the bytes of its exchanges, by kind
    (`ir/program.py`).
    """

    loss: float  # The rank's share.
    # The first stage, and its micro-batch, whose loss is no number; `_FINE` where all are.
    bad_stage: float
    bad_micro_batch: float
    seconds: float
    busy_s: float
    loss_scale: float  # 0 where there is none.
    skipped: float
    grad_norm: float  # NaN where the rank has none, as with the learning rate.
    learning_rate: float
    counted: float  # The part of all labels by which the loss is divided; 1 where it is by all.


_OWN = len(_Figures._fields)
_WIDTH = _OWN + len(KINDS)


@dataclass(frozen=True, slots=True)
class _EndedStep:
    """A step that the host is through with, as the device will be."""

    number: int
    times: StepTimes
    losses: torch.Tensor | None  # On the device, [n], in the order of `origins`.
    grad_norm: torch.Tensor | None  # On the device, [1].
    counted: torch.Tensor | None  # On the device, [1].
    learning_rate: float
    origins: tuple[tuple[int, int], ...]  # Stage and micro-batch of each loss.
    moved: list[float]
    scaling: torch.Tensor | None  # `LossScaler.outcome`.


class Reporter:
    """Keeps each step's figures. All ranks exchange them, those of short steps several at a time,
    and rank 0 prints them. Stops all ranks at a loss that is no number. On a GPU a step is reported
    when the next one has been launched, so that the device never runs out of work for it.
    """

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank
        self._late = rank.device.type == "cuda"
        # Losses are copied beside the step that runs: behind it, the host would wait for its end.
        self._stream = torch.cuda.Stream(rank.device) if self._late else None
        self._launched: _EndedStep | None = None  # The last step, where it is reported late.
        self._kept: list[_EndedStep] = []  # The device has done them.
        self._together = 1  # Steps in a report: as many on every rank.

    def end_step(self) -> None:
        """End the step by the clock; report it, or keep it for the next report. Raises LaunchError
        as `report` does.
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
        moved = [float(rank.transport.traffic[kind]) for kind in KINDS]
        # The row is made before the step's end on the device, so that who waits for that may read
        # it.
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
            self._keep(ended)
            if len(self._kept) >= self._together:
                self._report_kept()

    def _keep(self, ended: _EndedStep) -> None:
        with self._rank.heartbeat.waiting():  # on a GPU, for what it has not done yet
            ended.times.wait()
        self._kept.append(ended)
        options = self._rank.options
        self._leave_times(ended, options.trace)
        if ended.number in options.profiled:
            self._leave_times(ended, options.profile_times)

    def _leave_times(self, ended: _EndedStep, folder: Path | None) -> None:
        """Add the times of a step's tasks, and of their waits for messages, to the rank's file in
        `folder`.
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
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(form) + "\n")

    def report(self) -> None:
        """Exchange the figures of all steps so far; print them, and add them to the report file.
        All ranks together, after the same step. Raises LaunchError for a loss of NaN or infinity.
        """
        if self._launched is not None:
            ended = self._launched
            self._launched = None
            self._keep(ended)
        if self._kept:
            self._report_kept()

    def _report_kept(self) -> None:
        kept = self._kept
        self._kept = []
        numbers: list[float] = []
        for ended, (losses, scaling, norm, counted) in zip(kept, self._read(kept), strict=True):
            busy = sum(span.end - span.start for span in ended.times.spans())
            times = ended.times.seconds, busy
            own = _Figures(
                *self._share(ended, losses), *times, *scaling, norm, ended.learning_rate, counted
            )
            numbers += [*own, *ended.moved]
        gathered = self._rank.transport.gather_numbers(
            [float(peak_memory(self._rank.device)), *numbers]
        )
        peaks = tuple(int(peak) for peak, *_ in gathered)
        reports: list[StepReport] = []
        try:
            for index, ended in enumerate(kept):
                by_rank = [own[1 + index * _WIDTH :][:_WIDTH] for own in gathered]
                reports.append(self._report(ended.number, by_rank, peaks))
        finally:
            self.publish(*reports)
        slowest = max(each.step_time_s for each in reports)
        self._together = min(_MOST_STEPS, max(1, int(_EVERY_S / slowest)))

    def publish(self, *reports: StepReport | EvaluationReport) -> None:
        """Add reports to the report file, or print them; once for all ranks."""
        if reports and self._rank.number == 0:
            self._leave([asdict(each) for each in reports], [each.line() for each in reports])

    def say(self, text: str) -> None:
        """Print a line, or leave it as a note in the report file; once for all ranks."""
        if self._rank.number == 0:
            self._leave([{"note": text}], [text])

    def _leave(self, records: Sequence[dict[str, Any]], lines: Sequence[str]) -> None:
        """Add records to the report file, which the launcher reads as it grows; without one, print
        them as `lines`.
        """
        path = self._rank.options.report
        if path is None:
            print("\n".join(lines), flush=True)
            return
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(each) + "\n" for each in records))

    def _read(
        self, kept: Sequence[_EndedStep]
    ) -> list[tuple[list[float], tuple[float, float], float, float]]:
        """Of each step the losses by micro-batch, its loss scale with 1 if it was skipped (zeros
        where losses are not scaled), the norm of its gradients, and the labels counted, all in one
        copy from the device.
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

    def _share(self, ended: _EndedStep, losses: Sequence[float]) -> tuple[float, float, float]:
        """This rank's share of a step's loss, and the first stage and micro-batch whose loss is no
        number.
        """
        total = 0.0
        for (number, micro_batch), loss in zip(ended.origins, losses, strict=True):
            if not math.isfinite(loss):
                return 0.0, float(number), float(micro_batch)
            total += loss * self._rank.stages[number].loss_share
        return total / self._rank.manifest.training.gradient_accumulation_steps, _FINE, _FINE

    def _report(
        self, step: int, numbers: Sequence[Sequence[float]], peaks: tuple[int, ...]
    ) -> StepReport:
        by_rank = [_Figures(*own[:_OWN]) for own in numbers]
        for rank, each in enumerate(by_rank):
            if each.bad_stage != _FINE:
                raise LaunchError(
                    f"the loss is not a finite number at step {step}",
                    hint=_hint(self._rank.manifest),
                    where=(
                        f"rank {rank}, stage {int(each.bad_stage)}, micro-batch "
                        f"{int(each.bad_micro_batch)}"
                    ),
                )
        manifest = self._rank.manifest
        seconds = max(each.seconds for each in by_rank)
        moved = map(sum, zip(*(own[_OWN:] for own in numbers), strict=True))
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
            communication_bytes=by_kind(
                {kind: int(each) for kind, each in zip(KINDS, moved, strict=True)}
            ),
            loss_scale=by_rank[0].loss_scale or None,
            skipped=bool(by_rank[0].skipped),
        )


def _resident_memory() -> tuple[int, int]:
    """Return bytes of this process's resident set: its maximum so far, and now, both without pages
    of mapped files.

    Pages of mapped files are mostly libraries; a forked rank begins with few of them in its count,
    and gets the others when it first uses them. Linux's own count of usage (`getrusage`) begins
    with that of the parent process.
    """
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            name, _, text = line.partition(":")
            if name in ("VmHWM", "VmRSS", "RssFile"):  # HWM: "high water mark".
                found[name] = int(text.split()[0]) * 1024
    if len(found) < 3:
        maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return maximum, maximum
    return found["VmHWM"] - found["RssFile"], found["VmRSS"] - found["RssFile"]


_INTERPRETER = _resident_memory()[1]
"""Bytes that Python and torch take before a program loads anything."""


def peak_memory(device: torch.device) -> int:
    """Return the maximum so far, in bytes: on a GPU of the allocator; on the CPU of the resident
    set without mapped files, beyond Python and torch.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return max(0, _resident_memory()[0] - _INTERPRETER)


def _hint(manifest: Manifest) -> str:
    """How to keep losses finite."""
    held = {each.value.dtype for each in manifest.parameters if each.trainable}
    if DType.FLOAT16 in held and "eps" in manifest.optimizer:
        return (
            "squares of gradients are 0 in float16: optimizer.eps: 1e-4, or float32 weights with "
            "precision: fp16"
        )
    return "lower the learning rate or look at the data"
