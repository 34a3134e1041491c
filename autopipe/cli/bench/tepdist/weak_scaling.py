"""The general experiment: throughput of models on 1 to 8 devices of one server against one device's, times as many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from autopipe.cli.bench.row import Case, Row
from autopipe.cli.bench.tepdist.last_layer import class_parts
from autopipe.cli.bench.tepdist.models import ADAM, MACHINE, SGD, Training
from autopipe.cli.bench.tepdist.planned import Planned, planned
from autopipe.cli.bench.tepdist.published import PICTURE
from autopipe.ir.problem import Optimizer

_DEVICES = (1, 2, 4, 8)
_NO_LIMIT = 2**60

_PART = "general"


@dataclass(frozen=True, slots=True)
class _Grown:
    """A model and how its work grows with the devices: by its samples, or by its size."""

    model: str
    sizes: Mapping[int, str]
    batch: Mapping[int, int]
    optimizer: Optimizer = SGD

    def training(self, devices: int, memory_limit: int | None = None) -> Training:
        settings = (("size", self.sizes[devices]),)
        return Training(self.model, settings, devices, self.batch[devices], self.optimizer, memory_limit)


def _by_samples(model: str, size: str, samples: int, optimizer: Optimizer = SGD) -> _Grown:
    """Always the same model, so many samples a device."""
    return _Grown(model, dict.fromkeys(_DEVICES, size), {each: samples * each for each in _DEVICES}, optimizer)


_GROWN = (
    _by_samples("vgg19", "million", 32),
    _by_samples("bert", "dnabert", 32, ADAM),
    _by_samples("unet", "paper", 8),
    _Grown("wide-resnet", {1: "250m", 2: "500m", 4: "1b", 8: "2b"}, dict.fromkeys(_DEVICES, 1536)),
)
"""Batches and sizes are ours, since the paper's are pictures; those of Wide-ResNet are Alpa's (OSDI 2022)."""

_NOTE = (
    f"theirs published as a picture, and as close to linear; ours simulated: {MACHINE}; operations a second and "
    "device, over one device's"
)


def weak_scalings() -> list[Case]:
    """One case a model and number of devices."""
    return [
        Case(f"{grown.model}-{grown.sizes[devices]}/p={devices}", _PART, partial(_rows, grown, devices))
        for grown in _GROWN
        for devices in _DEVICES
    ]


def _rows(grown: _Grown, devices: int) -> Iterator[Row]:
    case = f"{grown.model}-{grown.sizes[devices]}/p={devices}"
    step, (base, base_note) = planned(grown.training(devices)), _one_device(grown)
    if isinstance(step, str):
        yield Row(case, "throughput", None, None, "samples/s", "tepdist", step)
        return
    yield Row(case, "throughput", None, step.throughput, "samples/s", "tepdist", f"{PICTURE}; {step.decision}")
    note = f"{_NOTE}{base_note}; {grown.optimizer.name}"
    yield Row(case, "share_of_linear", None, step.flops / base.flops, "", "tepdist", note)
    if grown.model == "vgg19":
        note = "theirs: model parallel, in how many parts is not said; ours: parts that the classes are split into"
        yield Row(case, "class_parts", None, class_parts(step.problem, step.placement), "parts", "tepdist", note)


def _one_device(grown: _Grown) -> tuple[Planned, str]:
    """The step on one device, with as much memory as it needs, and a word where it has less."""
    step = planned(grown.training(1))
    if isinstance(step, Planned):
        return step, ""
    step = planned(grown.training(1, _NO_LIMIT))
    assert isinstance(step, Planned), step
    return step, ", which would need more memory than it has and is simulated as if it had it"
