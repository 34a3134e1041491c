"""The models that are planned and run, and what is measured of this machine before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from autopipe.cli.output import Output, Verbosity
from autopipe.cli.profile_programs import exchanges_of
from autopipe.cli.profile_session import Profiling
from autopipe.cli.request import request_of
from autopipe.configs import zoo
from autopipe.configs.load import load_configuration
from autopipe.ir.cost_file import costs_text
from autopipe.ir.measured_costs import Costs, DeviceCosts, merged
from autopipe.passes.pipeline import Request

SUBJECTS: Final[dict[str, dict[str, int]]] = {
    "gpt": {"layers": 2, "hidden": 128},
    "moe": {"layers": 1, "hidden": 128},
    "mt5": {"layers": 1, "hidden": 128},
    "two-branch": {"repeats": 2, "hidden": 128},
    "unet": {},
    "vgg19": {},
}
"""Models of the zoo, with the sizes that are not its defaults: steps of some ten milliseconds on two cores."""
BATCH: Final = 32
"""Samples of a step."""
_SIZES: Final = (1, 2, 4, 8, 16, 32)
"""Micro-batches whose operators are measured: shares of larger ones among them."""
_DEVICE: Final = "one core"
_OPERATIONS_S: Final = 10.0
_EXCHANGES_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Subject:
    """A model of the zoo in a file."""

    name: str
    path: Path


def build(name: str, folder: Path) -> Subject:
    """Write a model of `SUBJECTS`, with its loss and random weights."""
    path = folder / f"{name}.onnx"
    zoo.build(zoo.configure(name, {**SUBJECTS[name], "loss": True, "weights": "random"})).save(path)
    return Subject(name, path)


def exchange_costs(ranks: int) -> Costs:
    """What messages and collectives of up to so many ranks take here. Raises LaunchError where a rank fails."""
    exchanges = exchanges_of(ranks, "cpu", _EXCHANGES_S)
    return Costs((DeviceCosts(_DEVICE, (f"exchanges of {ranks} ranks",), exchanges=exchanges),))


def operation_costs(subject: Subject, ranks: int) -> Costs:
    """What the operators of a model take on a core while all other cores are busy, and up to so many ranks in turns."""
    profiling = Profiling(
        request=request_of(load_configuration(words={"--cluster": "cpu-local"}), subject.path),
        sizes=_SIZES,
        degrees=(),
        device="cpu",
        name=_DEVICE,
        threads=1,
        ranks=None,
        source="torch",
        seconds=_OPERATIONS_S,
    )
    with Output(verbosity=Verbosity.QUIET).progress("operators") as bar:
        costs, _ = profiling.run(bar)
    return Costs((costs,))


def request(subject: Subject, ranks: int, costs: Sequence[Costs], folder: Path) -> Request:
    """What is asked for: the best plan for so many ranks of this machine, at costs measured on it."""
    path = folder / f"{subject.name}.costs"
    path.write_text(costs_text(merged(costs)), encoding="utf-8")
    words = {"--gpus": ranks, "--cluster": "cpu-local", "--costs": path, "--batch-size": BATCH}
    return request_of(load_configuration(words={flag: str(word) for flag, word in words.items()}), subject.path)
