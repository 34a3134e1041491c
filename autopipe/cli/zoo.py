"""`autopipe zoo`: the models of the papers as ONNX files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from autopipe.cli.options import FORCE, PATH, standard_options
from autopipe.cli.output import Output, plain_table
from autopipe.configs import zoo as models
from autopipe.configs.schema import field_docs
from autopipe.configs.zoo import ZooModel, parse_words
from autopipe.ir.codec import describe_type, schema_keys
from autopipe.ir.output_kinds import ZOO_MODEL, OutputFile
from autopipe.ir.words import plural


@click.group()
def zoo() -> None:
    """Build the models of the papers as ONNX files, in any size, with or without weights.

    \b
    Example:
      autopipe zoo list
      autopipe zoo build gpt -o gpt.onnx --set size=11b --set weights=none
    """


@zoo.command("list")
@standard_options
def list_models(output: Output) -> None:
    """List the models with their settings and published sizes.

    \b
    Example:
      autopipe zoo list
      autopipe zoo list --json
    """
    shared = [key.name for key in schema_keys(ZooModel)]
    table = plain_table("model", "what it is", "sizes", "settings of its own")
    entries = []
    for name, (_, summary) in models.MODELS.items():
        kind = models.model_class(name)
        docs = field_docs(kind)
        settings = {
            key.name: {
                "default": key.default,
                "type": describe_type(key.hint),
                "meaning": docs[key.name],
            }
            for key in schema_keys(kind)
        }
        entries.append(
            {"name": name, "summary": summary, "sizes": list(kind.presets), "settings": settings}
        )
        table.add_row(
            name,
            summary,
            " ".join(kind.presets),
            " ".join(name for name in settings if name not in shared),
        )
    output.result({"models": entries}, table, f"\nsettings of all: size {' '.join(shared)}")


@zoo.command()
@click.argument("name")
@click.option("-o", "--output", "path", type=PATH, help="File to write [NAME.onnx].")
@click.option(
    "--set",
    "words",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a setting of the model, such as its size (repeatable).",
)
@FORCE
@standard_options
def build(
    output: Output, name: str, path: Path | None, words: tuple[str, ...], force: bool
) -> None:
    """Write the model NAME as an ONNX file. `autopipe zoo list` lists the names and settings.

    \b
    Example:
      autopipe zoo build gpt --set layers=12 --set hidden=768 --set heads=12 --set sequence=256
      --set loss=true
      autopipe zoo build llama -o llama.onnx --set size=70b --set weights=none
    """
    model = models.configure(name, parse_words(words))
    built = models.build(model)
    target = path or Path(f"{name}.onnx")
    OutputFile(target, ZOO_MODEL, force=force).check()
    with output.progress("writing", total=built.data_bytes or None) as bar:
        built.save(target, bar.advance, force=force)
    graph = built.skeleton.graph
    data = {
        "path": target,
        "model": name,
        "settings": dataclasses.asdict(model),
        "parameters": built.parameter_count,
        "weights_bytes": built.data_bytes,
        "nodes": len(graph.node),
        "inputs": [value.name for value in graph.input],
        "outputs": [value.name for value in graph.output],
    }
    weights = f"{built.data_bytes / 2**20:.1f} MiB of weights" if built.data_bytes else "no weights"
    output.report(
        data,
        f"{target}: {built.parameter_count:,} {plural(built.parameter_count, 'parameter')}, "
        f"{len(graph.node)} {plural(len(graph.node), 'node')}, {weights}",
    )
