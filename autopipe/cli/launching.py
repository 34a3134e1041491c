"""Arguments of the ranks for a launch, and the results they leave."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from autopipe.backends.torch.checkpoint.format import check_unused
from autopipe.backends.torch.emission.rank import rank_module
from autopipe.backends.torch.launcher import (
    LaunchConfig,
    chrome_trace,
    launch_program,
    local_ranks,
    read_reports,
    run_alone,
)
from autopipe.backends.torch.runtime.data import check_data
from autopipe.backends.torch.runtime.heartbeat import Timeouts
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a program: the flags of the command that its ranks see."""

    manifest: Manifest
    device: str
    steps: int | None
    """One where not given, in inference over a file all that its samples fill."""
    data: str | None
    seed: int | None
    checkpoint: Path | None
    checkpoint_every: int | None
    resume: bool
    trace: Path | None
    outputs: Path | None
    blocking: bool

    def start(self, gang: LaunchConfig, note: Callable[[str], None]) -> list[dict[str, object]]:
        """Run the ranks and return their step reports. Raises as `launch_program`."""
        self._check()
        steps = self._checked_steps(note)
        note(placement_note(self.device, local_ranks(self.manifest, gang)[1]))
        with tempfile.TemporaryDirectory(prefix="autopipe-launch-") as name:
            scratch = Path(name)
            try:
                launch_program(self.manifest, self._arguments(scratch, steps, gang.timeouts), gang, note)
            finally:
                if self.trace is not None:
                    _write_json(self.trace, chrome_trace(scratch / "spans"))
            return read_reports(scratch / "report.jsonl")

    def rehearse(self, rank: int) -> dict[str, object]:
        """Run one step of one rank's program without the others and return what it did."""
        world_size = self.manifest.world_size
        if not 0 <= rank < world_size:
            raise ConfigurationError(f"there is no rank {rank}", hint=f"the program has ranks 0 to {world_size - 1}")
        if not self._has(rank):
            raise ConfigurationError(f"rank {rank} was not generated", hint=f"autopipe codegen PLAN --ranks {rank}")
        check_data(self.manifest, self.data, 1)
        with tempfile.TemporaryDirectory(prefix="autopipe-launch-") as name:
            report = Path(name) / "report.json"
            arguments = ["--dry-run", "--device", self.device, "--steps", "1", "--report", str(report)]
            arguments += ["--data", self.data] if self.data is not None else []
            arguments += ["--seed", str(self.seed)] if self.seed is not None else []
            run_alone(self.manifest.folder, arguments, rank, world_size)
            found: dict[str, object] = json.loads(report.read_text(encoding="utf-8"))
            return found

    def _has(self, rank: int) -> bool:
        """True if the rank's program was written: `codegen --ranks` leaves others out."""
        return (self.manifest.folder / f"{rank_module(rank)}.py").is_file()

    def _check(self) -> None:
        train = self.manifest.train
        missing = [rank for rank in range(self.manifest.world_size) if not self._has(rank)]
        if missing:
            raise ConfigurationError(
                f"{len(missing)} of {self.manifest.world_size} ranks were not generated, the first is {missing[0]}",
                hint="autopipe codegen PLAN, without --ranks, writes all",
            )
        if self.checkpoint is None and (self.resume or self.checkpoint_every):
            flag = "--resume" if self.resume else "--checkpoint-every"
            raise ConfigurationError(f"{flag} needs a folder", hint="give it with --checkpoint DIR")
        if self.checkpoint is not None and not train:
            raise ConfigurationError("a program for inference has nothing to save", hint="leave out --checkpoint")
        if self.checkpoint is not None and not self.resume:
            check_unused(self.checkpoint)
        if self.outputs is not None and train:
            raise ConfigurationError(
                "a program for training collects no outputs", hint="plan with --mode infer, or leave out --outputs"
            )

        for path in (self.trace, self.outputs):
            if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
                raise ConfigurationError(
                    f"{path} cannot be written", hint="name a file in a folder that is there and writable"
                )

    def _checked_steps(self, note: Callable[[str], None]) -> int:
        """How many steps to run, the data looked at as far as they read it. Raises ConfigurationError for data that
        does not fit."""
        read = self.steps or (1 if self.manifest.train else None)
        source = check_data(self.manifest, self.data, None if self.resume else read)
        steps = read or (1 if source is None else source.steps)
        if source is not None and (said := source.says(steps)):
            note(said)
        return steps

    def _arguments(self, scratch: Path, steps: int, timeouts: Timeouts) -> list[str]:
        found = ["--device", self.device, "--steps", str(steps), "--report", str(scratch / "report.jsonl")]
        if self.checkpoint is not None:
            found += ["--checkpoint", str(self.checkpoint.absolute()), "--resume"]
        found += ["--blocking"] if self.blocking else []
        values = {
            "--data": self.data,
            "--seed": self.seed,
            "--checkpoint-every": self.checkpoint_every,
            "--trace": scratch / "spans" if self.trace is not None else None,
            "--outputs": self.outputs.absolute() if self.outputs is not None else None,
            "--start-timeout": timeouts.start_s,
            "--step-timeout": timeouts.step_s,
            "--checkpoint-timeout": timeouts.checkpoint_s,
        }
        for flag, value in values.items():
            found += [flag, str(value)] if value is not None else []
        return found


def placement_note(device: str, ranks: int) -> str:
    """Where the ranks of this node run and what they talk over, in one line.

    Raises ConfigurationError where CUDA is asked for and there is none.
    """
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if not gpus and device == "cuda":
        raise ConfigurationError("no CUDA device is at hand", hint="use --device cpu", where="--device cuda")
    if not gpus:
        why = "" if device == "cpu" else "no CUDA device: "
        return f"{why}{ranks} ranks on the CPU, over gloo"
    if ranks <= gpus:
        return f"{ranks} ranks on {ranks} GPUs, over NCCL"
    return f"{ranks} ranks share {gpus} GPU{'s' if gpus > 1 else ''}: over gloo, through host memory"


def rehearsal_table(report: Mapping[str, Any]) -> Table:
    """Table of a rank's dry run."""
    table = Table("one step of", f"rank {report['rank']} of {report['world_size']}")
    table.add_row("stages", ", ".join(map(str, report["stages"])))
    table.add_row("tasks", " ".join(report["tasks"]))
    for way in ("sent", "received"):
        for rank, size in report[f"{way}_bytes"].items():
            table.add_row(f"{way} {'to' if way == 'sent' else 'from'} rank {rank}", f"{size:,} bytes")
    for kind, size in report["communication_bytes"].items():
        if size and kind != "send":  # Messages are listed by rank.
            table.add_row(kind.replace("_", "-"), f"{size:,} bytes")
    table.add_row("parameters", f"{report['parameters']:,} ({report['parameter_bytes'] / 2**20:.1f} MiB)")
    table.add_row("peak memory", f"{report['peak_memory_bytes'] / 2**20:.0f} MiB")
    return table


def _write_json(path: Path, form: object) -> None:
    """Write a JSON file, whole or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(form), encoding="utf-8")
        os.replace(scratch, path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
