"""The plan folder: written whole or not at all, and opened again; its placement as YAML that a person can edit."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml

from autopipe.cli.request import effective, request_of
from autopipe.configs.configuration import Configuration, dump_configuration, load_configuration
from autopipe.configs.yaml_source import Dumper
from autopipe.ir.codec import encode
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.files import replacing_folder
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.plan import PLAN_FILE, Plan, read_plan, write_plan
from autopipe.ir.timeline import Timeline
from autopipe.passes.pipeline import PlanResult, reopen
from autopipe.passes.placement.given import Given, written
from autopipe.passes.schedule.simulate import simulate

_HEAD = """\
# What this plan computes where. Change it (move a line from stage to stage, say), and plan again from this folder:
#   autopipe plan --from DIR
# Nodes are names, globs or [first, last]; `samples` is the axis that counts samples, whatever an operator calls it.
"""


def placement_text(graph: Graph, placement: Placement) -> str:
    """The placement as a YAML file that, loaded as a configuration, gives exactly this placement of `graph`."""
    forms = cast("list[dict[str, Any]]", encode(written(graph, placement))["placement"])
    stages = [_stage(form, placement.pipelines) for form in forms]
    document = {"strategy": {"name": Given.name, "placement": stages}}
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=False)
    return _HEAD + text


def _stage(form: dict[str, Any], pipelines: int) -> dict[str, Any]:
    """A stage with `nodes` where a person looks for them: behind what is said of all of them."""
    pipeline = {"pipeline": form["pipeline"]} if pipelines > 1 else {}
    splits = [{"split": _Pairs(each["split"]), "nodes": _nodes(each["nodes"])} for each in form["splits"]]
    facts = {key: form[key] for key in ("micro_batch_size", "recompute")}
    return {"devices": _Line(form["devices"]), **facts, **pipeline, "nodes": _nodes(form["nodes"]), "splits": splits}


def _nodes(entries: list[Any]) -> list[Any]:
    return [_Line(entry) if isinstance(entry, list) else entry for entry in entries]


class _Line(list[Any]):
    """A list on one line."""


class _Pairs(dict[str, Any]):
    """A mapping on one line."""


class _Dumper(Dumper):
    """Writes block style but for `_Line` and `_Pairs`."""


_Dumper.add_representer(_Line, lambda to, value: to.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True))
_Dumper.add_representer(_Pairs, lambda to, value: to.represent_mapping("tag:yaml.org,2002:map", value, flow_style=True))


CONFIGURATION_FILE = "config.yaml"
PLACEMENT_FILE = "placement.yaml"


def open_plan(folder: Path) -> PlanResult:
    """The plan in `folder`, its problem made anew from the model's file and the effective configuration. Raises
    ConfigurationError for no plan, or one that is not the model's; ModelError for the model."""
    check_plan_folder(folder)
    plan = read_plan(folder)
    configuration = load_configuration(folder / CONFIGURATION_FILE)
    model = Path(plan.model)
    if not model.is_file():
        hint = "put it back, or plan again"
        raise ConfigurationError(f"the model of the plan is not at {plan.model}", hint, str(folder))
    if not Path(configuration.costs).is_file():
        # What they predicted is in the plan, which can be run without them.
        configuration = replace(configuration, costs="roofline")
    return reopen(request_of(configuration, model), plan)


def open_prediction(folder: Path) -> tuple[Plan, Timeline]:
    """The plan in `folder` and the step that its predictions make. Raises as `open_plan`, but reads no model."""
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
    """Raise ConfigurationError where a plan cannot be written to `folder`: before the long work begins. A folder that
    exists is replaced only if it holds a plan or nothing."""
    parent, hint = folder.absolute().parent, "choose another one with -o"
    is_plan = folder.is_dir() and ((folder / PLAN_FILE).is_file() or not any(folder.iterdir()))
    if folder.is_symlink() or (folder.exists() and not is_plan):
        raise ConfigurationError(f"{folder} exists and is no plan folder", hint)
    if not parent.is_dir():
        raise ConfigurationError(f"{parent} is no folder", f"make it, or {hint}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{parent} cannot be written to", hint)


def write_plan_folder(folder: Path, planned: PlanResult, configuration: Configuration) -> None:
    """Write the plan, its effective configuration and its placement, to be edited, to `folder`: all or nothing."""
    check_target(folder)
    target = folder.absolute()
    texts = {
        CONFIGURATION_FILE: dump_configuration(effective(configuration, planned)),
        PLACEMENT_FILE: placement_text(planned.problem.graph, planned.plan.placement),
    }
    try:
        with replacing_folder(target) as made:
            for name, text in texts.items():
                (made / name).write_text(text, encoding="utf-8")
            write_plan(made, planned.plan, planned.timeline, home=target)
    except OSError as error:
        raise ConfigurationError(f"cannot write the plan: {error.strerror}", where=str(folder)) from error
