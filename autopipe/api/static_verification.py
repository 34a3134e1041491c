"""Command `verify --static`: prove properties of a program without a run and without torch."""

from __future__ import annotations

import filecmp
from dataclasses import dataclass, replace
from pathlib import Path

from autopipe.api.codegen import write_programs
from autopipe.api.events import Events, SilentEvents
from autopipe.api.plan_folder import open_plan
from autopipe.api.program_folder import find_program_folder, other_plan_error
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.ir.output_files import scratch_folder


@dataclass(frozen=True, slots=True)
class StaticVerificationResult:
    """Facts that were proven about a program without a run."""

    program: Path
    tasks: int
    """Number of tasks of all ranks. It is proven that each runs after the tasks that it depends on.
    """
    ranks: int
    channels: int
    """Number of channels, each for the messages from one rank to another. It is proven that no rank
    waits forever for a message, with gloo and with NCCL.
    """
    files: int
    edited: tuple[str, ...]
    """Files of the program that differ from the files that `codegen` writes for the plan."""

    @property
    def data(self) -> dict[str, object]:
        """The facts as data of `verify --static --json`."""
        return {
            "tasks": self.tasks,
            "channels": self.channels,
            "files": self.files,
            "edited": list(self.edited),
        }


def verify_statically(
    program: Path, *, model: Path | None = None, events: Events | None = None
) -> StaticVerificationResult:
    """Prove that the schedule of a program keeps every dependency and that no rank deadlocks, and
    compare the files with those that `codegen` writes for the plan.

    `program` is the folder of a program in its plan folder, or the plan folder. `model` is the ONNX
    file if it is not where it was planned. Raises ConfigurationError if the folder does not hold
    the program of the plan, and CodegenError if the proof fails.
    """
    events = events or SilentEvents()
    program = find_program_folder(program)
    manifest = read_manifest(program.absolute())
    folder = program.parent
    with events.progress("verifying", total=2) as bar, scratch_folder("verify") as scratch:
        if model is None and manifest.model.is_file():
            # The ONNX file that the manifest names is used, because `codegen --model` may have
            # replaced the file that the plan names.
            model = manifest.model
        # `open_plan` also checks that the schedule respects the dependencies of its tasks.
        planned = open_plan(folder, model)
        bar.advance(note="schedule")
        if planned.digest != manifest.plan:
            raise other_plan_error(program, folder)
        made = Path(scratch) / "program"
        # The generated files contain the path of the model. They are generated with the path in the
        # manifest, because otherwise they would differ from the unedited program.
        planned = replace(planned, plan=replace(planned.plan, model=str(manifest.model)))
        lowered = write_programs(planned, made, home=program, style=manifest.style)
        bar.advance(note="messages")
        names = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
        edited = tuple(name for name in names if not _are_equal(made / name, program / name))
    return StaticVerificationResult(
        program=program,
        tasks=sum(map(len, planned.plan.schedule.tasks)),
        ranks=lowered.world_size,
        channels=len(lowered.channels),
        files=len(names),
        edited=edited,
    )


def _are_equal(one: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(one, other, shallow=False)
