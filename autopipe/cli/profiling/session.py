"""One run of the profiler: what is measured in which order, and how long for."""

from __future__ import annotations

import contextlib
import datetime
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from autopipe.backends.onnxruntime import profiler as onnxruntime_profiler
from autopipe.backends.torch.profiler.company import company
from autopipe.backends.torch.profiler.operators import measure_operations
from autopipe.backends.torch.profiler.tasks import Starts, measure_starts, measure_tasks
from autopipe.backends.torch.profiler.watch import Watch
from autopipe.backends.torch.runtime.processors import processor_count
from autopipe.cli.output import Bar
from autopipe.cli.profiling.crowds import measure_oversubscription
from autopipe.cli.profiling.exchanges import exchanges_of, in_pipeline
from autopipe.cli.profiling.medley import LONGER, write_medley, write_rows
from autopipe.cli.profiling.pipeline import write_pipeline
from autopipe.cli.profiling.samples import Group, groups_of, models_of
from autopipe.cli.profiling.whole import Whole, measure_whole, whole_program
from autopipe.ir.costs import DeviceCosts, ExchangeCost, OperationCost, Oversubscription, TaskCosts
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import Model
from autopipe.passes.request import Request

_WHOLE = 0.15
_TASKS = 0.1
_STARTS = 0.15
_EXCHANGES = 0.3
_CROWDS = 0.25
"""Parts of the time."""


@dataclass(frozen=True, slots=True)
class Profiling:
    """What to measure of a model, and on what."""

    request: Request
    sizes: tuple[int, ...] | None
    """Micro-batch sizes; the profiler's choice where None."""
    degrees: tuple[int, ...]
    """Ways to split operators."""
    device: str
    """`auto`, `cuda` or `cpu`."""
    name: str | None
    """What to call the device."""
    threads: int
    company: int
    """Processes that keep other cores busy while operators are measured."""
    ranks: int | None
    """How many exchange messages; exchanges are not measured where None."""
    crowd: int
    """How many ranks run at once at most: if more than there are processors, their taking turns is measured."""
    source: str
    """`torch` or `onnxruntime`."""
    seconds: float

    def run(self, bar: Bar) -> tuple[DeviceCosts, tuple[str, ...]]:
        """What was measured, and why some operators could not be.

        Raises ConfigurationError where the device is not there, AutopipeError as reading the model does.
        """
        device = self._device()
        torch.set_num_threads(self.threads)
        models = models_of(self.request, self.sizes)
        train = models[0][1].mode is Mode.TRAIN and self.source == "torch"
        groups = tuple(groups_of(models, self.request.precision, self.degrees))
        started = time.perf_counter()
        with (
            tempfile.TemporaryDirectory(prefix="autopipe-profile-") as scratch,
            company(self.company, self.threads, self._common(models, Path(scratch))),
        ):
            measured, refused = self._operations(groups, device, train, Path(scratch), bar)
            tasks, starts = None, Starts()
            if train:
                bar.reach(time.perf_counter() - started, note="tasks")
                starts = measure_starts(Watch(device), *write_rows(Path(scratch)), LONGER, _STARTS * self.seconds)
                tasks = self._tasks(device, Path(scratch))
            wholes: dict[int, Whole] = {}
            if self.source == "torch":
                bar.reach(time.perf_counter() - started, note="the whole model")
                wholes = self._wholes(models, [cost for _, cost in measured], tasks, starts, device, Path(scratch))
        crowds = self._crowds(models, device, bar, started)
        sizes = tuple(size for size, _ in models)
        costs = DeviceCosts(
            device=self.name or self._product(device),
            measured=(self._how(device, sizes, train), *(_told(size, whole) for size, whole in wholes.items())),
            operations=tuple(wholes.get(size, Whole()).of(cost) for size, cost in measured),
            tasks=None if tasks is None else _of_model(tasks, starts, wholes),
            exchanges=(),
            processors=self._processors if device.type == "cpu" else None,
            oversubscriptions=crowds,
        )
        if self.ranks is not None:
            bar.reach(time.perf_counter() - started, note=f"exchanges of {self.ranks} ranks")
            costs = replace(costs, exchanges=self._exchanges(self.ranks, models, device, costs))
        return costs, tuple(dict.fromkeys(refused))

    def _common(self, models: Sequence[tuple[int, Model]], scratch: Path) -> Path | None:
        """A program of what other ranks would do: the model, on micro-batches of middling size."""
        if not self.company or self.source != "torch":
            return None
        model = _middling(models)
        return whole_program(model, self.request.precision, scratch / "company", self.company)

    def _device(self) -> torch.device:
        wanted = self.device
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() and self.source == "torch" else "cpu"
        if wanted == "cuda" and self.source != "torch":
            raise ConfigurationError("ONNX Runtime is measured on the CPU alone", hint="--device cpu", where="--device")
        if wanted == "cuda" and not torch.cuda.is_available():
            raise ConfigurationError("no CUDA device is at hand", hint="use --device cpu", where="--device")
        return torch.device(wanted)

    def _operations(
        self, groups: Sequence[Group], device: torch.device, train: bool, folder: Path, bar: Bar
    ) -> tuple[list[tuple[int, OperationCost]], list[str]]:
        """All groups, one after the other, an equal part of the time each; by the size of micro-batches."""
        rest = 1.0 - _WHOLE - (_TASKS + _STARTS if train else 0.0) - (_EXCHANGES if self.ranks is not None else 0.0)
        rest -= _CROWDS if self._crowded(device) else 0.0
        each = rest * self.seconds / max(1, len(groups))
        found: list[tuple[int, OperationCost]] = []
        refused: list[str] = []
        started = time.perf_counter()
        for group in groups:
            bar.reach(time.perf_counter() - started, note=group.note)
            if self.source == "onnxruntime":
                costs, reasons = onnxruntime_profiler.measure_operations(group.lap, folder, self.threads, each)
            else:
                costs, reasons = measure_operations(group.lap, Watch(device), folder, train, each)
            found += ((group.size, cost) for cost in costs)
            refused += reasons
        return found, refused

    def _wholes(
        self,
        models: Sequence[tuple[int, Model]],
        costs: Sequence[OperationCost],
        tasks: TaskCosts | None,
        starts: Starts,
        device: torch.device,
        scratch: Path,
    ) -> dict[int, Whole]:
        """How operators go in the model, by the size of its micro-batches, where that can be told."""
        each = _WHOLE * self.seconds / len(models)
        found: dict[int, Whole] = {}
        for size, model in models:
            folder = scratch / f"whole-{size}"
            whole = measure_whole(model, self.request.precision, costs, tasks, starts, device.type, folder, each)
            if whole is not None:
                found[size] = whole
        return found

    @property
    def _processors(self) -> int:
        return max(1, processor_count() // self.threads)

    def _crowded(self, device: torch.device) -> bool:
        """Whether ranks that take turns on the processors are measured."""
        return self.crowd > self._processors and device.type == "cpu" and self.source == "torch"

    def _crowds(
        self, models: Sequence[tuple[int, Model]], device: torch.device, bar: Bar, started: float
    ) -> tuple[Oversubscription, ...]:
        """What ranks take that take turns on the processors, by micro-batches of middling size."""
        if not self._crowded(device):
            return ()
        bar.reach(time.perf_counter() - started, note=f"{self.crowd} ranks taking turns")
        model = _middling(models)
        with tempfile.TemporaryDirectory(prefix="autopipe-profile-") as scratch:
            return measure_oversubscription(
                model, self.request.precision, self._processors, self.crowd, Path(scratch), _CROWDS * self.seconds
            )

    def _exchanges(
        self, ranks: int, models: Sequence[tuple[int, Model]], device: torch.device, costs: DeviceCosts
    ) -> tuple[ExchangeCost, ...]:
        """Messages and collectives; messages' ends by the model's pipeline, on micro-batches of middling size, where no
        ranks share a processor: it shows what messages interrupt, and sharing ranks' wait until nothing computes."""
        exchanges = exchanges_of(ranks, device.type, _EXCHANGES * self.seconds)
        if self.source != "torch" or (device.type == "cpu" and ranks > self._processors):
            return exchanges
        model = _middling(models)
        with tempfile.TemporaryDirectory(prefix="autopipe-profile-") as scratch:
            known = replace(costs, exchanges=exchanges)
            pipeline = write_pipeline(model, self.request.precision, known, Path(scratch) / "pipeline")
            if pipeline is not None:
                with contextlib.suppress(LaunchError):
                    exchanges = in_pipeline(exchanges, pipeline, device.type)
        return exchanges

    def _tasks(self, device: torch.device, scratch: Path) -> TaskCosts:
        folder = scratch / "medley"
        waiting = write_medley(folder)
        return measure_tasks(Watch(device), folder, waiting, _TASKS * self.seconds)

    def _product(self, device: torch.device) -> str:
        if device.type == "cuda":
            return str(torch.cuda.get_device_name(device))
        return f"{processor()}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def _how(self, device: torch.device, sizes: tuple[int, ...], train: bool) -> str:
        """One line for the file."""
        if self.source == "torch":
            what = f"torch {torch.__version__}"
        else:
            what = f"onnxruntime {onnxruntime_profiler.version()}"
        parts = [
            what,
            device.type if device.type == "cuda" else f"cpu, {self.threads} thread{'s' if self.threads > 1 else ''}",
            self.request.precision,
            "train" if train else "infer",
            f"{self.request.model.name} on micro-batches of {', '.join(map(str, sizes))}",
            datetime.datetime.now(datetime.UTC).date().isoformat(),
        ]
        if self.company:
            parts.insert(-1, f"beside {self.company} busy process{'es' if self.company > 1 else ''}")
        if self.ranks is not None:
            parts.insert(-1, f"{self.ranks} ranks")
        return ", ".join(parts)


def _middling(models: Sequence[tuple[int, Model]]) -> Model:
    """The model on micro-batches of middling size."""
    _, model = models[len(models) // 2]
    return model


def _of_model(tasks: TaskCosts, starts: Starts, wholes: Mapping[int, Whole]) -> TaskCosts:
    """What the model's own tasks take, on its smallest micro-batches, since it is there that this matters; any other's
    where it was not run as a whole."""
    return wholes[min(wholes)].tasks(tasks) if wholes else starts.added_to(tasks)


def _told(size: int, whole: Whole) -> str:
    """One line for the file."""
    return (
        f"micro-batches of {size}: in the model operators take {whole.forward:.2f} (forward) and {whole.backward:.2f}"
        " (backward) of what they take one by one; that is what is given"
    )


def processor() -> str:
    """The processor's product name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
