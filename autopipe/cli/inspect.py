"""`autopipe inspect`: describes a model on one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from autopipe.cli.options import PATH, model_options, standard_options
from autopipe.cli.output import Output, Verbosity, facts_table
from autopipe.cli.plan_report import gradient_lines, trained_lines
from autopipe.configs.configuration import Configuration
from autopipe.ir.graph import FileSlice, Fill, Graph, Initializer, Storage, VarintSlice
from autopipe.ir.problem import Mode
from autopipe.ir.words import plural

if TYPE_CHECKING:
    from autopipe.ir.graph import Value
    from autopipe.ir.problem import NodeCost
    from autopipe.passes.analysis.batch_forms import LossForm
    from autopipe.passes.frontend import Model
    from autopipe.passes.frontend.branches import Branch


_MOST = 8
"""Maximum number of inputs, outputs, operators and branches listed. Further ones are only
counted.
"""


@click.command()
@click.argument("model", type=PATH)
@model_options
@standard_options
def inspect(output: Output, model: Path, configuration: Configuration) -> None:
    """Say what MODEL is: inputs, outputs, parameters, operators, work, memory, branches, what is
    not supported.

    \b
    Example:
      autopipe inspect gpt.onnx --dim batch=8
    """
    from autopipe.api.request import wanted_loss, wanted_scores
    from autopipe.passes.analysis.loss_division import form_of
    from autopipe.passes.cost.roofline import annotate
    from autopipe.passes.frontend import read_model
    from autopipe.passes.frontend.branches import branches_of

    asked = configuration.model
    reader = partial(
        read_model,
        dims=dict(asked.dims),
        batch_axes=dict(asked.batch_axes),
        fixed_inputs=dict(asked.inputs),
        loss=wanted_loss(configuration),
        scores=wanted_scores(configuration),
        mode=None if configuration.mode is None else Mode(configuration.mode),
        training=asked.training,
        frozen=asked.frozen,
        trainable=asked.trainable,
    )
    read = reader(model, with_unsupported=True)
    for warning in read.warnings:
        output.warn(warning)
    work = annotate(read.graph) if not read.unsupported else ()
    file = read.source or model
    form = (
        None
        if read.unsupported
        else form_of(read, lambda size: reader(file, batch=size, opened=True))
    )
    branches = branches_of(read.graph, [each.forward_flops for each in work]) if work else ()
    table = facts_table()
    for name, text in _rows(read, work, branches, form, output.verbosity is Verbosity.DETAILED):
        table.add_row(name, Text(text))  # Names from the model are not interpreted as rich markup.
    output.result(_data(read, work, branches, form), table)


def _data(
    model: Model, work: tuple[NodeCost, ...], branches: tuple[Branch, ...], form: LossForm | None
) -> dict[str, object]:
    graph = model.graph
    trained, kept = (
        [each.value for each in graph.parameters if each.trainable is flag]
        for flag in (True, False)
    )
    flops = {
        f"{way}_flops": sum(getattr(each, f"{way}_flops") for each in work)
        for way in ("forward", "backward")
    }
    figures = {**flops, "activation_bytes": sum(each.kept_bytes for each in work)}
    return {
        "model": model.path,
        "digest": model.digest,
        "graph_digest": graph.digest(),
        "opset": graph.opset,
        "mode": model.mode,
        "loss": model.loss or None,
        **({"loss_choices": list(model.loss_choices)} if model.loss_choices else {}),
        "loss_form": form,
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
        "tensors": [
            {
                **{name: getattr(each.value, name) for name in ("name", "shape", "elements")},
                **{name: getattr(each, name) for name in ("trained", "why", "doubtful")},
            }
            for each in model.tensors
        ],
        "unrecorded": list(model.unrecorded),
        "nodes_before": model.nodes_before,
        "nodes": len(graph.nodes),
        "operators": operators(graph),
        "fused": model.fused,
        **(figures if work else dict.fromkeys(figures)),
        "branches": branches,
        "unsupported": [
            {
                "operator": each.operator,
                "count": each.count,
                "node": each.node,
                "reason": each.reason,
            }
            for each in model.unsupported
        ],
        "warnings": list(model.warnings),
    }


def _typed(value: Value) -> dict[str, object]:
    return {"name": value.name, "type": value.dtype, "shape": value.shape}


def operators(graph: Graph) -> dict[str, int]:
    """Return the number of nodes per operator, the most frequent operator first."""
    names = (f"{node.domain}.{node.op}" if node.domain else node.op for node in graph.nodes)
    return dict(Counter(names).most_common())


def initial_values(graph: Graph) -> dict[str, int]:
    """Return the number of parameters per kind of initial value, the most frequent first. The kind
    is `stored` for values from the model's files, otherwise the distribution.
    """

    def told(storage: Storage) -> str:
        match storage:
            case FileSlice() | VarintSlice():
                return "stored"
            case Fill():
                return f"all {storage.value:g}"
            case Initializer("normal" | "uniform" as scheme, scale):
                return f"{scheme} {'±' if scheme == 'uniform' else ''}{scale:.3g}"
        return storage.scheme

    return dict(Counter(told(each.storage) for each in graph.parameters).most_common())


def _rows(
    model: Model,
    work: tuple[NodeCost, ...],
    branches: tuple[Branch, ...],
    form: LossForm | None,
    every: bool,
) -> Iterator[tuple[str, str]]:
    """Yield (name, description) pairs. The name is empty if the description continues the one
    above.
    """
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
    if form is not None:
        yield "loss", str(form)
    yield from _several(
        "inputs", [_value_text(value, axes.get(value.name)) for value in graph.inputs]
    )
    yield from _several("outputs", [_value_text(graph.type_of(name)) for name in graph.outputs])
    trained, kept = (
        [each.value for each in graph.parameters if each.trainable is flag]
        for flag in (True, False)
    )
    elements = sum(value.elements for value in trained)
    size = sum(value.bytes for value in trained)
    rest = (
        (
            f"; {len(kept):,} {plural(len(kept), 'tensor')} not trained, "
            f"{_bytes(sum(each.bytes for each in kept))}"
        )
        if kept
        else ""
    )
    yield (
        "parameters",
        f"{elements:,} in {len(trained):,} {plural(len(trained), 'tensor')}, {_bytes(size)}{rest}",
    )
    yield from trained_lines(model.tensors, every)
    yield from gradient_lines(model)
    begins = [f"{count:,} {how}" for how, count in initial_values(graph).items()]
    rest = f", and {len(begins) - _MOST} more ways" if len(begins) > _MOST else ""
    yield "initial values", (", ".join(begins[:_MOST]) or "none") + rest
    yield "nodes", f"{len(graph.nodes):,} of {model.nodes_before:,} after cleaning"
    yield "operators", ", ".join(f"{name} {count}" for name, count in operators(graph).items())
    if model.fused:
        yield "fused", ", ".join(f"{name} {count}" for name, count in model.fused.items())
    if work:
        forward = sum(each.forward_flops for each in work)
        backward = sum(each.backward_flops for each in work)
        yield "operations", f"{_scaled(forward)}FLOP forward, {_scaled(backward)}FLOP backward"
        yield "memory", f"{_bytes(sum(each.kept_bytes for each in work))} kept for backward"
        told = [
            f"{each.flops / forward:.0%} of the operations in {each.nodes:,} "
            f"{plural(each.nodes, 'node')} from {each.first!r}"
            for each in branches
        ]
        yield from _several("branches", told or ["none: one chain of work"])
    told = [
        f"{each.operator} ({each.count}), first at {each.node!r}; {each.reason}"
        for each in model.unsupported
    ]
    yield from _several("not supported", told)
    if not told:
        yield "supported", "every operator"


def _several(name: str, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield several lines under one name. If there are too many, the last line has the number of
    omitted lines.
    """
    if len(lines) > _MOST:
        lines = [*lines[: _MOST - 1], f"and {len(lines) - _MOST + 1} more"]
    for number, line in enumerate(lines):
        yield "" if number else name, line


def _value_text(value: Value, axis: int | None = None) -> str:
    samples = "" if axis is None else f", samples on axis {axis}"
    return f"{value.name!r} {value.dtype.value}{list(value.shape)}{samples}"


def _scaled(number: float) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} E"


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return (
                f"{count:.3g} {unit}" if unit != "bytes" else f"{count:.0f} {plural(count, 'byte')}"
            )
        count /= 1024
    return f"{count:.4g} TiB"
