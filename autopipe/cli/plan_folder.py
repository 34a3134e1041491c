"""The plan folder: written whole or not at all, and opened again."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from autopipe.cli.placement_text import placement_text
from autopipe.cli.request import effective, request_of
from autopipe.configs.configuration import Configuration
from autopipe.configs.load import dump_configuration, load_configuration
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.plan import Plan
from autopipe.ir.plan_file import PLAN_FILE, read_plan, write_plan
from autopipe.ir.timeline import Timeline
from autopipe.passes.pipeline import PlanResult, reopen
from autopipe.passes.schedule.simulate import simulate

CONFIGURATION_FILE = "config.yaml"
PLACEMENT_FILE = "placement.yaml"


def open_plan(folder: Path) -> PlanResult:
    """The plan in `folder`, its problem made anew from the model's file and the effective configuration.

    Raises ConfigurationError for a folder that holds no plan, a file of it that cannot be taken, or a plan that does
    not belong to the model; ModelError for a model that cannot be read.
    """
    check_plan_folder(folder)
    plan = read_plan(folder)
    configuration = load_configuration(folder / CONFIGURATION_FILE)
    model = Path(plan.model)
    if not model.is_file():
        raise ConfigurationError(
            f"the model of the plan is not at {plan.model}", hint="put it back, or plan again", where=str(folder)
        )
    if not Path(configuration.costs).is_file():
        # What they predicted is in the plan, which can be run without them.
        configuration = replace(configuration, costs="roofline")
    return reopen(request_of(configuration, model), plan)


def open_prediction(folder: Path) -> tuple[Plan, Timeline]:
    """The plan in `folder` and the step that its predictions make; the model's file is not read.

    Raises ConfigurationError for a folder that holds no plan, or a file of it that cannot be taken.
    """
    check_plan_folder(folder)
    plan = read_plan(folder)
    return plan, simulate(plan.schedule, tuple(stage.devices for stage in plan.placement.stages), plan.prediction)


def check_plan_folder(folder: Path) -> None:
    """Raise ConfigurationError unless `folder` is a folder with a plan."""
    if not (folder / PLAN_FILE).is_file():
        what = "holds no plan" if folder.is_dir() else "is no folder" if folder.exists() else "does not exist"
        raise ConfigurationError(f"{folder} {what}", hint="autopipe plan MODEL -o DIR makes a plan folder")


def check_editable(folder: Path) -> tuple[Path, Path]:
    """The configuration and the placement in `folder`; raise ConfigurationError unless it holds a plan with both."""
    check_plan_folder(folder)
    paths = folder / CONFIGURATION_FILE, folder / PLACEMENT_FILE
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None:
        raise ConfigurationError(f"{missing} does not exist", hint=f"plan again: every plan folder has {missing.name}")
    return paths


def check_target(folder: Path) -> None:
    """Raise ConfigurationError where a plan cannot be written to `folder`: it is asked before the long work begins.

    A folder that exists is replaced only if it holds a plan or nothing.
    """
    replaceable = not folder.exists() or (folder.is_dir() and (_is_plan(folder) or not any(folder.iterdir())))
    if not replaceable or folder.is_symlink():
        raise ConfigurationError(f"{folder} exists and is no plan folder", hint="choose another one with -o")
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise ConfigurationError(f"{parent} is no folder", hint="make it, or choose another one with -o")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{parent} cannot be written to", hint="choose another one with -o")


def write_plan_folder(folder: Path, planned: PlanResult, configuration: Configuration) -> None:
    """Write the plan, its effective configuration and its placement, to be edited, to `folder`.

    All are written under a temporary name beside it, which is then put there. Raises ConfigurationError where that
    fails; what was at `folder` is then still there.
    """
    check_target(folder)
    target = folder.absolute()
    try:
        made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            made.chmod(0o777 & ~_umask())
            text = dump_configuration(effective(configuration, planned))
            (made / CONFIGURATION_FILE).write_text(text, encoding="utf-8")
            stages = placement_text(planned.problem.graph, planned.plan.placement)
            (made / PLACEMENT_FILE).write_text(stages, encoding="utf-8")
            write_plan(made, planned.plan, planned.timeline, home=target)
            _replace(target, made)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write the plan: {error.strerror}", where=str(folder)) from error


def _replace(target: Path, made: Path) -> None:
    """Put `made` where `target` is; the former one is removed once the new one stands."""
    if not target.exists():
        made.rename(target)
        return
    former = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)) / "former"
    target.rename(former)
    try:
        made.rename(target)
    except OSError:
        former.rename(target)
        raise
    finally:
        shutil.rmtree(former.parent, ignore_errors=True)


def _is_plan(folder: Path) -> bool:
    return (folder / PLAN_FILE).is_file()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
