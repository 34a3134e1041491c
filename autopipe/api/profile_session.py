"""One run of the profiler: the order of the measurements, and the time that each gets."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from autopipe.api.events import Progress
from autopipe.api.exchange_costs import exchanges_of, in_pipeline
from autopipe.api.model_correction import ModelCorrection, measure_whole
from autopipe.api.model_programs import write_pipeline
from autopipe.api.profile_samples import groups_of, models_of
from autopipe.api.profile_settings import ProfileSettings
from autopipe.api.synthetic_programs import LONGER, write_overhead_stage, write_rows
from autopipe.backends import onnxruntime as onnxruntime_profiler
from autopipe.backends.torch.profiler.host import measure_host_launch
from autopipe.backends.torch.profiler.operators import (
    TaskStartOverhead,
    measure_operations,
    measure_task_start_overhead,
    measure_tasks,
)
from autopipe.backends.torch.profiler.timed_program import Stopwatch
from autopipe.ir.cluster import usable_cpu_cores
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.measured_costs import DeviceCosts, ExchangeCost, OperationCost
from autopipe.ir.output_files import scratch_folder
from autopipe.ir.problem import Mode
from autopipe.ir.words import plural
from autopipe.passes.frontend import Model
from autopipe.passes.pipeline import Request

_WHOLE = 0.15
_TASKS = 0.1
_STARTS = 0.15
_EXCHANGES = 0.3
"""Fractions of the total time for the full model, tasks, starts of tasks, and communication."""


@dataclass(frozen=True, slots=True)
class Profiling:
    request: Request
    settings: ProfileSettings

    def check_ranks(self) -> None:
        """Raise ConfigurationError if the ranks on the CPU would share cores."""
        ranks = self.settings.ranks
        cores = usable_cpu_cores()
        most = max(2, cores // self.settings.threads)
        if ranks is not None and self.settings.device != "cuda" and ranks > most:
            message = (
                f"{ranks} {plural(ranks, 'rank')} on {cores} {plural(cores, 'processor')} "
                "would slow down each other"
            )
            raise ConfigurationError(message, f"set --ranks {most}", "--ranks")

    def run(self, bar: Progress) -> tuple[DeviceCosts, tuple[str, ...]]:
        """Run all measurements. Return the costs, and the reasons why some operators could not be
        measured. Raise ConfigurationError if the device is not available, and AutopipeError if the
        model cannot be read.
        """
        device = self._device()
        torch.set_num_threads(self.settings.threads)
        models = models_of(self.request, self.settings.sizes)
        train = models[0][1].mode is Mode.TRAIN and self.settings.source == "torch"
        started = time.perf_counter()
        with scratch_folder("profile") as name:
            scratch = Path(name)
            measured, refused = self._operations(models, device, train, scratch, bar)
            tasks = None
            starts = TaskStartOverhead()
            if train:
                bar.reach(time.perf_counter() - started, note="tasks")
                starts = measure_task_start_overhead(
                    Stopwatch(device), *write_rows(scratch), LONGER, _STARTS * self.settings.seconds
                )
                waiting = write_overhead_stage(scratch / "tasks")
                tasks = measure_tasks(
                    Stopwatch(device), scratch / "tasks", waiting, _TASKS * self.settings.seconds
                )
            # Corrections of the operator times from runs of the full model, by micro-batch size,
            # for the sizes that can be measured.
            wholes: dict[int, ModelCorrection] = {}
            if self.settings.source == "torch":
                bar.reach(time.perf_counter() - started, note="the whole model")
                known = [cost for _, cost in measured]
                each_s = _WHOLE * self.settings.seconds / len(models)
                precision = self.request.precision
                for size, model in models:
                    folder = scratch / f"whole-{size}"
                    whole = measure_whole(
                        model, precision, known, tasks, starts, device.type, folder, each_s
                    )
                    if whole is not None:
                        wholes[size] = whole
        if tasks is not None:
            # The overhead of tasks matters most for the smallest micro-batches. If the full model
            # was not measured, the overhead of the synthetic stage is used.
            tasks = wholes[min(wholes)].tasks(tasks) if wholes else starts.added_to(tasks)
        is_cuda = device.type == "cuda"
        product = (
            torch.cuda.get_device_name(device)
            if is_cuda
            else f"{processor()}, {self._threads_text()}"
        )
        corrections = (
            f"micro-batches of {size}: in the model operators take {whole.forward:.2f} "
            "(forward) and"
            f" {whole.backward:.2f} (backward) of what they take one by one; that is what is given"
            for size, whole in wholes.items()
        )
        costs = DeviceCosts(
            device=self.settings.name or product,
            measured=(self._how(device, [size for size, _ in models], train), *corrections),
            operations=tuple(
                wholes.get(size, ModelCorrection()).of(cost) for size, cost in measured
            ),
            tasks=tasks,
            exchanges=(),
            # On a CPU, the measured time of an operator includes the time to launch it, so no
            # launch time is added.
            host_launch_s=measure_host_launch(device, self.request.precision) if is_cuda else 0.0,
        )
        if self.settings.ranks is not None:
            bar.reach(
                time.perf_counter() - started,
                note=f"exchanges of {self.settings.ranks} {plural(self.settings.ranks, 'rank')}",
            )
            costs = replace(
                costs, exchanges=self._exchanges(self.settings.ranks, models, device, costs)
            )
        return costs, tuple(dict.fromkeys(refused))

    def _device(self) -> torch.device:
        wanted = self.settings.device
        if wanted == "auto":
            wanted = (
                "cuda" if torch.cuda.is_available() and self.settings.source == "torch" else "cpu"
            )
        if wanted == "cuda" and self.settings.source != "torch":
            raise ConfigurationError(
                "kernels of ONNX Runtime are measured on the CPU only",
                hint="set --device cpu",
                where="--device",
            )
        if wanted == "cuda" and not torch.cuda.is_available():
            raise ConfigurationError(
                "this machine lacks a CUDA device", hint="set --device cpu", where="--device"
            )
        return torch.device(wanted)

    def _operations(
        self,
        models: Sequence[tuple[int, Model]],
        device: torch.device,
        train: bool,
        folder: Path,
        bar: Progress,
    ) -> tuple[list[tuple[int, OperationCost]], list[str]]:
        """Measure all groups one after the other, for equal times. Return the costs with their
        micro-batch sizes, and the reasons for failures.
        """
        groups = tuple(groups_of(models, self.request.precision, self.settings.degrees))
        rest = (
            1.0
            - _WHOLE
            - (_TASKS + _STARTS if train else 0.0)
            - (_EXCHANGES if self.settings.ranks is not None else 0.0)
        )
        each_s = rest * self.settings.seconds / max(1, len(groups))
        found: list[tuple[int, OperationCost]] = []
        refused: list[str] = []
        started = time.perf_counter()
        for group in groups:
            bar.reach(time.perf_counter() - started, note=group.note)
            if self.settings.source == "onnxruntime":
                costs, reasons = onnxruntime_profiler.measure_operations(
                    group.lap, folder, self.settings.threads, each_s
                )
            else:
                costs, reasons = measure_operations(
                    group.lap, Stopwatch(device), folder, train, each_s
                )
            found += ((group.size, cost) for cost in costs)
            refused += reasons
        return found, refused

    def _exchanges(
        self,
        ranks: int,
        models: Sequence[tuple[int, Model]],
        device: torch.device,
        costs: DeviceCosts,
    ) -> tuple[ExchangeCost, ...]:
        """Measure P2P messages and collectives. The time that sending and receiving take from a
        rank is measured with the model's pipeline on the middle one of the micro-batch sizes,
        because messages interrupt tasks there.
        """
        exchanges = exchanges_of(ranks, device.type, _EXCHANGES * self.settings.seconds)
        if self.settings.source != "torch":
            return exchanges
        _, model = models[len(models) // 2]
        with scratch_folder("profile") as scratch:
            known = replace(costs, exchanges=exchanges)
            pipeline = write_pipeline(
                model, self.request.precision, known, Path(scratch) / "pipeline"
            )
            if pipeline is not None:
                with contextlib.suppress(LaunchError):
                    exchanges = in_pipeline(exchanges, pipeline, device.type)
        return exchanges

    def _threads_text(self) -> str:
        return f"{self.settings.threads} {plural(self.settings.threads, 'thread')}"

    def _how(self, device: torch.device, sizes: Sequence[int], train: bool) -> str:
        """Return a line for the costs file that describes the measurement."""
        version = (
            torch.__version__ if self.settings.source == "torch" else onnxruntime_profiler.version()
        )
        parts = [
            f"{self.settings.source} {version}",
            device.type if device.type == "cuda" else f"cpu, {self._threads_text()}",
            self.request.precision,
            "train" if train else "infer",
            f"{self.request.model.name} on micro-batches of {', '.join(map(str, sizes))}",
            *(
                [f"{self.settings.ranks} {plural(self.settings.ranks, 'rank')}"]
                if self.settings.ranks is not None
                else []
            ),
            datetime.datetime.now(datetime.UTC).date().isoformat(),
        ]
        return ", ".join(parts)


def processor() -> str:
    """Return the CPU's product name from /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU"
    )
