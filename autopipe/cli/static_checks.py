"""`autopipe verify --static`: proofs about a program that need neither torch nor a run."""

from __future__ import annotations

import filecmp
import tempfile
from pathlib import Path

from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.cli.codegen import generate
from autopipe.cli.output import Output
from autopipe.cli.plan_folder import open_plan
from autopipe.ir.errors import ConfigurationError


def check_static(program: Path, output: Output) -> None:
    """Prove that the schedule of the plan that holds `program` keeps every dependency and that all ranks come to their
    ends, over gloo and over NCCL, and say which files are not as the plan gives them. Raises ConfigurationError where
    the folder holds no program of the plan, or one that is not proven: CodegenError."""
    manifest, folder = read_manifest(program.absolute()), program.parent
    with output.progress("verifying", total=2) as bar, tempfile.TemporaryDirectory() as scratch:
        planned = open_plan(folder)  # Its schedule is checked when it is read.
        bar.advance(note="schedule")
        if planned.digest != manifest.plan:
            hint = f"autopipe codegen {folder} writes it again"
            raise ConfigurationError(f"{program} is not the program of the plan in {folder}", hint)
        made = Path(scratch) / "program"
        lowered = generate(planned, made)
        bar.advance(note="messages")
        names = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
        edited = [name for name in names if not _same(made / name, program / name)]
    for name in edited:
        output.warn(f"{program / name} was edited: what is proven is the file as codegen writes it")
    tasks = sum(map(len, planned.plan.schedule.tasks))
    output.result(
        {"tasks": tasks, "channels": len(lowered.channels), "files": len(names), "edited": edited},
        f"schedule  {tasks} tasks of {lowered.world_size} ranks keep every dependency",
        f"messages  on {len(lowered.channels)} channels, all ranks come to their ends over gloo and NCCL",
        f"files     {len(names) - len(edited)} of {len(names)} are as the plan gives them",
    )


def _same(made: Path, found: Path) -> bool:
    return found.is_file() and filecmp.cmp(made, found, shallow=False)
