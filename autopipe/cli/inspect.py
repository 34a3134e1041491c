"""`autopipe inspect`: what a model is, in one screen."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table
from rich.text import Text

from autopipe.cli.options import standard_options
from autopipe.cli.output import Output, Verbosity, facts_table
from autopipe.cli.plan_text import tensors_form, trained_lines
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import FileSlice, Fill, Graph, Storage

if TYPE_CHECKING:
    from autopipe.ir.graph import Value
    from autopipe.ir.problem import Work
    from autopipe.passes.frontend import Model
    from autopipe.passes.frontend.cleanup import Branch


def initial_values(graph: Graph) -> dict[str, int]:
    """Number of parameters by how they begin, most first: `stored` in the model's files, or how they are drawn."""
    return dict(Counter(_described(each.storage) for each in graph.parameters).most_common())


def _described(storage: Storage) -> str:
    match storage:
        case FileSlice():
            return "stored"
        case Fill():
            return f"all {storage.value:g}"
    if storage.scheme in ("normal", "uniform"):
        return f"{storage.scheme} {'±' if storage.scheme == 'uniform' else ''}{storage.scale:.3g}"
    return storage.scheme


SHOWN = 8
"""Inputs, outputs, operators and branches listed before the rest is only counted."""


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--dim", "dims", multiple=True, metavar="NAME=EXTENT", help="Bind a symbolic dimension; may be repeated.")
@standard_options
def inspect(output: Output, model: Path, dims: tuple[str, ...]) -> None:
    """Say what MODEL is: inputs, outputs, parameters, operators, work, memory, branches, what is not supported.

    \b
    Example:
      autopipe inspect gpt.onnx --dim batch=8
    """
    from autopipe.passes.cost.roofline import annotate
    from autopipe.passes.frontend import read_model
    from autopipe.passes.frontend.cleanup import branches_of

    read = read_model(model, dims=_extents(dims), with_unsupported=True)
    for warning in read.warnings:
        output.warn(warning)
    work = annotate(read.graph) if not read.unsupported else ()
    branches = branches_of(read.graph, [each.forward_flops for each in work]) if work else ()
    every = output.verbosity is Verbosity.DETAILED
    output.result(_data(read, work, branches), *_screen(read, work, branches, every))


def _extents(words: tuple[str, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in words:
        name, equals, extent = word.rpartition("=")
        if not equals or not name or not extent.isascii() or not extent.isdigit() or len(extent) > 18:
            raise ConfigurationError(f"--dim {word}: expected NAME=EXTENT", hint="for instance --dim batch=8")
        found[name] = int(extent)
    return found


def _data(model: Model, work: tuple[Work, ...], branches: tuple[Branch, ...]) -> dict[str, object]:
    graph = model.graph
    trained = [each.value for each in graph.parameters if each.trainable]
    kept = [each.value for each in graph.parameters if not each.trainable]
    return {
        "model": model.path,
        "digest": model.digest,
        "graph_digest": graph.digest(),
        "opset": graph.opset,
        "mode": model.mode,
        "loss": model.loss or None,
        "batch": model.batch,
        "inputs": [_typed(value) for value in graph.inputs],
        "outputs": [_typed(graph.type_of(name)) for name in graph.outputs],
        "batch_axes": dict(graph.batch_axes),
        "parameters": sum(value.elements for value in trained),
        "parameter_tensors": len(trained),
        "parameter_bytes": sum(value.bytes for value in trained),
        "initial_values": initial_values(graph),
        "buffer_tensors": len(kept),
        "buffer_bytes": sum(value.bytes for value in kept),
        "tensors": tensors_form(model.tensors),
        "nodes_before": model.nodes_before,
        "nodes": len(graph.nodes),
        "operators": dict(Counter(_operator(node.domain, node.op) for node in graph.nodes).most_common()),
        "forward_flops": sum(each.forward_flops for each in work) if work else None,
        "backward_flops": sum(each.backward_flops for each in work) if work else None,
        "activation_bytes": sum(each.kept_bytes for each in work) if work else None,
        "branches": [{"first": each.first, "nodes": each.nodes, "flops": each.flops} for each in branches],
        "unsupported": [
            {"operator": each.operator, "count": each.count, "node": each.node, "nearest": each.nearest or None}
            for each in model.unsupported
        ],
        "warnings": list(model.warnings),
    }


def _typed(value: Value) -> dict[str, object]:
    return {"name": value.name, "type": value.dtype, "shape": value.shape}


def _operator(domain: str, name: str) -> str:
    return f"{domain}.{name}" if domain else name


def _screen(model: Model, work: tuple[Work, ...], branches: tuple[Branch, ...], every: bool) -> tuple[Table, ...]:
    graph = model.graph
    table = facts_table()
    samples = f", {model.batch} sample{'s' if model.batch != 1 else ''} an evaluation" if model.batch else ""
    row = _Rows(table)
    row.add("model", f"{model.path} (opset {graph.opset}{samples})")
    row.add("mode", f"train, loss {model.loss!r}" if model.loss else model.mode.value)
    row.many("inputs", [_value_text(value, dict(graph.batch_axes)) for value in graph.inputs])
    row.many("outputs", [_value_text(graph.type_of(name), {}) for name in graph.outputs])
    row.add("parameters", _parameters(model))
    for word, text in trained_lines(model.tensors, every):
        row.add(word, text)
    row.add("initial values", _initial(graph))
    row.add("nodes", f"{len(graph.nodes):,} of {model.nodes_before:,} after cleaning")
    counts = Counter(_operator(node.domain, node.op) for node in graph.nodes).most_common()
    row.add("operators", ", ".join(f"{name} {count}" for name, count in counts))
    if work:
        forward, backward = (sum(each.forward_flops for each in work), sum(each.backward_flops for each in work))
        row.add("operations", f"{_scaled(forward)}FLOP forward, {_scaled(backward)}FLOP backward")
        row.add("memory", f"{_bytes(sum(each.kept_bytes for each in work))} kept for backward")
        row.many("branches", [_branch(each, forward) for each in branches] or ["none: one chain of work"])
    if model.unsupported:
        row.many(
            "not supported",
            [
                f"{each.operator} ({each.count}), first at {each.node!r}"
                + (f"; {each.nearest} is supported" if each.nearest else "")
                for each in model.unsupported
            ],
        )
    else:
        row.add("supported", "every operator")
    return (table,)


class _Rows:
    """Fills a table whose first column names what the second says. Names from the model are shown as text."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def add(self, name: str, text: str) -> None:
        """One line."""
        self._table.add_row(name, Text(text))

    def many(self, name: str, lines: list[str]) -> None:
        """Several lines under one name, the last of which only counts where they are too many."""
        shown = lines if len(lines) <= SHOWN else [*lines[: SHOWN - 1], f"and {len(lines) - SHOWN + 1} more"]
        for number, line in enumerate(shown):
            self.add(name if not number else "", line)


def _value_text(value: Value, batch_axes: dict[str, int]) -> str:
    axis = batch_axes.get(value.name)
    samples = "" if axis is None else f", samples on axis {axis}"
    return f"{value.name!r} {value.dtype.value}{list(value.shape)}{samples}"


def _parameters(model: Model) -> str:
    trained = [each.value for each in model.graph.parameters if each.trainable]
    kept = [each.value for each in model.graph.parameters if not each.trainable]
    size = sum(value.bytes for value in trained)
    text = f"{sum(value.elements for value in trained):,} in {len(trained):,} tensors, {_bytes(size)}"
    return text + (f"; {len(kept):,} tensors not trained, {_bytes(sum(each.bytes for each in kept))}" if kept else "")


def _initial(graph: Graph) -> str:
    found = list(initial_values(graph).items())
    text = ", ".join(f"{count:,} {how}" for how, count in found[:SHOWN]) or "none"
    return text + (f", and {len(found) - SHOWN} more ways" if len(found) > SHOWN else "")


def _branch(branch: Branch, total: float) -> str:
    return f"{branch.flops / total:.0%} of the operations in {branch.nodes:,} nodes from {branch.first!r}"


def _scaled(number: float) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} E"


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count:.0f} bytes"
        count /= 1024
    return f"{count:.4g} TiB"
