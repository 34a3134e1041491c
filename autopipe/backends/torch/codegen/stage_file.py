"""Generation of the files of a stage: its module, and the names of its parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopipe.backends.torch.codegen.call import torch_dtype
from autopipe.backends.torch.codegen.rank import stage_module
from autopipe.backends.torch.codegen.stage import ForwardSource, Names, Style, emit_forward
from autopipe.ir.graph import Value
from autopipe.ir.program import StageAttributes, StageCode
from autopipe.ir.words import bytes_text


@dataclass(frozen=True, slots=True)
class StageSource:
    """The files of a stage."""

    text: str
    """Source text of the module of the stage."""
    arguments: Names
    """Names of the arguments of `forward` after `p`."""
    attributes: StageAttributes | None
    """Content of the JSON file next to the module; None for the style `flat`, whose module contains
    it.
    """


def emit_stage(
    stage: StageCode, title: str, style: Style = "flat", is_training: bool = True
) -> StageSource:
    """Return the files of a stage. The module contains a docstring, imports, types of inputs and
    outputs, and the function `forward`. In the style `flat`, it also contains the names of
    parameters and constants. `is_training` is the argument of `emit_forward`.

    `title` is the first line of the docstring. It must not contain text from the model, because
    models are untrusted.
    """
    forward = emit_forward(stage, style, is_training)
    is_layered = style == "layers"
    rows = [
        ("in", name, value) for name, value in zip(forward.arguments, stage.inputs, strict=True)
    ]
    rows += [
        ("out", name, value) for name, value in zip(forward.results, stage.outputs, strict=True)
    ]
    width = max((len(name) for _, name, _ in rows), default=0) if is_layered else 5
    lines = [
        f"{way:<4} {name:<{width}} {value.dtype.value:<8} {list(value.shape)}\n"
        for way, name, value in rows
    ]
    elements = sum(value.elements for _, value in stage.parameters)
    size = sum(value.bytes for _, value in stage.parameters)
    tables = "" if is_layered else _tables_of_names(forward)
    legend = ""
    if is_layered:
        lines.append(f"p    attributes that {stage_module(stage.stage)}.json lists\n")
        legend = _legend(forward.text)
    draws = "DRAWS = True\n" if "p.random(" in forward.text else ""
    text = (
        f'"""{title}\n\n{"".join(lines)}'
        f'parameters {elements:,} ({bytes_text(size)})\n{legend}"""\n\n'
        f"{_import_lines(forward.text)}\n"
        f"INPUTS = {_type_lines(forward.arguments, stage.inputs)}\n"
        f"OUTPUTS = {_type_lines(forward.results, stage.outputs)}\n"
        f"{tables}{draws}\n\n"
        f"{forward.text}"
    )
    attributes = StageAttributes(forward.attributes, forward.read) if is_layered else None
    return StageSource(text, forward.arguments, attributes)


_LEGEND = {
    "for layer in ": (
        "In the function of a layer, `p` is one of the layers in a list of the stage's `p`."
    ),
    ".pop()": (
        "`x = [x]` and `x.pop()` pass the only reference to x, so that the function can free it."
    ),
    "p.weight_grads(": (
        "`p.weight_grads(f, ...)` returns f(...). Backward computes gradients of weights later."
    ),
    "@recompute": (
        "`@recompute`: backward runs the function again. It returns (with gradients, without)."
    ),
    "  split ": "`split x0 over 2`: axis x0 of the operator is split over 2 devices.",
}
"""Explanations for the docstring of a stage, by a text in its code."""


def _legend(code: str) -> str:
    """Return the lines of the docstring of a stage that explain its code."""
    lines = [
        "",
        "Shapes are local to a device. A comment has the shape of the result if it differs from",
        "that of the line before.",
        *(text for sign, text in _LEGEND.items() if sign in code),
        "",
    ]
    return "\n".join(lines)


def _tables_of_names(forward: ForwardSource) -> str:
    """Return the source of the names of parameters and constants, and of the parameters that each
    recomputed segment reads.
    """
    names = [name for name, _ in forward.attributes]
    parameters = tuple(name for name in names if name.startswith("w"))
    constants = tuple(name for name in names if name.startswith("c"))
    segments = f"SEGMENTS = {forward.read!r}\n" if forward.read else ""
    return f"PARAMETERS = {parameters!r}\nCONSTANTS = {constants!r}\n{segments}"


def _import_lines(text: str) -> str:
    """Return the import statements that the code `text` needs."""
    lines = ["import torch\n"]
    if re.search(r"\bF\.", text):
        lines.append("import torch.nn.functional as F\n")
    own = []
    if re.search(r"\boperators\.", text):
        own.append("from autopipe.backends.torch.runtime import operators\n")
    if "\n@recompute" in f"\n{text}":
        own.append("from autopipe.backends.torch.runtime.recompute import recompute\n")
    return "".join([*lines, "\n", *own] if own else lines)


def _type_lines(names: Names, values: tuple[Value, ...]) -> str:
    """Return the source of a dictionary from the variables `names` to the (type, shape) of their
    values.
    """
    pairs = zip(names, values, strict=True)
    lines = [
        f"    {name!r}: ({torch_dtype(value.dtype)}, {value.shape!r}),\n" for name, value in pairs
    ]
    return f"{{\n{''.join(lines)}}}" if lines else "{}"
