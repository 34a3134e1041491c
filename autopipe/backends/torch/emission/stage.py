"""The *what* of a stage as text: its forward on local shards, one operator a line.

Neighbouring operators that torch computes in one: found on the operations of a stage, just before they are printed.

The graph keeps them apart, because apart they can be split: a bias added to partial sums would count several times.

All emitters, assembled from the families.

The operations of a stage that recomputes, by segment: what each of them reads of others, and gives to others.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from autopipe.backends.torch.emission.attention import ATTENTION, CONTRIB
from autopipe.backends.torch.emission.call import Call, Emitter, group_code, literal
from autopipe.backends.torch.emission.elementwise import (
    ACTIVATION,
    ELEMENTWISE,
    GENERATION,
    QUANTIZATION,
    RANDOM,
    REGIONS,
    SAMPLING,
    SPECTRAL,
)
from autopipe.backends.torch.emission.movement import INDEXING, MOVEMENT, REGROUP, RESIZE
from autopipe.backends.torch.emission.normalization import LOSSES, NORMALIZATION, REDUCTION
from autopipe.backends.torch.emission.products import CONVOLUTION, POOLING, PRODUCTS, RECURRENT
from autopipe.backends.torch.emission.rank import deferred
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import DType, Value
from autopipe.ir.layout import Layout, degree_of
from autopipe.ir.ops import qualified_name
from autopipe.ir.ops.products import is_matrix_product, takes_bias
from autopipe.ir.program import Collective, Compute, Operation, StageCode


@dataclass(frozen=True, slots=True)
class Part:
    """A segment's operations; names of values in the order of their first use."""

    operations: tuple[Operation, ...]
    arguments: tuple[str, ...]
    flowing: tuple[str, ...]
    """Of what it gives, what gradients flow through."""
    others: tuple[str, ...]
    """Results through which no gradient flows."""

    @property
    def results(self) -> tuple[str, ...]:
        """Names of all the segment's results."""
        return self.flowing + self.others


def parts_of(stage: StageCode) -> tuple[Part, ...]:
    """The segments that give something."""
    held = {value.name for _, value in stage.parameters} | {each.value.name for _, each in stage.constants}
    wanted = {value.name for value in stage.outputs}
    flowing = frozenset(name for segment in stage.segments for name in segment.flowing)
    found: list[Part] = []
    for operations in reversed(stage.by_segment()):
        written = dict.fromkeys(name for each in operations for name in each.writes)
        read = dict.fromkeys(name for each in operations for name in each.reads)
        results = [name for name in written if name in wanted]
        if results:
            arguments = tuple(name for name in read if name not in written and name not in held)
            found.append(Part(operations, arguments, *_divided(results, flowing)))
            wanted |= set(arguments)
    return tuple(reversed(found))


def _divided(names: Iterable[str], chosen: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split `names` into the chosen ones and the others."""
    found = tuple(names)
    return tuple(name for name in found if name in chosen), tuple(name for name in found if name not in chosen)


LINEAR = "Linear"
"""Operator type of a product and the bias added to it; operands x, weight [in, out], bias [out]."""


def merge_neighbours(stage: StageCode) -> StageCode:
    """The same stage with products and their biases as one operation, where nothing else reads the product."""
    reads = Counter(name for operation in stage.operations for name in operation.reads)
    reads.update(value.name for value in stage.outputs)
    products = {
        operation.signature.result().name: operation
        for operation in stage.operations
        if isinstance(operation, Compute) and is_matrix_product(operation.signature)
    }
    merged: set[str] = set()
    operations: list[Operation] = []
    for operation in stage.operations:
        product = _product_under(operation, products, reads)
        if product is not None and isinstance(operation, Compute):
            operations.append(_linear(product, operation))
            merged.add(product.signature.result().name)
        else:
            operations.append(operation)
    kept = (each for each in operations if isinstance(each, Collective) or _first_result(each) not in merged)
    return replace(stage, operations=tuple(kept))


def _first_result(operation: Compute) -> str | None:
    result = operation.signature.results[0]
    return None if result is None else result.name


def _product_under(operation: Operation, products: dict[str, Compute], reads: Counter[str]) -> Compute | None:
    """The product to which `operation` adds a bias, if that is all it does and nothing else reads the product."""
    if not isinstance(operation, Compute) or operation.signature.node.op != "Add" or operation.signature.node.domain:
        return None
    first, second = operation.signature.operand(0), operation.signature.operand(1)
    for product, bias in ((first, second), (second, first)):
        found = products.get(product.name)
        if found is not None and reads[product.name] == 1 and takes_bias(product, bias):
            return found
    return None


def _linear(product: Compute, addition: Compute) -> Compute:
    """Both as one, the product's node: named after the addition, whose result it gives."""
    result = product.signature.result().name
    bias = next(value for value in addition.signature.operands if value is not None and value.name != result)
    signature = replace(
        addition.signature,
        node=replace(addition.signature.node, op=LINEAR, domain="autopipe"),
        operands=(*product.signature.operands, bias),
        constants=(None, None, None),
    )
    return replace(addition, node=product.node, signature=signature)


EMITTERS: dict[str, Emitter] = {
    **ACTIVATION,
    **ELEMENTWISE,
    **GENERATION,
    **INDEXING,
    **MOVEMENT,
    **CONVOLUTION,
    **POOLING,
    **QUANTIZATION,
    **NORMALIZATION,
    **LOSSES,
    **ATTENTION,
    **RECURRENT,
    **RESIZE,
    **CONTRIB,
    **REGIONS,
    **PRODUCTS,
    **REDUCTION,
    **REGROUP,
    **SAMPLING,
    **SPECTRAL,
    **RANDOM,
}


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
        own.append("from autopipe.backends.torch.runtime.recompute import recompute\n")
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
