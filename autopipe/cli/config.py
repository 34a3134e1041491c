"""`autopipe config`: show and check configurations; list presets, strategies, schedules and
solvers.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from autopipe.api.request import chosen_scheduler, chosen_strategy
from autopipe.cli.options import PATH, configuration_options, standard_options
from autopipe.cli.output import Output, plain_table
from autopipe.configs.cluster import (
    build_cluster,
    cluster_names,
    cluster_preset,
    is_cluster,
    preset_text,
    read_cluster,
)
from autopipe.configs.configuration import (
    Configuration,
    dump_configuration,
    load_configuration,
    resolve_cluster,
)
from autopipe.configs.schema import field_docs
from autopipe.configs.yaml_source import BYTES
from autopipe.ir.cluster import Cluster
from autopipe.ir.codec import describe_type, encode, encode_as, schema_keys
from autopipe.ir.words import plural
from autopipe.passes.registry import (
    scheduler_class,
    scheduler_names,
    strategy_class,
    strategy_names,
)
from autopipe.passes.solvers.pulp_client import AUTO, installed_solvers
from autopipe.passes.solvers.pulp_worker import SOLVERS


@click.group()
def config() -> None:
    """Show the effective configuration, check a file, and list cluster presets, strategies,
    schedules and solvers.

    \b
    Example:
      autopipe config show --config train.yaml --set optimizer.lr=0.1
      autopipe config check train.yaml
      autopipe config clusters
    """


@config.command()
@configuration_options
@standard_options
def show(output: Output, configuration: Configuration) -> None:
    """Print the effective configuration: the defaults, overridden by the file of --config,
    overridden by flags. The output is a valid file for --config.

    \b
    Example:
      autopipe config show --config train.yaml --gpus 8 > effective.yaml
    """
    _checked_cluster(configuration)
    output.result(encode(configuration), dump_configuration(configuration).rstrip())


@config.command()
@click.argument("file", type=PATH)
@standard_options
def check(output: Output, file: Path) -> None:
    """Check FILE, a configuration or a description of a cluster. Errors are reported with their
    line.

    \b
    Example:
      autopipe config check train.yaml
    """
    if is_cluster(file):
        cluster = build_cluster(read_cluster(file), None)
        kind = "cluster"
    else:
        cluster = _checked_cluster(load_configuration(file))
        kind = "configuration"
    data = {
        "file": str(file),
        "kind": kind,
        "valid": True,
        "cluster": cluster.name,
        "devices": cluster.size,
    }
    output.result(
        data,
        (
            f"{file}: a valid {kind} ({cluster.size} {plural(cluster.size, 'device')} of "
            f"{cluster.name})"
        ),
    )


@config.command()
@click.argument("name", required=False)
@standard_options
def clusters(output: Output, name: str | None) -> None:
    """List the cluster presets; a preset with several device types has a line per type. With NAME,
    print this preset as a YAML file. Save it, edit it, and pass it to `--cluster FILE`.

    \b
    Example:
      autopipe config clusters
      autopipe config clusters h100-80gb > cluster.yaml
      autopipe plan gpt.onnx --gpus 2 --cluster cluster.yaml
    """
    if name is not None:
        output.result(encode(cluster_preset(name)), preset_text(name).rstrip())
        return
    table = plain_table("preset", "device", "memory", "fp32 TFLOP/s", "GB/s", "GB/s by link")
    entries = []
    for preset in cluster_names():
        description = cluster_preset(preset)
        cluster = build_cluster(description, None)
        least = min(device.memory_bytes for device in cluster.kinds)
        entries.append({"preset": preset, **encode(description), "memory_bytes": least})
        label = preset
        first = 0
        for size, levels in [(group.size, group.levels) for group in cluster.groups] or [
            (cluster.size, ())
        ]:
            device = cluster.devices[first]
            kind = f"{size} x {device.name}" if cluster.groups else device.name
            rates = [each.link.bandwidth_bytes_per_s for each in (*levels, *cluster.levels)]
            links = " / ".join(f"{rate / 1e9:g}" for rate in rates)
            fp32 = f"{device.peak('fp32') / 1e12:g}"
            memory = BYTES.format(device.memory_bytes)
            table.add_row(
                label, kind, memory, fp32, f"{device.bandwidth_bytes_per_s / 1e9:g}", links
            )
            label = ""
            first = first + size
    output.result({"clusters": entries}, table)


@config.command()
@click.argument("name", required=False)
@standard_options
def strategies(output: Output, name: str | None) -> None:
    """List the strategies for `--strategy`. With NAME, print this strategy with its options.

    \b
    Example:
      autopipe config strategies
      autopipe config strategies grid
    """
    _show_choices(
        output,
        "strategy",
        strategy_names() if name is None else (name,),
        strategy_class,
        name is not None,
    )


@config.command()
@click.argument("name", required=False)
@standard_options
def schedules(output: Output, name: str | None) -> None:
    """List the schedules for `--schedule`. With NAME, print this schedule with its options.

    \b
    Example:
      autopipe config schedules
      autopipe config schedules tessel
    """
    _show_choices(
        output,
        "schedule",
        scheduler_names() if name is None else (name,),
        scheduler_class,
        name is not None,
    )


def _show_choices(
    output: Output,
    key: str,
    names: Sequence[str],
    find: Callable[[str], type[Any]],
    in_detail: bool,
) -> None:
    """Print the first paragraph of each choice's docstring; `in_detail` (for one name), the
    whole docstring and the options. JSON has the first paragraph and the options in both cases.
    """
    entries: list[dict[str, object]] = []
    summaries = plain_table(key, "summary")
    options: list[str] = []
    for name in names:
        kind: Any = find(name)
        text = inspect.getdoc(kind) or ""
        summary = " ".join(text.partition("\n\n")[0].split())
        docs = field_docs(kind)
        declared = [
            {
                "key": f"{key}.{option.name}",
                "type": describe_type(option.hint),
                "default": None if option.required else encode_as(option.default, option.hint),
                "meaning": " ".join(docs.get(option.name, "").split()),
            }
            for option in schema_keys(kind)
        ]
        entries.append({"name": name, "summary": summary, "options": declared})
        summaries.add_row(name, summary)
        for option, each in zip(schema_keys(kind), declared, strict=True):
            default = "required" if option.required else json.dumps(each["default"])
            options += [
                f"{each['key']}: {each['type']}, default {default}",
                f"    {each['meaning']}",
                "",
            ]
    if in_detail:
        output.result(entries[0], text, "", *(options or ["no options"]))
    else:
        output.result({"choices": entries}, summaries)


@config.command()
@standard_options
def solvers(output: Output) -> None:
    """List the solvers of integer programs and whether they are installed. The key `solver` of the
    configuration selects one.

    \b
    Example:
      autopipe config solvers
      autopipe plan gpt.onnx --gpus 4 --strategy tepdist --set solver=cbc
    """
    installed = installed_solvers()
    entries: list[dict[str, object]] = [
        {"solver": AUTO, "installed": True, "runs": "HiGHS inside scipy", "pulp_interfaces": []}
    ]
    for name, interface in installed.items():
        entries.append(
            {
                "solver": name,
                "installed": interface is not None,
                "runs": interface and f"PuLP {interface}",
                "pulp_interfaces": list(SOLVERS[name]),
            }
        )
    table = plain_table("solver", "installed", "runs")
    for entry in entries:
        runs = entry["runs"] or f"needs PuLP {' or '.join(SOLVERS[str(entry['solver'])])}"
        table.add_row(str(entry["solver"]), "yes" if entry["installed"] else "no", str(runs))
    output.result({"solvers": entries}, table)


def _checked_cluster(configuration: Configuration) -> Cluster:
    """Return the cluster of `configuration`.

    Raises ConfigurationError if its strategy, its scheduler or one of their options is unknown, or
    if its cluster is invalid.
    """
    chosen_strategy(configuration)
    chosen_scheduler(configuration)
    return resolve_cluster(configuration)
