"""Models, plans and programs of the rows: made on any machine, and read where the GPU is.

A prepared folder can be moved. It has the models without weights, a plan folder with its program
for each `PlannedProgram`, and `prepared.json`, which says what could not be made.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autopipe.configs.cluster import cluster_preset
from autopipe.configs.zoo import Setting, build, configure
from autopipe.ir.codec import encode
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.files import read_json_record
from benchmarks.cuda.processes import Failed

CLUSTER = "h100-80gb"
"""Preset for which plans are made: the H200 differs in memory only, in its size and bandwidth."""
HOST_LAUNCH = "75us"
"""Time per operator of the host with the GPU, as measured in an earlier run."""
INDEX = "prepared.json"
_FORMAT = "autopipe.benchmarks.cuda/1"


@dataclass(frozen=True, slots=True)
class PlannedProgram:
    """A program of a model of the zoo."""

    name: str
    zoo: str
    settings: tuple[tuple[str, Setting], ...]
    samples: int
    """Samples per step."""
    flags: tuple[str, ...]
    """Flags of `autopipe plan`."""
    ranks: int = 1
    on_slow_host: bool = False
    """True if the plan counts the host's time per operator."""

    @property
    def model(self) -> str:
        """Name of the model's file, which programs of equal models share."""
        sizes = [
            f"{key}-{'-'.join(map(str, value)) if isinstance(value, tuple) else value}"
            for key, value in self.settings
        ]
        return "_".join([self.zoo, *sizes]).replace(".", "-") + ".onnx"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared folder."""

    folder: Path
    failures: Mapping[str, str]
    """Error of each program that could not be made, by the program's name."""

    def program(self, planned: PlannedProgram) -> Path:
        """Return the folder of a program. Raises Failed if it was not made."""
        if planned.name in self.failures:
            raise Failed(f"not prepared: {self.failures[planned.name]}")
        program = _plan_folder(self.folder, planned) / "program"
        if not program.is_dir():
            raise Failed(f"{self.folder} has no program {planned.name!r}: prepare it again")
        return program

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def prepare(
    folder: Path, programs: Iterable[PlannedProgram], tiny: bool, note: Callable[[str], None]
) -> Prepared:
    """Make the models, plans and programs in `folder` and return it. `note` is told of each program
    and failure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}
    for planned in programs:
        try:
            _make(folder, planned)
            note(planned.name)
        except (AutopipeError, Failed) as error:
            failures[planned.name] = " ".join(str(error).split())
            note(f"{planned.name}: {failures[planned.name]}")
    index = {"format": _FORMAT, "tiny": tiny, "failures": failures}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return Prepared(folder, failures)


def open_prepared(folder: Path, tiny: bool) -> Prepared:
    """Return a prepared folder. Raises ConfigurationError if it is none, or one for other sizes."""
    record = read_json_record(folder / INDEX, _FORMAT)
    if record.get("tiny", bool) is not tiny:
        sizes = "for --tiny" if not tiny else "not for --tiny"
        raise ConfigurationError(
            f"the folder was prepared {sizes}", "use the same sizes for both", str(folder)
        )
    return Prepared(folder, dict(record.get("failures", dict[str, str])))


def _make(folder: Path, planned: PlannedProgram) -> None:
    """Write the model, unless an earlier program has it, and the plan with its program."""
    model = folder / "models" / planned.model
    if not model.exists():
        model.parent.mkdir(exist_ok=True)
        build(
            configure(planned.zoo, {**dict(planned.settings), "loss": True, "weights": "none"})
        ).save(model)
    plan = _plan_folder(folder, planned)
    plan.parent.mkdir(exist_ok=True)
    cluster = _slow_host(model.parent) if planned.on_slow_host else CLUSTER
    sizes = ["--gpus", planned.ranks, "--cluster", cluster, "--batch-size", planned.samples]
    _autopipe("plan", model, *sizes, *planned.flags, "-o", plan)
    _autopipe("codegen", plan)


def _slow_host(folder: Path) -> Path:
    """Write the preset with the time of a slow host into `folder`, and return the file."""
    description = cluster_preset(CLUSTER)
    assert description.device is not None
    device = {**encode(description.device), "host_launch": HOST_LAUNCH}
    path = folder / "slow-host.yaml"
    path.write_text(yaml.safe_dump({**encode(description), "device": device}), encoding="utf-8")
    return path


def _plan_folder(folder: Path, planned: PlannedProgram) -> Path:
    return folder / "plans" / planned.name


def _autopipe(*words: object) -> None:
    """Run a command of autopipe quietly in this process. Raises Failed with its error."""
    from autopipe.cli.main import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([*map(str, words), "-q"])
    if code:
        raise Failed(f"autopipe {words[0]}: {said.getvalue().strip()}")


def predictions(program: Path) -> Mapping[str, Any]:
    """Return the predictions of a program's plan: seconds of a step, and those of them in which the
    device waits for the host, bytes of the largest rank, FLOPs of the model.
    """
    plan = json.loads((program.parent / "plan.json").read_text(encoding="utf-8"))
    summary = plan["summary"]
    manifest = json.loads((program / "manifest.json").read_text(encoding="utf-8"))
    return {
        "step_s": summary["step_time_s"],
        "host_s": (plan["breakdown"] or {}).get("host_s", 0.0),
        "peak_bytes": max(summary["peak_memory_bytes"]),
        "flops": manifest.get("metrics", {}).get("model_flops", math.nan),
    }
