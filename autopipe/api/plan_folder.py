"""The plan folder: writing and reading of its five files, among them the placement as YAML that a
person can edit.

`plan.json` contains the SHA-256 digests of all five files (`ir/output_files.py`). Other files of
the folder are never changed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import yaml

from autopipe.api.request import effective_configuration, make_request
from autopipe.configs.configuration import Configuration, dump_configuration, load_configuration
from autopipe.configs.yaml_source import Dumper
from autopipe.ir.codec import encode, schema_keys
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import FileSlice, Graph
from autopipe.ir.graph_file import GRAPH_FILE, PlannedGraph, read_graph, write_graph
from autopipe.ir.movable_paths import movable_path, relative_path
from autopipe.ir.output_files import (
    FolderDigests,
    add_digests,
    add_path_to_errors,
    edited_files,
    file_of_interrupted_write,
    open_replacement_files,
    open_replacement_folder,
    read_digests,
)
from autopipe.ir.placement import Placement
from autopipe.ir.plan import PLAN_FILE, SCHEDULE_FILE, Plan, read_plan, write_plan
from autopipe.ir.timeline import Timeline
from autopipe.ir.training import change_data_path
from autopipe.ir.words import printable
from autopipe.passes.frontend.elements import external_data_path
from autopipe.passes.frontend.load import file_digest
from autopipe.passes.frontend.scopes import layers_of
from autopipe.passes.pipeline import PlanResult, planned_graph, read_planned_model, reopen_plan
from autopipe.passes.placement.explicit import Explicit, NodeNames, explicit_strategy
from autopipe.passes.schedule.simulate import simulate

_PLACEMENT_FILE_HEAD = """\
# What this plan computes where. Change it (move a line from stage to stage, say), and plan again \
from this folder:
#   autopipe plan --from DIR
# Layers are [first, last] or names such as encoder[0:4]; nodes are names, globs or [first, last]. \
`samples` is the axis that counts samples, whatever an \
operator calls it.
"""


def placement_text(graph: Graph, placement: Placement, layers: Sequence[str] = ()) -> str:
    """Return a YAML text that, loaded as a configuration, gives exactly this placement of `graph`.

    `layers` has the name of the layer of each node, or is empty. With layers, a comment with the
    name of the layer precedes the entries of each layer.
    """
    strategy = explicit_strategy(graph, placement, layers)
    forms = cast("list[dict[str, Any]]", encode(strategy)["placement"])
    stages = [_stage_yaml(form, placement.pipelines) for form in forms]
    # The name is written last, so that a file without a name is recognized as truncated.
    document = {"strategy": {"placement": stages, "name": Explicit.name}}
    text: str = yaml.dump(
        document, Dumper=_PlacementDumper, sort_keys=False, width=120, allow_unicode=False
    )
    return _PLACEMENT_FILE_HEAD + (
        _add_layer_comments(text, NodeNames(graph), strategy, layers) if layers else text
    )


def _add_layer_comments(
    text: str, names: NodeNames, strategy: Explicit, layers: Sequence[str]
) -> str:
    """Return the text with a comment above the first entry of each layer in a stage."""
    entries = [
        entry for stage in strategy.placement if stage.nodes for entry in (None, *stage.nodes)
    ]
    lines: list[str] = []
    is_inside = False
    layer = ""
    number = 0
    for line in text.splitlines(keepends=True):
        if line == "    nodes:\n":
            is_inside = True
            layer = ""
            number = number + 1
        elif is_inside and line.startswith("    - "):
            entry = entries[number]
            assert entry is not None, "None stands for the line before the entries of a stage"
            own = layers[names.selected_nodes(entry)[0]]
            if own != layer:
                lines.append(f"    # {printable(own or 'in no layer')}\n")
            layer = own
            number = number + 1
        elif not line.startswith("     "):
            is_inside = False
        lines.append(line)
    return "".join(lines)


def _stage_yaml(form: dict[str, Any], pipelines: int) -> dict[str, Any]:
    """Return a stage as YAML values. The keys that describe the whole stage, such as its devices,
    precede the key `nodes`.
    """
    pipeline = {"pipeline": form["pipeline"]} if pipelines > 1 else {}
    layers = form.get("layers")
    selected = {} if layers is None else {"layers": _selection_yaml(layers)}
    listed = {"nodes": _nodes_yaml(form["nodes"])} if form["nodes"] else {}
    splits = [
        {"split": _OneLineMapping(each["split"]), "nodes": _nodes_yaml(each["nodes"])}
        for each in form["splits"]
    ]
    facts = {key: form[key] for key in ("micro_batch_size", "recompute")}
    return {
        "devices": _OneLineList(form["devices"]),
        **facts,
        **pipeline,
        **selected,
        **listed,
        "splits": splits,
    }


def _selection_yaml(layers: Any) -> Any:
    """Return a selection of layers as YAML values: a pair of numbers on one line."""
    return _OneLineList(layers) if isinstance(layers[0], int) else layers


def _nodes_yaml(entries: list[Any]) -> list[Any]:
    return [_OneLineList(entry) if isinstance(entry, list) else entry for entry in entries]


class _OneLineList(list[Any]):
    """A list on one line."""


class _OneLineMapping(dict[str, Any]):
    """A mapping on one line."""


class _PlacementDumper(Dumper):
    """Writes block style but for `_OneLineList` and `_OneLineMapping`."""


_PlacementDumper.add_representer(
    _OneLineList,
    lambda to, value: to.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True),
)
_PlacementDumper.add_representer(
    _OneLineMapping,
    lambda to, value: to.represent_mapping("tag:yaml.org,2002:map", value, flow_style=True),
)


CONFIGURATION_FILE = "config.yaml"
PLACEMENT_FILE = "placement.yaml"
_PLAN_FILES = (CONFIGURATION_FILE, PLACEMENT_FILE, GRAPH_FILE, SCHEDULE_FILE, PLAN_FILE)
_LAST_KEY_BY_FILE: Final = {
    CONFIGURATION_FILE: schema_keys(Configuration)[-1].path[0],
    PLACEMENT_FILE: "strategy.name",
}
"""For each file, the key that `plan` writes last."""
_LAST_KEY_PATTERN: Final = {
    CONFIGURATION_FILE: re.compile(
        rb"^%b\b" % _LAST_KEY_BY_FILE[CONFIGURATION_FILE].encode(), re.MULTILINE
    ),
    PLACEMENT_FILE: re.compile(rb"""(?:^\s*|[{,]\s*)["']?name["']?\s*:""", re.MULTILINE),
}
"""For each file, a pattern that matches the key that `plan` writes last, at any position of an
edited file.
"""
_RESTORE_HINT: Final = "restore the file, or plan again"
_SCRATCH_PREFIX = ".autopipe-plan-"
"""Beginning of the name of the folder, inside a plan folder, to which new files are written before
they replace the old files.
"""


def open_plan(folder: Path, model: Path | None = None) -> PlanResult:
    """Return the plan in `folder` and its problem, built from the effective configuration and the
    graph in `graph.json`.

    The ONNX file is `model`, or the one that was planned if `model` is None. It is read only if
    `graph.json` is missing, as in a folder of an earlier version of autopipe, if the configuration
    was edited, or if the ONNX file has changed. Raises ConfigurationError if the folder has no
    plan, if the ONNX file is required and missing, or if it is not the one that was planned;
    ModelError if it cannot be read.
    """
    plan, own = _read_complete_plan(folder)
    if model is not None:
        plan = replace(plan, model=str(model.absolute()))
    configuration = load_configuration(folder / CONFIGURATION_FILE)
    _check_last_keys(folder, own)
    file = Path(plan.model)
    stored = _stored_graph(folder, plan, own)
    if not file.is_file() and (stored is None or model is not None):
        hint = "set the path of the model with --model FILE, restore the file, or plan again"
        raise ConfigurationError(
            f"the model of the plan does not exist: {plan.model}", hint, str(folder)
        )
    if not Path(configuration.costs).is_file():
        # The cost file is not required, because the plan contains the predictions. If it is
        # missing, the roofline model replaces it.
        configuration = replace(configuration, costs="roofline")
    return reopen_plan(make_request(configuration, file), plan, stored)


def _stored_graph(folder: Path, plan: Plan, own: FolderDigests | None) -> PlannedGraph | None:
    """Return the graph in `graph.json` of the plan folder `folder`, or None if the ONNX file of
    `plan` has to be read instead. None is returned if there is no `graph.json`, if it holds another
    graph than the plan's, if the configuration or `plan.json` was edited, or if the ONNX file has
    changed. `own` contains the digests of the files of the folder, as `plan.json` records them.

    Raises ConfigurationError if `graph.json` was edited, and ModelError if the ONNX file cannot be
    read.
    """
    path = folder / GRAPH_FILE
    if not path.is_file() or own is None or GRAPH_FILE not in own.digests:
        return None
    if not own.holds(path):
        raise _mixed_files_error(path, "was edited, or is of another plan than")
    if not own.holds(folder / CONFIGURATION_FILE):
        return None
    stored = read_graph(path)
    if stored.graph.digest() != plan.graph_digest:
        return None
    file = Path(plan.model)
    storages = (each.storage for each in stored.graph.parameters)
    for name in {each.file for each in storages if isinstance(each, FileSlice) and each.file}:
        external_data_path(name, file, str(path))
    is_planned = not file.is_file() or file_digest(file) == stored.model_digest
    return stored if is_planned else None


def graph_of_plan(folder: Path, plan: Plan) -> Graph:
    """Return the graph of `plan`, the plan in `folder`. It is read from `graph.json` if possible,
    otherwise from the ONNX file, whose graph may differ from that of the plan. Raises the errors of
    `open_plan`.
    """
    stored = _stored_graph(folder, plan, read_digests(folder / PLAN_FILE))
    if stored is not None:
        return stored.graph
    configuration = replace(load_configuration(folder / CONFIGURATION_FILE), costs="roofline")
    return read_planned_model(make_request(configuration, Path(plan.model)), plan).graph


def open_prediction(folder: Path) -> tuple[Plan, Timeline]:
    """Return (plan, timeline): the plan in `folder`, and a step simulated from its predictions.
    Raises ConfigurationError as `open_plan`. Neither the graph nor the ONNX file is read.
    """
    plan, _ = _read_complete_plan(folder)
    return plan, simulate(
        plan.schedule, tuple(stage.devices for stage in plan.placement.stages), plan.prediction
    )


def check_plan_folder(folder: Path) -> None:
    """Raise ConfigurationError unless `folder` is a folder with a plan."""
    if not (folder / PLAN_FILE).is_file():
        what = (
            "contains no plan"
            if folder.is_dir()
            else "is not a folder"
            if folder.exists()
            else "does not exist"
        )
        raise ConfigurationError(
            f"{folder} {what}", hint="create a plan folder with autopipe plan MODEL -o DIR"
        )


def check_editable(folder: Path) -> tuple[Path, Path]:
    """Return the paths of `config.yaml` and `placement.yaml` in a plan folder. Raises
    ConfigurationError if the folder holds no plan, or if one of the files is missing or truncated.
    """
    check_plan_folder(folder)
    paths = folder / CONFIGURATION_FILE, folder / PLACEMENT_FILE
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None:
        raise ConfigurationError(
            f"the file {missing} does not exist", hint=f"plan again to write {missing.name}"
        )
    _check_last_keys(folder, read_digests(folder / PLAN_FILE))
    return paths


def _check_last_keys(folder: Path, own: FolderDigests | None) -> None:
    """Raise ConfigurationError if the configuration or the placement in `folder` was cut short
    after it was written. `own` contains the digests of the files of the folder, as `plan.json`
    records them.

    An edited file must end with a line break and have the key that `plan` writes last
    (`_LAST_KEY_BY_FILE`). Without this check, a file that was cut short could be valid: keys of a
    configuration would silently have their defaults, and nodes of a placement no splits.
    """
    for path in (folder / CONFIGURATION_FILE, folder / PLACEMENT_FILE):
        if not path.is_file() or (own is not None and own.holds(path)):
            continue
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            raise ConfigurationError(
                f"the file {path} is truncated: it does not end with a line break", _RESTORE_HINT
            )
        if _LAST_KEY_PATTERN[path.name].search(content) is None:
            message = (
                f"{path} is truncated: `{_LAST_KEY_BY_FILE[path.name]}`, the last key that `plan` "
                "writes, is missing"
            )
            raise ConfigurationError(message, _RESTORE_HINT)


def _read_complete_plan(folder: Path) -> tuple[Plan, FolderDigests | None]:
    """Return (plan, digests): the plan in `folder`, and the digests of the files of the folder as
    `check_unmixed` returns them. Raises ConfigurationError if the folder has no plan, or files of
    different plans.
    """
    own = check_unmixed(folder)
    plan = read_plan(folder)
    if own is not None and not own.holds(folder / SCHEDULE_FILE):
        raise _mixed_files_error(folder / SCHEDULE_FILE, "was edited, or is of another plan than")
    return plan, own


def check_unmixed(folder: Path) -> FolderDigests | None:
    """Return the digests of the files in the plan folder `folder` that `plan.json` records. Return
    None if it records none, because an earlier version of autopipe wrote it. Raises
    ConfigurationError if `folder` holds no plan, or if the writing of a plan to it was interrupted.
    """
    check_plan_folder(folder)
    own = read_digests(folder / PLAN_FILE)
    mixed = file_of_interrupted_write(folder, own, _leftover_heads(folder))
    if mixed is not None:
        raise _mixed_files_error(mixed, "is of a later plan, whose writing was interrupted, than")
    return own


def _mixed_files_error(path: Path, what: str) -> ConfigurationError:
    hint = f"plan again: autopipe plan MODEL -o {shlex.quote(str(path.parent))}"
    return ConfigurationError(f"{path} {what} {PLAN_FILE}", hint=hint)


def _leftover_heads(folder: Path) -> list[Path]:
    """Return the paths of the `plan.json` files in the scratch folders that interrupted writings of
    a plan left in `folder`.
    """
    return sorted(folder.glob(f"{_SCRATCH_PREFIX}*/{PLAN_FILE}"))


def _digests_of_folder(folder: Path) -> list[FolderDigests]:
    """Return the digests that the `plan.json` of `folder` and those of interrupted writings record:
    one object per file that records digests.
    """
    heads = (folder / PLAN_FILE, *_leftover_heads(folder))
    return [found for found in map(read_digests, heads) if found is not None]


def check_target(folder: Path, base: Path | None = None, force: bool = False) -> None:
    """Raise ConfigurationError if a plan cannot be written to `folder`. Callers check this before
    the long search begins.

    Files that were edited are replaced only with `force`. If `base`, the plan folder from which the
    new plan is made, is the same folder, its edited configuration and placement are the input of
    the plan. Without `force`, they are kept.
    """
    parent = folder.absolute().parent
    hint = "choose another folder with -o"
    is_target = folder.is_dir() and (force or _may_hold_plan(folder))
    if folder.is_symlink() or (folder.exists() and not is_target):
        raise ConfigurationError(f"{folder} exists and is not a plan folder", hint)
    if not parent.is_dir():
        raise ConfigurationError(
            f"the folder {parent} does not exist", f"create the folder, or {hint}"
        )
    place = folder if folder.is_dir() else parent
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigurationError(f"the folder {place} is not writable", hint)
    if force:
        return
    kept = (CONFIGURATION_FILE, PLACEMENT_FILE) if _is_same_path(base, folder) else ()
    edited = edited_files(
        [folder / name for name in _PLAN_FILES if name not in kept], _digests_of_folder(folder)
    )
    if edited:
        what = (
            "was edited"
            if read_digests(folder / PLAN_FILE)
            else "was edited, or an earlier version of autopipe wrote it"
        )
        ways = (
            "plan the edited folder with --from, choose another folder with -o, or replace the "
            "folder with --force"
        )
        raise ConfigurationError(f"{edited[0]} {what}", hint=ways)


def _may_hold_plan(folder: Path) -> bool:
    """Return True if a folder holds a plan, or nothing except files that an interrupted `plan`
    left.
    """
    if (folder / PLAN_FILE).is_file():
        return True
    return all(
        name in _PLAN_FILES or name.startswith(_SCRATCH_PREFIX) for name in os.listdir(folder)
    )


def _is_same_path(one: Path | None, other: Path) -> bool:
    return one is not None and one.exists() and other.exists() and one.samefile(other)


def with_movable_paths(configuration: Configuration, home: Path) -> Configuration:
    """Return the configuration with paths that stay valid if `home`, the folder of the
    configuration file, and the ONNX file are moved together. The configuration must have the path
    of a model.
    """
    model = configuration.model.path
    assert model is not None
    move = partial(movable_path, home=home, model=model)
    costs = configuration.costs
    cluster = configuration.cluster
    return replace(
        configuration,
        model=replace(configuration.model, path=relative_path(model, home)),
        data=replace(configuration.data, path=change_data_path(configuration.data.path, move)),
        eval=replace(configuration.eval, data=change_data_path(configuration.eval.data, move)),
        costs=costs if costs == "roofline" else move(costs),
        cluster=cluster if cluster.file is None else replace(cluster, file=move(cluster.file)),
    )


def write_plan_folder(
    folder: Path,
    planned: PlanResult,
    configuration: Configuration,
    base: Path | None = None,
    force: bool = False,
) -> Path | None:
    """Write the plan, its effective configuration and its placement to `folder`.

    `base` is the plan folder from which the plan was made, None if there is none. `force` replaces
    files that were edited. Without `force`, if `base` is `folder`, an edited placement stays as it
    is, and so does an edited configuration, unless flags changed the configuration. In this case
    the edited file is copied to another path, which is returned. Otherwise None is returned.
    """
    check_target(folder, base, force)
    target = folder.absolute()
    layers = layers_of(planned.model.source, planned.problem.graph)
    texts = {
        CONFIGURATION_FILE: _configuration_text(
            planned, with_movable_paths(effective_configuration(configuration, planned), target)
        ),
        PLACEMENT_FILE: placement_text(planned.problem.graph, planned.plan.placement, layers),
    }
    copy = None
    try:
        if not force and _is_same_path(base, folder):
            edited = {
                path.name
                for path in edited_files(
                    [target / name for name in texts], _digests_of_folder(target)
                )
            }
            if CONFIGURATION_FILE in edited and _load_configuration(target) != configuration:
                copy = _copy_of_edited(target / CONFIGURATION_FILE)
                edited.remove(CONFIGURATION_FILE)
            texts = {name: text for name, text in texts.items() if name not in edited}
        with _new_files(target) as made:
            for name, text in texts.items():
                with add_path_to_errors(target / name):
                    (made / name).write_text(text, encoding="utf-8")
            with add_path_to_errors(target / GRAPH_FILE):
                write_graph(made, planned_graph(planned))
            with add_path_to_errors(target / PLAN_FILE):
                write_plan(made, planned.plan, planned.timeline, home=target)
                add_digests(made, PLAN_FILE)
    except OSError as error:
        place = error.filename or folder
        raise ConfigurationError(
            f"the plan cannot be written: {error.strerror}", where=str(place)
        ) from error
    return copy


def _configuration_text(planned: PlanResult, configuration: Configuration) -> str:
    """Return the effective configuration as YAML. A comment in the first line has the parallel
    degrees of the plan, if they are known.
    """
    degrees = planned.plan.summary.degrees
    head = "" if degrees is None else f"# {degrees.text}\n"
    return head + dump_configuration(configuration)


@contextmanager
def _new_files(target: Path) -> Iterator[Path]:
    """Yield a temporary folder for the new files of the plan folder `target`. When the context
    ends, the files replace those of `target`, or the folder becomes `target` if there is no such
    folder.
    """
    writer = (
        open_replacement_files(target, PLAN_FILE, _SCRATCH_PREFIX)
        if target.exists()
        else open_replacement_folder(target, PLAN_FILE)
    )
    with writer as made:
        yield made


def _load_configuration(folder: Path) -> Configuration:
    """Return the configuration that `plan --from` reads in `folder`."""
    file, over = check_editable(folder)
    return load_configuration(file, over=over)


def _copy_of_edited(path: Path) -> Path:
    """Copy an edited file next to itself, to `NAME.edited.yaml` or the next free number, and return
    the copy.
    """
    number = 1
    while True:
        end = ".edited.yaml" if number == 1 else f".edited-{number}.yaml"
        copy = path.with_name(path.stem + end)
        try:
            with copy.open("xb") as file:
                file.write(path.read_bytes())
        except FileExistsError:
            number += 1
            continue
        return copy


def stale_program(folder: Path, digest: str) -> Path | None:
    """Return the program folder inside the plan folder `folder` if its program belongs to another
    plan than the plan with the digest `digest`. Return None otherwise, and if there is no program.
    """
    program = folder / "program"
    try:
        found = json.loads((program / "manifest.json").read_text(encoding="utf-8"))["plan"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return None if found == digest else program
