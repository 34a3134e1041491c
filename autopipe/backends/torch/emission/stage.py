"""The *what* of a stage as text: its forward on local shards, one operator a line."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import numpy as np

from autopipe.backends.torch.emission.call import Call, literal
from autopipe.backends.torch.emission.groups import group_code
from autopipe.backends.torch.emission.later import deferred
from autopipe.backends.torch.emission.peephole import merge_neighbours
from autopipe.backends.torch.emission.segments import Part, parts_of
from autopipe.backends.torch.emission.table import EMITTERS
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import DType, Value
from autopipe.ir.layout import Layout, degree_of
from autopipe.ir.ops import qualified_name
from autopipe.ir.program import Collective, Compute, Operation, StageCode

_LINE = 120
_PARAMETER = re.compile(r"\bp\.(w\d+)\b")


@dataclass(slots=True)
class _Names:
    """Identifiers by value: made by index, never from the model's own names."""

    codes: dict[str, str] = field(default_factory=dict)
    count: int = 0

    def fresh(self, value: Value) -> str:
        code = f"x{self.count}"
        self.count += 1
        self.codes[value.name] = code
        return code


@dataclass(frozen=True, slots=True)
class _Forward:
    """The function as text, and the code of what it takes and gives."""

    text: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    read: tuple[tuple[str, ...], ...]
    """For each segment that runs again the parameters that it reads."""


def emit_forward(stage: StageCode) -> str:
    """The function `forward(p, …)` of a stage. Raises CodegenError for an operator without emission."""
    return _forward(stage).text


def _forward(stage: StageCode) -> _Forward:
    stage = merge_neighbours(stage)
    names = _Names()
    for index, value in stage.parameters:
        names.codes[value.name] = f"p.w{index}"
    for index, constant in stage.constants:
        names.codes[constant.value.name] = f"p.c{index}"
    arguments = tuple(names.fresh(value) for value in stage.inputs)
    outputs = tuple(value.name for value in stage.outputs)
    if stage.segments:
        parts = parts_of(stage)
        segments = [_segment(number, part, names, stage) for number, part in enumerate(parts)]
        lines = _calls(parts, names, outputs)
    else:
        segments = []
        lines = _body(stage.operations, names, stage, tuple(value.name for value in stage.inputs), outputs)
    results = tuple(names.codes[name] for name in outputs)
    head = f"def forward({', '.join(['p', *arguments])}):"
    text = "\n".join([head, *lines, f"    return {_tuple(results)}", ""])
    read = tuple(tuple(dict.fromkeys(_PARAMETER.findall(each))) for each in segments)
    return _Forward("\n\n".join([*segments, text]), arguments, results, read)


def _segment(number: int, part: Part, names: _Names, stage: StageCode) -> str:
    """A segment as a function of its own."""
    arguments = [names.codes[name] for name in part.arguments]
    lines = _body(part.operations, names, stage, part.arguments, part.results)
    flowing, others = (_tuple(tuple(names.codes[name] for name in each)) for each in (part.flowing, part.others))
    lines.append(f"    return {flowing}, {others}")
    return "\n".join(["@recompute", f"def segment_{number}({', '.join(['p', *arguments])}):", *lines, ""])


def _calls(parts: tuple[Part, ...], names: _Names, outputs: tuple[str, ...]) -> list[str]:
    """A line for each segment; what no later one reads is let go."""
    last = {name: number for number, part in enumerate(parts) for name in (*part.results, *part.arguments)}
    lines = []
    for number, part in enumerate(parts):
        results = _tuple(tuple(names.codes[name] for name in part.results))[1:-1]
        dead = [names.codes[name] for name in last if last[name] == number and name not in outputs]
        drop = f"; del {', '.join(dead)}" if dead else ""
        called = ", ".join(["p", *(names.codes[name] for name in part.arguments)])
        lines.append(f"    {results} = segment_{number}({called}){drop}")
    return lines


def _body(
    operations: tuple[Operation, ...],
    names: _Names,
    stage: StageCode,
    arguments: tuple[str, ...],
    results: tuple[str, ...],
) -> list[str]:
    """Lines of operations that take and give these."""
    last_use = _last_uses(operations, arguments, stage, results)
    return [
        line
        for position, operation in enumerate(operations)
        for line in _statement(operation, names, last_use.get(position, ()), stage)
    ]


def _tuple(codes: tuple[str, ...]) -> str:
    return f"({', '.join(codes)}{',' if len(codes) == 1 else ''})"


def _last_uses(
    operations: tuple[Operation, ...], arguments: tuple[str, ...], stage: StageCode, results: tuple[str, ...]
) -> dict[int, tuple[str, ...]]:
    """For each operation, the values that nothing reads afterwards; they are dropped there to free memory."""
    last: dict[str, int] = dict.fromkeys(arguments, -1)
    for position, operation in enumerate(operations):
        for name in (*operation.reads, *operation.writes):
            last[name] = position
    kept = {*results, *(value.name for _, value in stage.parameters), *(each.value.name for _, each in stage.constants)}
    dead: dict[int, list[str]] = {}
    for name, position in last.items():
        if name not in kept and position >= 0:
            dead.setdefault(position, []).append(name)
    return {position: tuple(names) for position, names in dead.items()}


def _statement(operation: Operation, names: _Names, dead: tuple[str, ...], stage: StageCode) -> list[str]:
    group = len(stage.devices)
    if isinstance(operation, Collective):
        code, comment = _collective(operation, names, group), _collective_comment(operation, group)
        target = names.fresh(operation.result)
    else:
        code, comment = _expression(operation, names, operation.node in stage.deferred, group), _comment(operation)
        results = operation.signature.results
        target = ", ".join("_" if value is None or value.name in dead else names.fresh(value) for value in results)
        if target == "_":
            return []
    written = set(operation.writes)
    freed = [names.codes[name] for name in dead if name not in written]
    drop = f"; del {', '.join(freed)}" if freed else ""
    statement = f"    {target} = {code}{drop}"
    pad = max(2, 72 - len(statement))
    if len(statement) + pad + len(comment) <= _LINE:
        return [f"{statement}{' ' * pad}# {comment}"]
    return [f"    # {comment}", statement]


def _expression(operation: Compute, names: _Names, later: bool, group: int) -> str:
    signature = operation.signature
    name = qualified_name(signature.node)
    emitter = EMITTERS.get(name)
    if emitter is None:
        raise CodegenError(f"operator {name} cannot be written as PyTorch", where=repr(signature.node.name))
    codes = tuple(None if value is None else names.codes[value.name] for value in signature.operands)
    call = Call(signature, codes, operation.splits, operation.mesh, group, operation.samples)
    return deferred(emitter, call) if later else emitter(call)


def _comment(operation: Compute) -> str:
    node = operation.signature.node
    shapes = ", ".join(str(list(value.shape)) for value in operation.signature.results[:1] if value is not None)
    splits = "".join(f"  {split}" for split in operation.splits)
    return f"{_quoted(node.name)} {shapes}{splits}"


_UNSAFE = re.compile(r"[^\x20-\x7e]")


def _quoted(name: str) -> str:
    """A model's name as a comment can hold it: one line of printable ASCII, shortened in the middle."""
    shown = _UNSAFE.sub("?", repr(name))
    return shown if len(shown) <= 60 else f"{shown[:28]}…{shown[-28:]}"


def _collective(operation: Collective, names: _Names, group: int) -> str:
    step = operation.relayout
    source = names.codes[operation.source.name]
    if step.result.windows:
        name = "window" if step.kind == "slice" else step.kind
        windows = _windows(step.result, operation.source.dtype)
        if step.source.cuts == step.result.cuts and step.kind == "redistribute":
            return f"p.group.edges({source}, {_cuts(step.source)}, {windows})"
        return f"p.group.{name}({source}, {_cuts(step.source)}, {_cuts(step.result)}, {windows})"
    if step.kind == "redistribute":
        return f"p.group.redistribute({source}, {_cuts(step.source)}, {_cuts(step.result)})"
    arguments = [source]
    if step.kind == "all_to_all":
        arguments += [str(step.origin), str(step.dimension)]
    elif step.kind != "all_reduce":
        arguments.append(str(step.dimension))
    if step.divisor > 1:
        arguments.append(f"divisor={step.divisor}")
    return f"{group_code(step.over, group)}.{step.kind}({', '.join(arguments)})"


def _cuts(layout: Layout) -> str:
    return repr(tuple(tuple((axis.degree, axis.stride) for axis in axes) for axes in layout.cuts))


def _windows(layout: Layout, dtype: DType) -> str:
    """The windows of a layout, and what blocks that stick out are filled with: whole numbers have no infinity."""
    windows = tuple(
        (dimension, window.step, window.offset, window.length)
        for dimension, window in enumerate(layout.windows)
        if window is not None
    )
    lowest = layout.fill == -math.inf and dtype.is_integer
    fill = int(np.iinfo(dtype.value).min) if lowest else layout.fill
    return f"{windows!r}, {literal(fill)}" if fill else repr(windows)


def _collective_comment(operation: Collective, group: int) -> str:
    size = max(operation.source.bytes, operation.result.bytes)
    ranks = degree_of(operation.relayout.over) if operation.relayout.over else group
    return f"{operation.kind} over {ranks} ranks, {size / 2**20:.3g} MiB"


_CONSTANT = re.compile(r"\bp\.(c\d+)\b")


def emit_stage(stage: StageCode, title: str) -> str:
    """The whole file of a stage: docstring, types of what it takes, and its forward.

    `title` is one line that says what the stage is part of; it must be plain text of our own.
    """
    forward = _forward(stage)
    used = dict.fromkeys(_CONSTANT.findall(forward.text))
    segments = f"SEGMENTS = {forward.read!r}\n" if forward.read else ""
    return (
        f'"""{title}\n\n{_summary(stage, forward)}"""\n\n'
        f"{_imports(forward.text)}\n"
        f"INPUTS = {_types(forward.arguments, stage.inputs)}\n"
        f"OUTPUTS = {_types(forward.results, stage.outputs)}\n"
        f"PARAMETERS = {tuple(f'w{index}' for index, _ in stage.parameters)!r}\n"
        f"CONSTANTS = {tuple(used)!r}\n"
        f"{segments}\n\n"
        f"{forward.text}"
    )


def _imports(text: str) -> str:
    """Import statements for what the forward uses."""
    lines = ["import torch\n"]
    if re.search(r"\bF\.", text):
        lines.append("import torch.nn.functional as F\n")
    own = []
    if re.search(r"\boperators\.", text):
        own.append("from autopipe.backends.torch.runtime import operators\n")
    if text.startswith("@recompute"):
        own.append("from autopipe.backends.torch.runtime.recomputation import recompute\n")
    if own:
        lines += ["\n", *own]
    return "".join(lines)


def _types(names: tuple[str, ...], values: tuple[Value, ...]) -> str:
    """A dict from identifier to element type and local shape."""
    lines = [
        f"    {name!r}: (torch.{value.dtype.value}, {value.shape!r}),\n"
        for name, value in zip(names, values, strict=True)
    ]
    return f"{{\n{''.join(lines)}}}" if lines else "{}"


def _summary(stage: StageCode, forward: _Forward) -> str:
    """Lines saying what goes in and out, and how large the parameters are."""
    rows = [("in", name, value) for name, value in zip(forward.arguments, stage.inputs, strict=True)]
    rows += [("out", name, value) for name, value in zip(forward.results, stage.outputs, strict=True)]
    lines = [f"{way:<4} {name:<5} {value.dtype.value:<8} {list(value.shape)}" for way, name, value in rows]
    elements = sum(value.elements for _, value in stage.parameters)
    size = sum(value.bytes for _, value in stage.parameters)
    lines.append(f"parameters {elements:,} ({size / 2**20:.1f} MiB)")
    return "\n".join(lines) + "\n"
