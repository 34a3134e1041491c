"""A stage as text: its forward on local shards, one operator a line, in segments where it recomputes."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from autopipe.backends.torch.emission.attention import ATTENTION
from autopipe.backends.torch.emission.call import Call, Emitter, group_code, literal
from autopipe.backends.torch.emission.elementwise import ELEMENTWISE
from autopipe.backends.torch.emission.movement import MOVEMENT
from autopipe.backends.torch.emission.normalization import NORMALIZATION
from autopipe.backends.torch.emission.products import PRODUCTS
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import DType, Value
from autopipe.ir.layout import Layout, degree_of
from autopipe.ir.ops import qualified_name
from autopipe.ir.ops.products import is_matrix_product, takes_bias
from autopipe.ir.program import Collective, Compute, Operation, StageCode

EMITTERS: dict[str, Emitter] = {**ELEMENTWISE, **MOVEMENT, **PRODUCTS, **NORMALIZATION, **ATTENTION}
"""Of all operators that can be written."""

LINEAR = "Linear"
"""Operator type of a product and the bias added to it; operands x, weight [in, out], bias [out]."""

Names = tuple[str, ...]


def merge_neighbours(stage: StageCode) -> StageCode:
    """The same stage with products and their biases as one operation, where nothing else reads the product.

    The graph keeps them apart, because apart they can be split: a bias added to partial sums would count several times.
    """
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
            operation = _linear(product, operation)
            merged.update(product.writes)
        operations.append(operation)
    kept = (each for each in operations if isinstance(each, Collective) or merged.isdisjoint(each.writes))
    return replace(stage, operations=tuple(kept))


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


_LINE = 120
_PARAMETER, _CONSTANT = re.compile(r"\bp\.(w\d+)\b"), re.compile(r"\bp\.(c\d+)\b")
_UNSAFE = re.compile(r"[^\x20-\x7e]")


@dataclass(frozen=True, slots=True)
class Forward:
    """The function `forward(p, …)` as text, and the code of what it takes and gives."""

    text: str
    arguments: Names
    results: Names
    read: tuple[Names, ...]
    """For each segment that runs again the parameters that it reads."""


def emit_forward(stage: StageCode) -> Forward:
    """The forward of a stage. Raises CodegenError for an operator without emission."""
    return _Writer(merge_neighbours(stage)).forward()


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment's operations; names of values in the order of their first use."""

    operations: tuple[Operation, ...]
    arguments: Names
    flowing: Names
    """Results through which gradients flow."""
    others: Names

    @property
    def results(self) -> Names:
        return self.flowing + self.others


def _segments_of(stage: StageCode) -> list[_Segment]:
    """The segments that give something to others or to the stage's outputs, with what they read of others.

    Found from the last to the first: a result is wanted where a later segment reads it.
    """
    held = {value.name for _, value in stage.parameters} | {each.value.name for _, each in stage.constants}
    wanted = {value.name for value in stage.outputs}
    flowing = frozenset(name for segment in stage.segments for name in segment.flowing)
    found: list[_Segment] = []
    for operations in reversed(stage.by_segment()):
        written = dict.fromkeys(name for each in operations for name in each.writes)
        read = dict.fromkeys(name for each in operations for name in each.reads)
        results = [name for name in written if name in wanted]
        if results:
            arguments = tuple(name for name in read if name not in written and name not in held)
            own = tuple(name for name in results if name in flowing)
            others = tuple(name for name in results if name not in flowing)
            found.append(_Segment(operations, arguments, own, others))
            wanted |= set(arguments)
    return found[::-1]


@dataclass(slots=True)
class _Writer:
    """Writes the forward of a stage. Identifiers are made by index, never from the model's own names."""

    stage: StageCode
    codes: dict[str, str] = field(default_factory=dict)
    """Identifiers by value."""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def forward(self) -> Forward:
        stage = self.stage
        self.codes |= {value.name: f"p.w{index}" for index, value in stage.parameters}
        self.codes |= {constant.value.name: f"p.c{index}" for index, constant in stage.constants}
        arguments = tuple(self._fresh(value) for value in stage.inputs)
        outputs = tuple(value.name for value in stage.outputs)
        functions: list[str] = []
        if stage.segments:
            segments = _segments_of(stage)
            functions = [self._segment(number, segment) for number, segment in enumerate(segments)]
            lines = self._calls(segments, outputs)
        else:
            lines = self._body(stage.operations, tuple(value.name for value in stage.inputs), outputs)
        head = f"def forward({', '.join(['p', *arguments])}):"
        text = "\n".join([head, *lines, f"    return {self._tuple(outputs)}", ""])
        read = tuple(tuple(dict.fromkeys(_PARAMETER.findall(each))) for each in functions)
        return Forward("\n\n".join([*functions, text]), arguments, self._of(outputs), read)

    def _fresh(self, value: Value) -> str:
        self.codes[value.name] = f"x{next(self.numbers)}"
        return self.codes[value.name]

    def _of(self, names: Iterable[str]) -> Names:
        return tuple(self.codes[name] for name in names)

    def _tuple(self, names: Names) -> str:
        return f"({', '.join(self._of(names))}{',' if len(names) == 1 else ''})"

    def _drop(self, names: Iterable[str]) -> str:
        """The end of a line that lets values go."""
        codes = self._of(names)
        return f"; del {', '.join(codes)}" if codes else ""

    def _segment(self, number: int, segment: _Segment) -> str:
        """A segment as a function of its own."""
        head = f"def segment_{number}({', '.join(['p', *self._of(segment.arguments)])}):"
        lines = self._body(segment.operations, segment.arguments, segment.results)
        end = f"    return {self._tuple(segment.flowing)}, {self._tuple(segment.others)}"
        return "\n".join(["@recompute", head, *lines, end, ""])

    def _calls(self, segments: list[_Segment], outputs: Names) -> list[str]:
        """A line for each segment; what no later one reads is let go."""
        last = {name: number for number, each in enumerate(segments) for name in (*each.results, *each.arguments)}
        lines = []
        for number, segment in enumerate(segments):
            drop = self._drop(name for name in last if last[name] == number and name not in outputs)
            called = ", ".join(["p", *self._of(segment.arguments)])
            lines.append(f"    {self._tuple(segment.results)[1:-1]} = segment_{number}({called}){drop}")
        return lines

    def _body(self, operations: tuple[Operation, ...], arguments: Names, results: Names) -> list[str]:
        """Lines of operations; after its last use each value is dropped to free memory."""
        last = dict.fromkeys(arguments, -1)
        for position, operation in enumerate(operations):
            last |= dict.fromkeys((*operation.reads, *operation.writes), position)
        kept = {*results, *(value.name for _, value in self.stage.parameters)}
        kept |= {each.value.name for _, each in self.stage.constants}
        dead: dict[int, list[str]] = {}
        for name, position in last.items():
            if name not in kept:
                dead.setdefault(position, []).append(name)
        return [
            line
            for position, operation in enumerate(operations)
            for line in self._statement(operation, dead.get(position, []))
        ]

    def _statement(self, operation: Operation, dead: list[str]) -> list[str]:
        if isinstance(operation, Collective):
            code, comment = self._collective(operation)
            target = self._fresh(operation.result)
        else:
            code, comment = self._expression(operation), _comment(operation)
            results = operation.signature.results
            target = ", ".join("_" if value is None or value.name in dead else self._fresh(value) for value in results)
            if target == "_":
                return []
        drop = self._drop(name for name in dead if name not in operation.writes)
        statement = f"    {target} = {code}{drop}"
        pad = max(2, 72 - len(statement))
        if len(statement) + pad + len(comment) <= _LINE:
            return [f"{statement}{' ' * pad}# {comment}"]
        return [f"    # {comment}", statement]

    def _expression(self, operation: Compute) -> str:
        signature = operation.signature
        name = qualified_name(signature.node)
        emitter = EMITTERS.get(name)
        if emitter is None:
            raise CodegenError(f"operator {name} cannot be written as PyTorch", where=repr(signature.node.name))
        codes = tuple(None if value is None else self.codes[value.name] for value in signature.operands)
        group = len(self.stage.devices)
        call = Call(signature, codes, operation.splits, operation.mesh, group, operation.samples)
        return deferred(emitter, call) if operation.node in self.stage.deferred else emitter(call)

    def _collective(self, operation: Collective) -> tuple[str, str]:
        """The call of a change of layout, and what it costs as a comment."""
        step, group = operation.relayout, len(self.stage.devices)
        source, cuts = self.codes[operation.source.name], (_cuts(step.source), _cuts(step.result))
        if step.result.windows:
            name = "window" if step.kind == "slice" else step.kind
            arguments = [source, *cuts, _windows(step.result, operation.source.dtype)]
            if step.source.cuts == step.result.cuts and step.kind == "redistribute":
                name = "edges"
                del arguments[2]
            code = f"p.group.{name}({', '.join(arguments)})"
        elif step.kind == "redistribute":
            code = f"p.group.redistribute({', '.join([source, *cuts])})"
        else:
            arguments = [source]
            if step.kind == "all_to_all":
                arguments += [str(step.origin), str(step.dimension)]
            elif step.kind != "all_reduce":
                arguments.append(str(step.dimension))
            if step.divisor > 1:
                arguments.append(f"divisor={step.divisor}")
            code = f"{group_code(step.over, group)}.{step.kind}({', '.join(arguments)})"
        size = max(operation.source.bytes, operation.result.bytes)
        ranks = degree_of(step.over) if step.over else group
        return code, f"{operation.kind} over {ranks} ranks, {size / 2**20:.3g} MiB"


def _comment(operation: Compute) -> str:
    """The node's name as a comment can hold it, one line of printable ASCII, its local shape and splits."""
    name = _UNSAFE.sub("?", repr(operation.signature.node.name))
    name = name if len(name) <= 60 else f"{name[:28]}…{name[-28:]}"
    shapes = ", ".join(str(list(value.shape)) for value in operation.signature.results[:1] if value is not None)
    return f"{name} {shapes}{''.join(f'  {split}' for split in operation.splits)}"


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


_LIBRARIES = ("torch", "F", "operators")


def deferred(emitter: Emitter, call: Call) -> str:
    """The expression of `call` for the `WeightGradQueue`: `p.weight_grads(F.linear, x0, p.w1.t(), p.w2)`.

    What is not one call of a library's function becomes one of the tensors it reads.
    """
    code = emitter(call)
    tree = ast.parse(code, mode="eval").body
    if isinstance(tree, ast.Call) and tree.args:
        function = ast.unparse(tree.func)
        names = function.split(".")
        if names[0] in _LIBRARIES and all(map(str.isidentifier, names)) and code.startswith(f"{function}("):
            return f"p.weight_grads({function}, {code[len(function) + 1 :]}"
    local = tuple(None if each is None else f"y{index}" for index, each in enumerate(call.codes))
    arguments, tensors = (", ".join(each for each in codes if each is not None) for codes in (local, call.codes))
    return f"p.weight_grads(lambda {arguments}: {emitter(replace(call, codes=local))}, {tensors})"


def emit_stage(stage: StageCode, title: str) -> str:
    """The whole file of a stage: docstring, types of what it takes, and its forward.

    `title` is one line that says what the stage is part of; it must be plain text of our own.
    """
    forward = emit_forward(stage)
    segments = f"SEGMENTS = {forward.read!r}\n" if forward.read else ""
    return (
        f'"""{title}\n\n{_summary(stage, forward)}"""\n\n'
        f"{_imports(forward.text)}\n"
        f"INPUTS = {_types(forward.arguments, stage.inputs)}\n"
        f"OUTPUTS = {_types(forward.results, stage.outputs)}\n"
        f"PARAMETERS = {tuple(f'w{index}' for index, _ in stage.parameters)!r}\n"
        f"CONSTANTS = {tuple(dict.fromkeys(_CONSTANT.findall(forward.text)))!r}\n"
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
    return "".join([*lines, "\n", *own] if own else lines)


def _types(names: Names, values: tuple[Value, ...]) -> str:
    """A dict from identifier to element type and local shape."""
    lines = [
        f"    {name!r}: (torch.{value.dtype.value}, {value.shape!r}),\n"
        for name, value in zip(names, values, strict=True)
    ]
    return f"{{\n{''.join(lines)}}}" if lines else "{}"


def _summary(stage: StageCode, forward: Forward) -> str:
    """Lines saying what goes in and out, and how large the parameters are."""
    rows = [("in", name, value) for name, value in zip(forward.arguments, stage.inputs, strict=True)]
    rows += [("out", name, value) for name, value in zip(forward.results, stage.outputs, strict=True)]
    lines = [f"{way:<4} {name:<5} {value.dtype.value:<8} {list(value.shape)}" for way, name, value in rows]
    elements = sum(value.elements for _, value in stage.parameters)
    size = sum(value.bytes for _, value in stage.parameters)
    lines.append(f"parameters {elements:,} ({size / 2**20:.1f} MiB)")
    return "\n".join(lines) + "\n"
