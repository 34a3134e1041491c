"""Generate the reference pages of docs/ from the declarations of commands, keys and operators:
`python scripts/reference_pages.py docs`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import sys
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import click

from autopipe.cli.main import COMMANDS, autopipe
from autopipe.configs import zoo
from autopipe.configs.cluster import ClusterDescription
from autopipe.configs.configuration import Configuration
from autopipe.configs.placement_file import PlacementDescription
from autopipe.configs.schema import field_docs
from autopipe.configs.zoo import ZooModel
from autopipe.ir import ops
from autopipe.ir.codec import (
    Dataclass,
    ExtraKeys,
    Key,
    describe_type,
    encode_as,
    is_union,
    marked_field,
    schema_keys,
    split_annotated,
)
from autopipe.ir.ops import Operator
from autopipe.ir.output_kinds import write_texts
from autopipe.passes.registry import (
    scheduler_class,
    scheduler_names,
    strategy_class,
    strategy_names,
)

_COMMANDS_INTRODUCTION = """\
# Command reference

This page lists every command of autopipe with its flags. `autopipe COMMAND --help` prints the
section of one command.

Every command also accepts the following flags:

| flag | effect |
|---|---|
"""

_STREAMS_TEXT = """
A command prints its results on stdout, and its progress, notes and warnings on stderr. An error is
printed on stderr as one line with its location and message, followed by a line with a hint. With
`--json`, the error is also printed as an object on stdout. The exit code states how the command
ended:

| exit code | meaning |
|---|---|
| 0 | success |
| 2 | invalid configuration or command line |
| 3 | unsupported or invalid model |
| 4 | no plan satisfies the constraints and limits |
| 5 | a run failed, or ranks and reference differ |
| 70 | internal error of autopipe |
| 130 | interrupted |
"""

_CONFIGURATION_INTRODUCTION = """\
# Configuration reference

This page lists the keys of configuration files, cluster files and placement files. `autopipe config
show` prints a configuration with all defaults, and `autopipe config check FILE` checks a file.

A configuration is a YAML file, which `--config FILE` reads. Flags, and `--set KEY=VALUE`, override
its keys. A dot separates the name of a section from the name of a key: `--set optimizer.lr=0.1`.

Values with units are written as follows:

- sizes: `14GiB` or `512MB`;
- rates: `900GB/s`, `400Gb/s` or `15.7TFLOP/s`;
- times: `5us`, or a number of seconds;
- numbers may have an exponent: `1e-4`.

If a file has an unknown key, a duplicate key or a value of another type, it is rejected, and the
error names `file:line`.
"""


_OPTIONS_INTRODUCTION = """\
# Strategies and schedulers

This page lists all strategies and schedulers with their options. `autopipe config strategies NAME`
and `autopipe config schedules NAME` print the same for one of them.

A strategy assigns the model to stages and devices; `--strategy NAME` selects it. A scheduler orders
the tasks of each device; `--schedule NAME` selects it.

Options are keys of the sections `strategy` and `schedule` of a configuration. On the command line,
they are written as `--set strategy.KEY=VALUE` and `--set schedule.KEY=VALUE`.

Installed Python packages can add strategies and schedulers through the entry points
`autopipe.strategies` and `autopipe.schedulers`.
"""

_MODELS_INTRODUCTION = """\
# Models of the zoo

The zoo contains models for tests and benchmarks. `autopipe zoo build NAME -o FILE --set KEY=VALUE`
writes one of them as an ONNX file. `--set size=NAME` selects a published size, which determines the
other keys; further `--set` flags override them. Every model has these keys:
"""

_OPERATORS_INTRODUCTION = """\
# Operators

This page lists the operators that a graph can contain after a model was read: operators of ONNX,
some operators of ONNX Runtime (`com.microsoft`), and fused operators of autopipe. To check a model,
run `autopipe inspect MODEL`. It lists unsupported operators, and names the first node of each.

A model file may contain further operators, which are replaced by these operators while the model is
read: ONNX functions, control flow that can be resolved, and the operators of ONNX Runtime in
`autopipe/passes/frontend/decompositions`.

Each section contains the operators of one module of `autopipe/ir/ops`. The columns of the tables
are:

- *cost class*: which entry of `efficiency` in a [cluster file](configuration.md#a-cluster-file)
  determines the achievable speed of the operator. A view neither computes nor copies.
- *constant operands*: the indices of the operands whose values must be known when the model is
  read.
- *notes*: `random` means that the operator draws random numbers; `no gradient` means that it has no
  backward.
"""

GENERATED = "<!-- Generated: python scripts/reference_pages.py docs -->"
"""First line of each page that this script writes."""

_UPPER_LIMIT_PATTERN = re.compile(r" up to \d{9,}")
"""Upper limits in types that only prevent overflows; the pages omit them."""

_NO_OPTIONS = "There are no options to set.\n"


def generated_pages() -> dict[str, str]:
    """Return the text of each generated page by its path below docs/."""
    texts = {
        "reference/commands.md": commands_page(),
        "reference/configuration.md": configuration_page(),
        "reference/models.md": models_page(),
        "reference/operators.md": operators_page(),
        "reference/strategies.md": options_page(),
    }
    return {path: f"{GENERATED}\n\n{text}" for path, text in texts.items()}


def commands_page() -> str:
    """Return the page of all commands with their arguments and flags."""
    root = click.Context(autopipe, info_name="autopipe")
    found = list(_commands(autopipe, root))
    shared = _shared_options(found)
    parts = [
        _COMMANDS_INTRODUCTION
        + "".join(f"| {_flags_text(each)} | {_cell_text(each.help)} |\n" for each in shared)
    ]
    parts[0] += _STREAMS_TEXT
    said = {(option.name, option.help) for option in shared}
    parts += [_command_section(command, context, said) for command, context in found]
    return "\n".join(parts)


def configuration_page() -> str:
    """Return the page of all keys of the YAML files."""
    parts = [
        _CONFIGURATION_INTRODUCTION,
        "## A configuration file\n\nThe keys of a configuration file are:\n",
        keys_table(Configuration),
        (
            "## A cluster file\n\nA cluster file describes devices and links. `--cluster FILE` or the "
            "key `cluster.file` reads it, or the key `cluster.inline` contains its keys.\n"
        ),
        keys_table(ClusterDescription),
        "## A placement file\n\nA placement file describes the blocks of one micro-batch, for which "
        "`autopipe schedule FILE` searches a schedule. A block is one task, such as the forward of "
        "a stage.\n",
        keys_table(PlacementDescription),
    ]
    return "\n".join(parts)


def keys_table(schema: type[Dataclass]) -> str:
    """Return the Markdown table of the keys of a schema, or of the options of a strategy or
    scheduler class.
    """
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [_key_row(path, key, doc) for path, key, doc in _walk_keys(schema, "", None)]
    return "\n".join(lines) + "\n"


def _walk_keys(
    schema: type[Dataclass], prefix: str, instance: object
) -> Iterator[tuple[str, Key, str]]:
    """Yield (path, key, docstring) of every key below `schema`.

    `instance` is the default value of the section, None if the section has no default.
    """
    docs = field_docs(schema)
    for key in schema_keys(schema):
        default = key.default if instance is None else getattr(instance, key.name)
        yield prefix + key.name, dataclasses.replace(key, default=default), docs.get(key.name, "")
        for inner, suffix in _inner_schemas(key.hint):
            if inner is not ClusterDescription:
                above = default if isinstance(default, inner) else None
                yield from _walk_keys(inner, f"{prefix}{key.name}{suffix}.", above)
    if rest := marked_field(schema, ExtraKeys):
        yield f"{prefix}…", Key("…", str, dataclasses.MISSING), docs.get(rest[0], "")


def _inner_schemas(hint: Any) -> Iterator[tuple[type[Dataclass], str]]:
    """Yield (dataclass, path suffix) of the dataclasses inside the type of a key.

    The suffix is `[]` per level of lists.
    """
    base, _ = split_annotated(hint)
    origin = typing.get_origin(base)
    if dataclasses.is_dataclass(base):
        yield typing.cast("type[Dataclass]", base), ""
    elif is_union(base):
        for member in typing.get_args(base):
            yield from _inner_schemas(member)
    elif origin is tuple:
        for inner, suffix in _inner_schemas(typing.get_args(base)[0]):
            yield inner, f"[]{suffix}"


def _key_row(path: str, key: Key, doc: str) -> str:
    flag = f" Flag: `{key.flag.split()[0]}`." if key.flag else ""
    kind = default = ""
    if key.name != "…":
        kind = _UPPER_LIMIT_PATTERN.sub("", describe_type(key.hint)).removeprefix("a ")
        default = (
            "required" if key.required else f"`{json.dumps(encode_as(key.default, key.hint))}`"
        )
        if any(isinstance(key.default, inner) for inner, _ in _inner_schemas(key.hint)):
            default = ""
    cells = (f"`{path}`", kind, default, f"{doc}{flag}")
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def options_page() -> str:
    """Return the page of all strategies and schedulers with their options."""
    parts = [_OPTIONS_INTRODUCTION]
    for title, names, find in (
        ("Strategies", strategy_names(), strategy_class),
        ("Schedulers", scheduler_names(), scheduler_class),
    ):
        parts.append(f"## {title}\n")
        parts += [_class_section(name, find(name)) for name in names]
    return "\n".join(parts)


def operators_page() -> str:
    """Return the page of all operators, one section per module of `autopipe.ir.ops`."""
    parts = [_OPERATORS_INTRODUCTION]
    for _, name, _ in pkgutil.iter_modules(ops.__path__):
        rows = getattr(
            importlib.import_module(f"{ops.__name__}.{name}"), "OPERATOR_DEFINITIONS", ()
        )
        if rows:
            parts.append(f"## {name}\n")
            parts.append(
                "| operator | cost class | constant operands | notes |\n|---|---|---|---|\n"
                + "".join(map(_operator_row, sorted(rows, key=lambda row: row.name)))
            )
    return "\n".join(parts)


def _operator_row(row: Operator) -> str:
    notes = ["random"] * row.random + ["no gradient"] * (not row.differentiable)
    constant = ", ".join(map(str, row.static))
    return f"| `{row.name}` | {row.kind} | {constant} | {', '.join(notes)} |\n"


def models_page() -> str:
    """Return the page of all models of the zoo with their sizes."""
    shared = keys_table(cast("type[Dataclass]", ZooModel))
    parts = [_MODELS_INTRODUCTION, shared]
    known = set(shared.splitlines()[2:])
    for name, (_, summary) in zoo.MODELS.items():
        kind = zoo.model_class(name)
        sizes = ", ".join(f"`{size}`" for size in kind.presets)
        parts.append(
            f"## {name}\n\n{summary[0].upper()}{summary[1:]}."
            f"{f' Sizes: {sizes}.' if sizes else ''}\n"
        )
        parts.append(
            "".join(f"{row}\n" for row in keys_table(kind).splitlines() if row not in known)
        )
    return "\n".join(parts)


Declared = tuple[click.Command, click.Context]


def _commands(group: click.Group, context: click.Context) -> Iterator[Declared]:
    """Yield every command below `group` that is not a group, depth first."""
    for name in COMMANDS if group is autopipe else group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, f"{name} is listed but not there"
        inner = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            yield from _commands(command, inner)
        else:
            yield command, inner


def _shared_options(found: Iterable[Declared]) -> list[click.Option]:
    """Return the options that every command has."""
    each = [{option.name: option for option in _options(command)} for command, _ in found]
    return [option for name, option in each[0].items() if all(name in options for options in each)]


def _options(command: click.Command) -> list[click.Option]:
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def _command_section(
    command: click.Command, context: click.Context, said: set[tuple[str | None, str | None]]
) -> str:
    """Return the section of a command; `said` are (name, help) of options that it omits."""
    usage = " ".join(
        [context.command_path, *(each.make_metavar(context) for each in _arguments(command))]
    )
    text, _, example = inspect.cleandoc(command.help or "").partition("\b\n")
    lines = [f"## {usage}\n", text.strip() + "\n"]
    lines += ["```sh", *(line.strip() for line in example.splitlines()[1:] if line), "```\n"]
    rows = [
        _option_row(option, context)
        for option in _options(command)
        if (option.name, option.help) not in said
    ]
    if rows:
        lines += ["| flag | value | default | meaning |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _arguments(command: click.Command) -> list[click.Argument]:
    return [parameter for parameter in command.params if isinstance(parameter, click.Argument)]


def _option_row(option: click.Option, context: click.Context) -> str:
    default = option.to_info_dict()["default"]
    known = bool(default) and not option.is_flag and not option.multiple
    default_cell = f"`{_cell_text(str(default))}`" if known else ""
    return f"| {_flags_text(option)} | {_value_text(option, context)} | {default_cell} | {_cell_text(option.help)} |"


def _value_text(option: click.Option, context: click.Context) -> str:
    """Return the text of the column `value` for an option."""
    kind = option.type
    if option.is_flag:
        return ""
    if isinstance(kind, click.IntRange | click.FloatRange) and option.metavar is None:
        return f"{'an integer' if isinstance(kind, click.IntRange) else 'a number'} from {kind.min}"
    if isinstance(kind, click.Choice):
        return " or ".join(f"`{choice}`" for choice in kind.choices)
    return f"`{_cell_text(option.make_metavar(context))}`"


def _flags_text(option: click.Option) -> str:
    return ", ".join(f"`{flag}`" for flag in option.opts)


def _cell_text(text: str | None) -> str:
    return " ".join((text or "").replace("|", "\\|").split())


def _class_section(name: str, kind: type) -> str:
    options = keys_table(kind)
    has_options = len(options.splitlines()) > 2
    return f"### {name}\n\n{inspect.getdoc(kind)}\n\n{options if has_options else _NO_OPTIONS}"


def main(folder: str) -> None:
    """Write all pages into `folder`, the folder docs of a checkout."""
    texts = {Path(folder) / name: text for name, text in generated_pages().items()}
    for path in texts:
        path.parent.mkdir(parents=True, exist_ok=True)
    write_texts(texts)


if __name__ == "__main__":
    main(sys.argv[1])
