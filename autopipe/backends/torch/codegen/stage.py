"""Generation of the forward of a stage on local shards. The forward of a stage that recomputes
activations consists of segments, functions whose values backward recomputes.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from autopipe.backends.torch.codegen.attention import ATTENTION
from autopipe.backends.torch.codegen.call import (
    Call,
    CodeEmitter,
    call_code,
    group_code,
    python_literal,
)
from autopipe.backends.torch.codegen.elementwise import ELEMENTWISE
from autopipe.backends.torch.codegen.layer_functions import fold_layers, with_loops
from autopipe.backends.torch.codegen.layered_forward import ModelNames, layered_forward
from autopipe.backends.torch.codegen.loop import loop_body_stage
from autopipe.backends.torch.codegen.matmul_conv import MATMUL_CONV
from autopipe.backends.torch.codegen.movement import MOVEMENT
from autopipe.backends.torch.codegen.normalization import NORMALIZATION
from autopipe.backends.torch.codegen.quantized import QUANTIZED
from autopipe.backends.torch.codegen.segment_functions import SegmentBody, segment_calls
from autopipe.backends.torch.codegen.statement import Statement, tuple_code, wrapped_call
from autopipe.backends.torch.codegen.value_names import HIDDEN, model_input_name, name_hints
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import DType, Value
from autopipe.ir.layout import Layout, total_degree
from autopipe.ir.ops import qualified_name
from autopipe.ir.ops.loop import LOOP, operand_ports, result_ports
from autopipe.ir.ops.matmul_conv import can_fuse_bias, is_matmul_of_matrices
from autopipe.ir.program import Collective, Compute, Operation, StageCode
from autopipe.ir.words import plural

EMITTERS: dict[str, CodeEmitter] = {
    **ELEMENTWISE,
    **MOVEMENT,
    **MATMUL_CONV,
    **NORMALIZATION,
    **ATTENTION,
    **QUANTIZED,
}

LINEAR_OPERATOR = "Linear"
"""Operator type of a matmul that is fused with the addition of a bias. Operands: x, weight [in,
out], bias [out].
"""

Names = tuple[str, ...]
Style = Literal["flat", "layers"]
"""Form of a generated stage: `flat` writes one statement per operator, and `layers` writes one
function per class of repeated layers.
"""


def _fuse_biases(stage: StageCode) -> tuple[Operation, ...]:
    """Return the operations of a stage. The addition of a bias is fused with the matmul before it
    if no other operation reads the matmul's result.

    The graph has separate nodes for both because they can be split differently: if the matmul gives
    partial sums, a fused bias would be added on each device.
    """
    reads = Counter(name for operation in stage.operations for name in operation.reads)
    reads.update(value.name for value in stage.outputs)
    products = {
        operation.signature.result().name: operation
        for operation in stage.operations
        if isinstance(operation, Compute) and is_matmul_of_matrices(operation.signature)
    }
    operations: dict[int, Operation] = {}
    for operation in stage.operations:
        if isinstance(operation, Compute) and qualified_name(operation.signature.node) == "Add":
            first = operation.signature.operand(0)
            second = operation.signature.operand(1)
            for value, bias in ((first, second), (second, first)):
                product = products.get(value.name)
                if product is not None and reads[value.name] == 1 and can_fuse_bias(value, bias):
                    del operations[id(product)]
                    operation = _fuse_bias(product, operation, bias)
                    break
        operations[id(operation)] = operation
    return tuple(operations.values())


def _fuse_bias(product: Compute, addition: Compute, bias: Value) -> Compute:
    """Return one operation for the matmul `product` and the addition of `bias`. It has the node
    index of the matmul and the name of the addition.
    """
    signature = addition.signature
    node = replace(signature.node, op=LINEAR_OPERATOR, domain="autopipe")
    operands = (*product.signature.operands, bias)
    joined = replace(signature, node=node, operands=operands, constants=(None, None, None))
    return replace(addition, node=product.node, signature=joined)


_PARAMETER_PATTERN = re.compile(r"\bp\.(w\d+)\b")
_CONSTANT_PATTERN = re.compile(r"\bp\.(c\d+)\b")
_UNSAFE_CHARACTERS = re.compile(r"[^\x20-\x7e]")


@dataclass(frozen=True, slots=True)
class ForwardSource:
    """The source text of the function `forward(p, …)`, and the variable names of its arguments and
    results.
    """

    text: str
    arguments: Names
    results: Names
    read: tuple[Names, ...]
    """For each segment (a function whose values backward recomputes), the names of the parameters
    that it reads, such as `w3`.
    """
    codes: Mapping[str, str]
    """For each value, by its name in the graph, the name under which `autopipe launch --values`
    records its variable, or its code if it is a parameter or a constant.
    """
    attributes: tuple[tuple[str, str | int], ...] = ()
    """Paths of the attributes of `p`, as in `StageAttributes`."""


def emit_forward(
    stage: StageCode, style: Style = "flat", is_training: bool = True
) -> ForwardSource:
    """Return the source of the forward of a stage in a style. Raise CodegenError for an operator
    without an emitter.

    If `is_training` is False, functions of layers free their arguments early. In training, autograd
    saves most of these arguments.
    """
    writer = _ForwardWriter(
        replace(stage, operations=_fuse_biases(stage)), style=style, is_training=is_training
    )
    return writer.forward()


class _Segment(NamedTuple):
    """Operations that backward recomputes together, with the names of their arguments and
    results.
    """

    operations: tuple[Operation, ...]
    arguments: Names
    flowing: Names
    """Names of the results through which gradients flow. `others` are the names of the other
    results.
    """
    others: Names


def _segments_of(stage: StageCode) -> list[_Segment]:
    """Return the segments of a stage: groups of operations that backward recomputes together. A
    segment is omitted if neither a later segment nor the stage's outputs need its results. The
    arguments of a segment are the values that it reads and does not compute, except parameters and
    constants.
    """
    # The loop visits the segments in reverse order, because a result of a segment is needed only if
    # a later segment reads it.
    held = _names_held_by_p(stage)
    wanted = {value.name for value in stage.outputs}
    flowing = frozenset(name for segment in stage.segments for name in segment.flowing)
    found: list[_Segment] = []
    for operations in reversed(stage.by_segment()):
        written = dict.fromkeys(name for each in operations for name in each.writes)
        read = dict.fromkeys(name for each in operations for name in each.reads)
        if results := [name for name in written if name in wanted]:
            arguments = tuple(name for name in read if name not in written and name not in held)
            own, others = (
                tuple(name for name in results if (name in flowing) is flows)
                for flows in (True, False)
            )
            found.append(_Segment(operations, arguments, own, others))
            wanted |= set(arguments)
    return found[::-1]


def _names_held_by_p(stage: StageCode) -> set[str]:
    """Return the names of the parameters and constants of a stage. The argument `p` of `forward`
    holds them, so the code does not delete them.
    """
    return {value.name for _, value in stage.parameters} | {
        each.value.name for _, each in stage.constants
    }


@dataclass(slots=True)
class _ForwardWriter:
    """Writes the source of the forward of a stage. Variables have numbered names, which contain no
    text from the model.
    """

    stage: StageCode
    codes: dict[str, str] = field(default_factory=dict)
    """Code of each value (a variable or expression) by the name of the value."""
    numbers: Iterator[int] = field(default_factory=itertools.count)
    margin: str = "    "
    style: Style = "flat"
    is_training: bool = True
    loops: dict[str, str] = field(default_factory=dict)
    """Source text of the functions that run the loop operators of the stage, by function name."""

    def forward(self) -> ForwardSource:
        """Return the source of the forward."""
        stage = self.stage
        self.codes |= {value.name: f"p.w{index}" for index, value in stage.parameters}
        self.codes |= {constant.value.name: f"p.c{index}" for index, constant in stage.constants}
        arguments = tuple(self._new_variable(value) for value in stage.inputs)
        source = self._flat(arguments) if self.style == "flat" else self._layered(arguments)
        results = {value.name: f"result {index}" for index, value in enumerate(stage.outputs)}
        return replace(source, codes={**source.codes, **results})

    def _flat(self, arguments: Names) -> ForwardSource:
        """Return the source of the forward with one statement per operator."""
        stage = self.stage
        outputs = tuple(value.name for value in stage.outputs)
        inputs = tuple(value.name for value in stage.inputs)
        segments = _segments_of(stage) if stage.segments else []
        bodies = [self._segment_body(number, each) for number, each in enumerate(segments)]
        functions = [self._segment_text(each) for each in bodies]
        if stage.segments:
            lines = self._segment_calls(segments, outputs)
        else:
            lines = self._body_lines(stage.operations, inputs, outputs)
        head = f"def forward({', '.join(['p', *arguments])}):"
        text = "\n".join([head, *lines, f"    return {self._tuple_code(outputs)}", ""])
        parameters = [(f"w{index}", f"w{index}") for index, _ in stage.parameters]
        text = "\n\n".join([*self.loops.values(), *functions, text])
        constants = [(name, name) for name in dict.fromkeys(_CONSTANT_PATTERN.findall(text))]
        return ForwardSource(
            text,
            arguments,
            self._variables_of(outputs),
            tuple(self._parameters_read(each) for each in bodies),
            self.codes,
            (*parameters, *constants),
        )

    def _layered(self, arguments: Names) -> ForwardSource:
        """Return the source of the forward with one function per class of repeated layers."""
        stage = self.stage
        outputs = tuple(value.name for value in stage.outputs)
        inputs = tuple(value.name for value in stage.inputs)
        held = {self.codes[name]: name for name in _names_held_by_p(stage)}
        used = set[str]()
        bodies: list[SegmentBody] = []
        if stage.segments:
            bodies = [
                self._segment_body(number, each) for number, each in enumerate(_segments_of(stage))
            ]
            calls = segment_calls(bodies, held, used)
            items = with_loops(calls, self._variables_of(outputs))
        else:
            statements = self._statements(stage.operations, inputs, outputs)
            items = fold_layers(statements, self._variables_of(outputs), held, used)
        layered = layered_forward(
            items,
            {
                code: model_input_name(value) or HIDDEN
                for code, value in zip(arguments, stage.inputs, strict=True)
            },
            {self.codes[value.name]: model_input_name(value) for value in stage.outputs},
            self._model_names(held),
            moves_arguments=not self.is_training,
        )
        return ForwardSource(
            layered.text,
            layered.arguments,
            layered.results,
            tuple(self._parameters_read(each) for each in bodies),
            {name: layered.recorded.get(code, code) for name, code in self.codes.items()},
            layered.attributes,
        )

    def _model_names(self, held: Mapping[str, str]) -> ModelNames:
        """Return the names in the model from which the layered form derives its names. `held` has
        the name in the model of each parameter and constant by its code.
        """
        stage = self.stage
        parameters = {value.name: value.name for _, value in stage.parameters}
        constants = [constant.value.name for _, constant in stage.constants]
        hints = {}
        sizes: dict[str, int] = {self.codes[each.name]: each.bytes for each in stage.inputs}
        scopes: dict[str, str] = {}
        for name, hint in name_hints(stage.operations, parameters, constants).items():
            if name in self.codes:
                follows = None if hint.follows is None else self.codes[hint.follows]
                hints[self.codes[name]] = replace(hint, follows=follows)
        for operation in stage.operations:
            if isinstance(operation, Collective):
                results: tuple[Value | None, ...] = (operation.result,)
            else:
                results = operation.signature.results
                for name in operation.reads:
                    scopes.setdefault(self.codes[name], operation.signature.node.name)
            for value in results:
                if value is not None and value.name in self.codes:
                    sizes[self.codes[value.name]] = value.bytes
        return ModelNames(held, scopes, hints, sizes)

    def _parameters_read(self, body: SegmentBody) -> Names:
        """Return the names of the parameters that a segment reads. The functions of its loops read
        parameters too.
        """
        code = "\n".join(f"{each.code}\n{each.helper}" for each in body.statements)
        return tuple(dict.fromkeys(_PARAMETER_PATTERN.findall(code)))

    def _new_variable(self, value: Value) -> str:
        """Return a new variable name for a value, and record it in `codes`."""
        self.codes[value.name] = f"x{next(self.numbers)}"
        return self.codes[value.name]

    def _variables_of(self, names: Iterable[str]) -> Names:
        """Return the code of the values called `names`."""
        return tuple(self.codes[name] for name in names)

    def _tuple_code(self, names: Names) -> str:
        """Return the code of a tuple of the values called `names`."""
        return tuple_code(self._variables_of(names))

    def _del_statement(self, names: Iterable[str]) -> str:
        """Return `; del x1, x2` for the values called `names`, or "" if there are none. The
        statement frees their memory.
        """
        codes = self._variables_of(names)
        return f"; del {', '.join(codes)}" if codes else ""

    def _segment_body(self, number: int, segment: _Segment) -> SegmentBody:
        """Return the statements of a segment, and the variables of its arguments and results."""
        results = segment.flowing + segment.others
        arguments = self._variables_of(segment.arguments)
        statements = tuple(self._statements(segment.operations, segment.arguments, results))
        return SegmentBody(
            number,
            statements,
            arguments,
            self._variables_of(segment.flowing),
            self._variables_of(segment.others),
        )

    def _segment_text(self, body: SegmentBody) -> str:
        """Return the source of the function of a segment."""
        head = f"def segment_{body.number}({', '.join(['p', *body.arguments])}):"
        lines = [line for each in body.statements for line in each.lines(self.margin)]
        end = f"    return {tuple_code(body.flowing)}, {tuple_code(body.others)}"
        return "\n".join(["@recompute", head, *lines, end, ""])

    def _segment_calls(self, segments: list[_Segment], outputs: Names) -> list[str]:
        """Return the lines of one call per segment, with a `del` of the values that no later
        segment reads.
        """
        names = [(*each.flowing, *each.others, *each.arguments) for each in segments]
        last = {name: number for number, own in enumerate(names) for name in own}
        lines = []
        for number, segment in enumerate(segments):
            drop = self._del_statement(
                name for name in last if last[name] == number and name not in outputs
            )
            call = call_code(f"segment_{number}", "p", *self._variables_of(segment.arguments))
            results = self._tuple_code(segment.flowing + segment.others)[1:-1]
            lines += wrapped_call(f"    {results} = {call}", "    ")
            lines[-1] += drop
        return lines

    def _body_lines(
        self, operations: tuple[Operation, ...], arguments: Names, results: Names
    ) -> list[str]:
        """Return the lines of `operations`, the body of a function with the given arguments and
        results.
        """
        statements = self._statements(operations, arguments, results)
        return [line for each in statements for line in each.lines(self.margin)]

    def _statements(
        self, operations: tuple[Operation, ...], arguments: Names, results: Names
    ) -> list[Statement]:
        """Return the statements of `operations`, the body of a function with the given arguments
        and results. Each value is deleted after its last use, to free its memory.
        """
        last = dict.fromkeys(arguments, -1)
        for position, operation in enumerate(operations):
            last |= dict.fromkeys((*operation.reads, *operation.writes), position)
        dead: dict[int, list[str]] = defaultdict(list)
        kept = {*results, *_names_held_by_p(self.stage)}
        for name in (name for name in last if name not in kept):
            dead[last[name]].append(name)
        statements = (
            self._statement(operation, dead[position])
            for position, operation in enumerate(operations)
        )
        return [each for each in statements if each is not None]

    def _statement(self, operation: Operation, dead: list[str]) -> Statement | None:
        """Return the statement of one operation, None if no operation reads its results. `dead` has
        the names of the values that no later operation reads, in the order in which the code first
        uses them. Time is linear in the number of the operation's values and of `dead`.
        """
        unread = frozenset(dead)
        written = frozenset(operation.writes)
        targets: tuple[str, ...]
        helper = ""
        if isinstance(operation, Collective):
            code, facts = self._collective_code(operation)
            name = ""
            targets = (self._new_variable(operation.result),)
        else:
            known_loops = len(self.loops)
            code = self._operation_code(operation)
            helper = "\n".join(list(self.loops.values())[known_loops:])
            name, facts = _operation_comment(operation)
            if self.style == "layers":
                name = ""
            targets = tuple(
                "_" if value is None or value.name in unread else self._new_variable(value)
                for value in operation.signature.results
            )
            if targets == ("_",):
                return None
        dropped = self._variables_of(each for each in dead if each not in written)
        return Statement(targets, code, dropped, name, facts, helper)

    def _operation_code(self, operation: Compute) -> str:
        """Return the expression that computes an operator. Raise CodegenError if the operator has
        no emitter.
        """
        signature = operation.signature
        name = qualified_name(signature.node)
        if name == LOOP:
            return self._loop_call(operation)
        emitter = EMITTERS.get(name)
        if emitter is None:
            raise CodegenError(
                f"operator {name} is not supported by the torch backend",
                where=repr(signature.node.name),
            )
        codes = tuple(
            None if value is None else self.codes[value.name] for value in signature.operands
        )
        call = replace(
            Call.of(signature, codes, operation.splits),
            mesh=operation.mesh, devices=len(self.stage.devices), samples=operation.samples,
        )  # fmt: skip
        return (
            defer_weight_gradient(emitter, call)
            if operation.node in self.stage.deferred
            else emitter(call)
        )

    def _loop_call(self, operation: Compute) -> str:
        """Return the call of a new function that runs all iterations of a loop operator. The
        function is added to `loops`.
        """
        node = operation.signature.node
        code = loop_body_stage(operation)
        code = replace(code, operations=_fuse_biases(code))
        run = _ForwardWriter(code, numbers=self.numbers, margin=" " * 8, style=self.style)
        ports = operand_ports(node)
        states = node.integer("states")
        changing = node.integer("states") + len(node.integers("scan_axes"))
        given: list[tuple[str, str]] = []
        for place, (port, value) in enumerate(
            zip(ports, operation.signature.operands, strict=True)
        ):
            source = self.codes[value.name] if value is not None else "None"
            if place >= changing and source.startswith("p."):
                run.codes[port.name] = source
            else:
                given.append((f"x{next(self.numbers)}", source))
                run.codes[port.name] = given[-1][0]
        own = [name for name, _ in given]
        number = code.inputs[0]
        count = node.integer("count")
        through = list[tuple[str, str]]()
        if any(number.name in each.reads for each in code.operations) or number in code.outputs:
            through.append(
                (run._new_variable(number), f"torch.arange({count}, device=p.device).unbind()")
            )
        for place in range(states, changing):
            rows = f"{own[place]}.unbind({ports[place].axis})"
            rows = f"reversed({rows})" if ports[place].backwards else rows
            through.append((run._new_variable(code.inputs[1 + place]), rows))
        body = run._body_lines(
            code.operations,
            tuple(each.name for each in code.inputs),
            tuple(each.name for each in code.outputs),
        )
        names, rows = (
            (", ".join(each) for each in zip(*through, strict=True))
            if through
            else ("_", f"range({count})")
        )
        lists = [f"x{next(self.numbers)}" for _ in code.outputs[states:]]
        results = run._variables_of(each.name for each in code.outputs)
        lines = [f"    {name} = []" for name in lists]
        lines += [f"    for {names} in {f'zip({rows})' if len(through) > 1 else rows}:", *body]
        lines += [
            f"        {name}.append({result})"
            for name, result in zip(lists, results[states:], strict=True)
        ]
        if own[:states] != list(results[:states]):
            lines.append(f"        {', '.join(own[:states])} = {', '.join(results[:states])}")
        stacks = [
            f"torch.stack({name}{'[::-1]' if port.backwards else ''}, {port.axis})"
            for name, port in zip(lists, result_ports(node)[states:], strict=True)
        ]
        title = f"loop_{len(self.loops)}"
        head = (
            "@torch.compiler.disable  # It would write out every run.\ndef "
            f"{title}({', '.join(['p', *own])}):"
        )
        self.loops[title] = "\n".join(
            [head, *lines, f"    return {', '.join([*own[:states], *stacks])}", ""]
        )
        return call_code(title, "p", *(source for _, source in given))

    def _collective_code(self, operation: Collective) -> tuple[str, str]:
        """Return (code, comment) of a redistribution. The comment states its kind, the number of
        ranks, and the size of the larger shard in MiB.
        """
        step = operation.relayout
        group = len(self.stage.devices)
        source = self.codes[operation.source.name]
        cuts = [_mesh_axes_code(step.source), _mesh_axes_code(step.result)]
        if step.result.windows:
            name = "window" if step.kind == "slice" else step.kind
            if step.source.shard_axes == step.result.shard_axes and step.kind == "redistribute":
                name = "edges"
                cuts = cuts[:1]
            code = call_code(
                f"p.group.{name}", source, *cuts, _windows_code(step.result, operation.source.dtype)
            )
        elif step.kind == "redistribute":
            code = call_code("p.group.redistribute", source, *cuts)
        else:
            code = call_code(
                f"{group_code(step.over, group)}.{step.kind}",
                source,
                step.origin if step.kind == "all_to_all" else None,
                None if step.kind == "all_reduce" else step.dimension,
                divisor=step.divisor if step.divisor > 1 else None,
            )
        ranks = total_degree(step.over) if step.over else group
        return (
            code,
            f"{operation.relayout.kind} over {ranks} {plural(ranks, 'rank')}, "
            f"{operation.largest_bytes / 2**20:.3g} MiB",
        )


def _operation_comment(operation: Compute) -> tuple[str, str]:
    """Return the parts of the comment of an operation: the name of its node in printable ASCII, and
    the local shape of its first result with its splits.
    """
    name = _UNSAFE_CHARACTERS.sub("?", repr(operation.signature.node.name))
    name = name if len(name) <= 60 else f"{name[:28]}…{name[-28:]}"
    shapes = ", ".join(
        str(list(value.shape)) for value in operation.signature.results[:1] if value is not None
    )
    splits = ", ".join(f"{split.axis} over {split.degree}" for split in operation.splits)
    return name, shapes + (f"  split {splits}" if splits else "")


def _mesh_axes_code(layout: Layout) -> str:
    """Return the code of the mesh axes that shard each dimension of a layout."""
    return repr(tuple(tuple(map(tuple, axes)) for axes in layout.shard_axes))


def _windows_code(layout: Layout, dtype: DType) -> str:
    """Return the code of a layout's windows: a tuple (dimension, step, offset, length) for each
    dimension that an operator reads through windows, as a convolution does. Unless it is 0, the
    value of elements outside of the tensor follows after a comma. For integers, the smallest
    integer of the type replaces minus infinity.
    """
    windows = tuple(
        (dimension, window.step, window.offset, window.length)
        for dimension, window in enumerate(layout.windows)
        if window is not None
    )
    lowest = layout.fill == -math.inf and dtype.is_integer
    fill = int(np.iinfo(dtype.value).min) if lowest else layout.fill
    return f"{windows!r}, {python_literal(fill)}" if fill else repr(windows)


_CALLABLE_LIBRARIES = ("torch", "F", "operators")


def defer_weight_gradient(emitter: CodeEmitter, call: Call) -> str:
    """Return the code of `call` for a stage with a split backward: a call that lets the queue
    `p.weight_grads` compute the weight gradient in the second half, such as
    `p.weight_grads(F.linear, x0, p.w1.t(), p.w2)`.

    The first argument is the library function if the emitter's code is a single call of one,
    otherwise a lambda of the tensors that the code reads.
    """
    code = emitter(call)
    tree = ast.parse(code, mode="eval").body
    if isinstance(tree, ast.Call) and tree.args:
        function = ast.unparse(tree.func)
        names = function.split(".")
        if (
            names[0] in _CALLABLE_LIBRARIES
            and all(map(str.isidentifier, names))
            and code.startswith(f"{function}(")
        ):
            return f"p.weight_grads({function}, {code[len(function) + 1 :]}"
    local = tuple(None if each is None else f"y{index}" for index, each in enumerate(call.codes))
    arguments, tensors = (
        ", ".join(each for each in codes if each is not None) for codes in (local, call.codes)
    )
    return f"p.weight_grads(lambda {arguments}: {emitter(replace(call, codes=local))}, {tensors})"
