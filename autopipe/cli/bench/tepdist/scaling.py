"""The model extension experiment: GPT and MoE that grow with the devices, 1 to 16 of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from autopipe.cli.bench.row import Case, Row
from autopipe.cli.bench.tepdist.models import ADAM, MACHINE, Training
from autopipe.cli.bench.tepdist.planned import planned
from autopipe.cli.bench.tepdist.published import BEST_SHARE, PEAK_FLOPS, PICTURE
from autopipe.cli.bench.zoo_graph import Settings

_BATCH = 1024
_MOST_A_DEVICE = 16
"""Samples of a micro-batch: more than one device holds of GPT without recomputation."""

_PART = "model extension"


@dataclass(frozen=True, slots=True)
class _Family:
    """A model, its size by number of devices, and what all sizes have in common."""

    model: str
    sizes: dict[int, str]
    common: Settings

    def training(self, devices: int) -> Training:
        settings: Settings = (("size", self.sizes[devices]), *self.common)
        return Training(self.model, settings, devices, _BATCH, ADAM, largest=_MOST_A_DEVICE * devices)


_FAMILIES = (
    _Family(
        "gpt",
        {1: "350m", 2: "760m", 4: "1.3b", 8: "2.7b", 16: "6.7b"},
        (("sequence", 1024), ("vocabulary", 51200)),
    ),
    _Family("moe", {1: "380m", 2: "690m", 4: "1.3b", 8: "2.4b", 16: "10b"}, ()),
)
"""Sizes grow as in Alpa (OSDI 2022), against which the paper measures; its own are pictures."""

_NOTE = (
    f"simulated: {MACHINE}; fp32, AdamW, {_BATCH} samples of 1024 tokens a step; sizes grow as Alpa's (OSDI 2022), "
    "since the paper's are pictures; operations of forward and backward, recomputation not counted"
)


def scalings() -> list[Case]:
    """One case a model and number of devices, then one for the best of each model."""
    cases = [
        Case(f"{family.model}-{size}/p={devices}", _PART, partial(_rows, family, devices))
        for family in _FAMILIES
        for devices, size in family.sizes.items()
    ]
    return [*cases, *(Case(f"{family.model}/all", _PART, partial(_best, family)) for family in _FAMILIES)]


def _rows(family: _Family, devices: int) -> Iterator[Row]:
    case, step = f"{family.model}-{family.sizes[devices]}/p={devices}", planned(family.training(devices))
    if isinstance(step, str):
        yield Row(case, "share_of_peak", None, None, "", "tepdist", step)
        return
    yield Row(case, "share_of_peak", None, step.flops / PEAK_FLOPS, "", "tepdist", f"{PICTURE}; {_NOTE}")
    yield Row(case, "throughput", None, step.throughput, "samples/s", "tepdist", f"{PICTURE}; {step.decision}")


def _best(family: _Family) -> Iterator[Row]:
    steps = [planned(family.training(devices)) for devices in family.sizes]
    shares = [step.flops / PEAK_FLOPS for step in steps if not isinstance(step, str)]
    note = f"best of {len(shares)} sizes, of 15.6 TFLOPS a device; {_NOTE}"
    yield Row(f"{family.model}/all", "share_of_peak", BEST_SHARE[family.model], max(shares), "", "tepdist", note)
