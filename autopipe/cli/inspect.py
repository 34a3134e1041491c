"""`autopipe inspect`: describes a model on one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from autopipe.cli.options import PATH, model_options, standard_options
from autopipe.cli.output import Output, Verbosity, facts_table
from autopipe.cli.plan_report import gradient_lines, trained_lines
from autopipe.configs.configuration import Configuration
from autopipe.ir.graph import Value
from autopipe.ir.words import count_text, plural

if TYPE_CHECKING:
    from autopipe.api.inspection import Inspection, LayerSummary

_MAX_LISTED_ITEMS = 8
"""Maximum number of inputs, outputs, operators and branches listed. Further ones are only
counted.
"""


@click.command()
@click.argument("model", type=PATH)
@model_options
@standard_options
def inspect(output: Output, model: Path, configuration: Configuration) -> None:
    """Show the inputs, outputs, parameters, operators, repeated layers, FLOPs, memory, branches and
    unsupported operators of the ONNX file MODEL.

    \b
    Example:
      autopipe inspect gpt.onnx --dim batch=8
    """
    from autopipe.api.inspection import inspect as inspect_model
    from autopipe.api.inspection import inspection_data

    found = inspect_model(model, configuration, output)
    table = facts_table()
    for name, text in _inspection_rows(found, output.verbosity is Verbosity.DETAILED):
        # The class `Text` prints names from the model literally. Rich would interpret brackets in a
        # string as markup.
        table.add_row(name, Text(text))
    output.result(inspection_data(found), table)


def _inspection_rows(found: Inspection, every: bool) -> Iterator[tuple[str, str]]:
    """Yield (name, description) pairs. The name is empty if the description continues the one
    above.
    """
    from autopipe.api.inspection import initial_values, operator_counts

    model = found.model
    work = found.work
    graph = model.graph
    axes = dict(model.graph.batch_axes)
    samples = (
        f", {model.batch} {plural(model.batch, 'sample')} an evaluation" if model.batch else ""
    )
    yield "model", f"{model.path} (opset {graph.opset}{samples})"
    yield "mode", f"train, loss {model.loss!r}" if model.loss else model.mode.value
    if model.loss_choices:
        named = ", ".join(map(repr, model.loss_choices))
        yield (
            "",
            f"{len(model.loss_choices)} {plural(len(model.loss_choices), 'output')} can "
            f"be the loss ({named}): name one by --set loss=NAME to train",
        )
    if found.form is not None:
        yield "loss", str(found.form)
    yield from _limited_rows(
        "inputs", [_value_text(value, axes.get(value.name)) for value in graph.inputs]
    )
    yield from _limited_rows(
        "outputs", [_value_text(graph.type_of(name)) for name in graph.outputs]
    )
    trained, kept = (
        [each.value for each in graph.parameters if each.trainable is flag]
        for flag in (True, False)
    )
    elements = sum(value.elements for value in trained)
    size = sum(value.bytes for value in trained)
    rest = (
        (
            f"; {len(kept):,} {plural(len(kept), 'tensor')} not trained, "
            f"{_bytes_or_zero(sum(each.bytes for each in kept))}"
        )
        if kept
        else ""
    )
    yield (
        "parameters",
        f"{elements:,} in {len(trained):,} {plural(len(trained), 'tensor')}, "
        f"{_bytes_or_zero(size)}{rest}",
    )
    yield from trained_lines(model.tensors, every)
    yield from gradient_lines(model)
    begins = [f"{count:,} {how}" for how, count in initial_values(graph).items()]
    rest = (
        f", and {len(begins) - _MAX_LISTED_ITEMS} more ways"
        if len(begins) > _MAX_LISTED_ITEMS
        else ""
    )
    yield "initial values", (", ".join(begins[:_MAX_LISTED_ITEMS]) or "none") + rest
    yield "nodes", f"{len(graph.nodes):,} of {model.nodes_before:,} after cleaning"
    yield (
        "operators",
        ", ".join(f"{name} {count}" for name, count in operator_counts(graph).items()),
    )
    if model.fused:
        yield "fused", ", ".join(f"{name} {count}" for name, count in model.fused.items())
    yield from _limited_rows("layers", list(_layer_lines(found.layers)) or ["none are repeated"])
    if work:
        forward = sum(each.forward_flops for each in work)
        backward = sum(each.backward_flops for each in work)
        yield (
            "operations",
            f"{_with_si_prefix(forward)}FLOP forward, {_with_si_prefix(backward)}FLOP backward",
        )
        yield "memory", f"{_bytes_or_zero(sum(each.kept_bytes for each in work))} kept for backward"
        told = [
            f"{each.flops / forward:.0%} of the operations in {each.nodes:,} "
            f"{plural(each.nodes, 'node')} from {each.first!r}"
            for each in found.branches
        ]
        yield from _limited_rows("branches", told or ["none: one chain of work"])
    told = [
        f"{each.operator} ({each.count}), first at {each.node!r}; {each.reason}"
        for each in model.unsupported
    ]
    yield from _limited_rows("not supported", told)
    if not told:
        yield "supported", "every operator"


def _layer_lines(layers: Sequence[LayerSummary], indent: str = "") -> Iterator[str]:
    """Yield one line per class of repeated layers, and below it the classes inside its layers. If
    several classes have one name, each line also has the numbers of the layers.
    """
    counts = Counter(each.name for each in layers)
    for each in layers:
        numbers = f" {each.numbers}" if each.numbers and counts[each.name] > 1 else ""
        work = (
            ""
            if each.forward_flops is None
            else f", {_with_si_prefix(each.forward_flops)}FLOP forward"
        )
        yield (
            f"{indent}{each.count} × {each.name}{numbers}: {count_text(each.nodes, 'node')}, "
            f"{count_text(each.parameters, 'parameter')}{work}"
        )
        yield from _layer_lines(each.inner, f"{indent}  ")


def _limited_rows(name: str, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, line) pairs for several lines under one name, which only the first pair has; it
    is "" in the others. If there are more than `_MAX_LISTED_ITEMS` lines, the last one has the
    number of omitted lines.
    """
    if len(lines) > _MAX_LISTED_ITEMS:
        lines = [*lines[: _MAX_LISTED_ITEMS - 1], f"and {len(lines) - _MAX_LISTED_ITEMS + 1} more"]
    for number, line in enumerate(lines):
        yield "" if number else name, line


def _value_text(value: Value, axis: int | None = None) -> str:
    samples = "" if axis is None else f", samples on axis {axis}"
    return f"{value.name!r} {value.dtype.value}{list(value.shape)}{samples}"


def _with_si_prefix(number: float) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} E"


def _bytes_or_zero(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return (
                f"{count:.3g} {unit}" if unit != "bytes" else f"{count:.0f} {plural(count, 'byte')}"
            )
        count /= 1024
    return f"{count:.4g} TiB"
