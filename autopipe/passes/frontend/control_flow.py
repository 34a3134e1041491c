"""Replacement of If, Loop, Scan and SequenceMap while a file is read. The nodes of the chosen
branch replace an If. Copies of the body, one per iteration, replace a loop (unrolling).

Conditions and iteration counts must be constants after dimensions are bound, with two exceptions.
If the condition of an If depends on data, both branches are computed and `Where` selects the
results. If the end of a Loop depends on data, all iterations up to its maximum count are computed,
and iterations after the end do not change the loop-carried states.

A loop that would be unrolled into more than `MAX_UNROLLED_NODES` nodes becomes one loop operator if
possible (module `loops`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType
from autopipe.ir.words import plural
from autopipe.passes.frontend.elements import replacement_node
from autopipe.passes.frontend.protobuf_scan import CONTROL_OPERATORS, DEEPEST_BODY, body_tensor_key
from autopipe.passes.frontend.sequences import boolean_constant, empty_tensor_nodes

if TYPE_CHECKING:
    import onnx

    from autopipe.ir.graph import FileSlice, Value, VarintSlice
    from autopipe.passes.frontend.sequences import Sequences

MAX_BRANCH_NODES = 512
"""Maximum number of nodes in both branches of an If whose condition depends on data."""

SCAN_WITHOUT_BATCH_SINCE = 9
"""The opset since which Scan has no batch dimension."""

MAX_UNROLLED_NODES = 2000
"""Maximum number of nodes into which a loop is unrolled. A longer loop is kept as one operator if
possible; otherwise it is unrolled in spite of its length.
"""

MAX_KEPT_ITERATIONS = 1 << 16
"""Maximum number of iterations of a loop that is kept as one operator. The limit is needed because
a file can declare any number.
"""

MAX_MASKED_ITERATIONS = 1024
"""Maximum number of iterations that are unrolled if the end of a Loop depends on data."""


def nodes_within(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield each of `nodes`, followed by the nodes of its bodies, at any depth."""
    for node in nodes:
        yield node
        for graph in bodies_of(node):
            yield from nodes_within(graph.node)


def bodies_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs in the attributes of a node: the branches of an If, or the body of a
    loop.
    """
    for attribute in node.attribute:
        yield from (attribute.g,) if attribute.HasField("g") else ()
        yield from attribute.graphs


def read_names(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names of the values that a node and its bodies read. The names include values that
    the bodies themselves write.
    """
    yield from (name for name in node.input if name)
    for graph in bodies_of(node):
        yield from (each.name for each in graph.output)
        for inner in graph.node:
            yield from read_names(inner)


def _defined_names(graph: onnx.GraphProto, deep: bool) -> Iterator[str]:
    """Yield the names that a body defines: inputs, initializers and results of nodes. With `deep`,
    also yield the names that bodies within it define.
    """
    yield from (each.name for each in itertools.chain(graph.input, graph.initializer))
    for node in graph.node:
        yield from filter(None, node.output)
        if deep:
            for inner in bodies_of(node):
                yield from _defined_names(inner, deep)


def hoist_from_bodies(graph: onnx.GraphProto, slices: dict[str, FileSlice | VarintSlice]) -> None:
    """Make names in bodies of control flow unique, and move initializers and Constant nodes out of
    the bodies. Changes `graph` in place.

    Each value that a body defines receives a name that is unique in the file. Constant nodes are
    appended to the nodes of `graph`, initializers to its initializers. `slices` contains the
    location of tensor data in the file. For a tensor of a body, its key is the result of
    `protobuf_scan.body_tensor_key`; the new name replaces this key. Raises ModelError if bodies are
    nested more than `DEEPEST_BODY` deep or have sparse weights.
    """
    if any(node.op_type in CONTROL_OPERATORS for node in graph.node):
        _BodyHoister(graph, slices, set(_defined_names(graph, deep=False))).run()


@dataclass(slots=True)
class _BodyHoister:
    """Makes the names of values in bodies unique, and moves initializers and Constant nodes of
    bodies to the graph `top` (see `hoist_from_bodies`).
    """

    top: onnx.GraphProto
    """The main graph of the file."""
    slices: dict[str, FileSlice | VarintSlice]
    """Location of the data of each tensor in the file."""
    taken: set[str]
    """Names of values that are in use."""

    def run(self) -> None:
        """Process all bodies in the graph `top`."""
        numbers = itertools.count()
        counts = itertools.count(1)

        def body(graph: onnx.GraphProto, outside: Mapping[str, str], depth: int) -> None:
            """Rename the values of a body, and move its initializers and Constant nodes to `top`.
            `outside` contains the new name of each renamed value of the enclosing bodies.
            """
            if depth > DEEPEST_BODY:
                raise ModelError(
                    f"control flow is nested more than {DEEPEST_BODY} levels deep, which is not "
                    "supported"
                )
            if graph.sparse_initializer:
                raise ModelError(
                    "the body of a control-flow node has sparse weights, which are not supported"
                )
            number = next(numbers)
            names = dict(outside)
            for name in dict.fromkeys(_defined_names(graph, deep=False)):
                unique = name
                while unique in self.taken:
                    unique = f"{name}/{next(counts)}"
                self.taken.add(unique)
                names[name] = unique
                if (location := self.slices.pop(body_tensor_key(number, name), None)) is not None:
                    self.slices[unique] = location
            del graph.value_info[:]
            for value in itertools.chain(graph.input, graph.output, graph.initializer):
                value.name = names.get(value.name, value.name)
            self.top.initializer.extend(graph.initializer)
            del graph.initializer[:]
            nodes = list(graph.node)
            del graph.node[:]
            for node in nodes:
                _rename_values(node, names)
                visit(node, names, depth)
                is_constant = node.op_type == "Constant" and node.domain in ("", "ai.onnx")
                (self.top if is_constant else graph).node.append(node)

        def visit(node: onnx.NodeProto, names: Mapping[str, str], depth: int) -> None:
            """Process the bodies of a node. `names` contains the new name of each renamed value
            that the node can read.
            """
            if node.op_type in CONTROL_OPERATORS:
                for attribute in node.attribute:
                    if attribute.HasField("g"):
                        body(attribute.g, names, depth + 1)

        for node in list(self.top.node):
            visit(node, {}, 0)


def _rename_values(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Replace the names of operands and results of the node in place."""
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]


@dataclass(frozen=True, slots=True)
class ReaderAccess:
    """The functions and state of the reader that the replacement of control flow uses. Names of
    values may be aliases.
    """

    data: Callable[[str], np.ndarray | None]
    """Returns the data of a value; None if the data are unknown."""
    type_of: Callable[[str], Value | None]
    """Returns the type of a value; None for a value whose type is not known yet, for example a
    sequence.
    """
    sequences: Sequences
    opset: int
    order: Callable[[onnx.GraphProto], list[onnx.NodeProto]]
    """Returns the nodes of a body in topological order."""
    count_nodes: Callable[[int], bool]
    """Adds a number of copied nodes to the count for the file; returns False if the count exceeds
    the limit.
    """
    keep_loop: Callable[[KeptLoop], str]
    """Adds a loop operator to the graph and returns ""; if that is not possible, returns the
    reason.
    """
    readers: Callable[[str], list[str]]
    """Returns the operator names of the nodes in the file that read a value."""


@dataclass(frozen=True, slots=True)
class LoopState:
    """A loop-carried state: a value that an iteration receives from the previous iteration. Fields
    are names of values.
    """

    operand: str
    """The state before the first iteration."""
    name: str
    """The state at the start of an iteration."""
    result: str
    """The state at the end of an iteration."""
    output: str
    """The state after the last iteration; "" if nothing reads it."""


@dataclass(frozen=True, slots=True)
class ScanInput:
    """A value of which each iteration reads one slice along `axis`. The body reads the slice as
    `name`. With `backwards`, the first iteration reads the last slice.
    """

    operand: str
    axis: int
    backwards: bool
    name: str


@dataclass(frozen=True, slots=True)
class ScanOutput:
    """A value that each iteration computes as `result`. The values of all iterations are stacked
    along a new axis `axis` and written to `output`. With `backwards`, the value of the last
    iteration comes first.
    """

    result: str
    output: str
    axis: int
    backwards: bool


@dataclass(frozen=True, slots=True)
class KeptLoop:
    """A loop that becomes one loop operator instead of copies of its body."""

    title: str
    """Prefix of the names of values in the body."""
    name: str
    """Name of the loop node in the file."""
    count: int
    """Number of iterations."""
    nodes: list[onnx.NodeProto]
    """Nodes of the body, with the names of values that they have in the operator."""
    number: str
    """Name of the value that holds the number of the current iteration, counted from 0."""
    states: tuple[LoopState, ...]
    scanned: tuple[ScanInput, ...]
    gathered: tuple[ScanOutput, ...]
    ends: tuple[str, ...]
    """Names of the body's continuation conditions. Each must be true after every iteration;
    otherwise the loop would end early.
    """


def replace_control_flow(
    node: onnx.NodeProto, operands: tuple[str, ...], reader: ReaderAccess
) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that replace an If, Loop, Scan or SequenceMap. The caller must read each node
    before it requests the next one, because later nodes depend on the types and data of earlier
    results.

    Raises ModelError, naming the node, if control flow depends on data in an unsupported way, or if
    the node's bodies do not fit the operator.
    """
    where = f"{node.op_type} {node.name!r}"
    bodies = {each.name: each.g for each in node.attribute if each.HasField("g")}
    needed = ("then_branch", "else_branch") if node.op_type == "If" else ("body",)
    if any(name not in bodies for name in needed) or not node.output:
        raise ModelError(
            f"the node has {len(node.output)} {plural(len(node.output), 'output')} and the "
            f"subgraphs {', '.join(bodies) or 'none'}, expected at least one output and the "
            f"subgraphs {', '.join(needed)}",
            where=where,
        )
    if node.op_type == "If":
        return _replace_if(node, operands[0], [bodies[name] for name in needed], reader, where)
    repeat = _LoopUnroller(node, bodies["body"], reader, where)
    return {
        "Loop": repeat.replace_loop,
        "Scan": repeat.replace_scan,
        "SequenceMap": repeat.replace_sequence_map,
    }[node.op_type](operands)


def _replace_if(
    node: onnx.NodeProto,
    condition: str,
    branches: list[onnx.GraphProto],
    reader: ReaderAccess,
    where: str,
) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that replace an If: those of one branch if the condition is known, otherwise
    the nodes of both branches and a selection for each result.
    """
    for branch in branches:
        if len(branch.output) != len(node.output) or branch.input:
            raise ModelError(
                f"a branch has {len(branch.output)} {plural(len(branch.output), 'output')} and "
                f"{len(branch.input)} {plural(len(branch.input), 'input')}, expected "
                f"{len(node.output)} {plural(len(node.output), 'output')} and 0 inputs",
                where=where,
            )
    data = reader.data(condition)
    if data is not None:
        taken = branches[0 if data.all() else 1]
        yield from reader.order(taken)
        for name, result in zip(node.output, taken.output, strict=True):
            yield replacement_node(node, "Identity", [result.name], [name])
        return
    if sum(1 for branch in branches for _ in nodes_within(branch.node)) > MAX_BRANCH_NODES:
        raise ModelError(
            "the condition depends on data, so both branches would be computed, and they have "
            f"more than {MAX_BRANCH_NODES} nodes",
            hint="export the model with one branch only, or set the condition with --set "
            "model.inputs.NAME=true",
            where=where,
        )
    for branch in branches:
        yield from reader.order(branch)
    for name, first, second in zip(
        node.output, branches[0].output, branches[1].output, strict=True
    ):
        yield from _select_result(node, condition, first.name, second.name, name, reader, where)


def _select_result(
    node: onnx.NodeProto,
    condition: str,
    first: str,
    second: str,
    result: str,
    reader: ReaderAccess,
    where: str,
) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that set `result` to `first` if the condition is true, otherwise to `second`.
    Both are tensors of the same type, or sequences of equal length. Raises ModelError if they are
    neither.
    """
    first_tensors = reader.sequences.get(first)
    second_tensors = reader.sequences.get(second)
    if (
        first_tensors is not None
        and second_tensors is not None
        and len(first_tensors) == len(second_tensors)
    ):
        names = [f"{result}/{number}" for number in range(len(first_tensors))]
        for pair in zip(first_tensors, second_tensors, names, strict=True):
            yield from _select_result(node, condition, *pair, reader, where)
        yield replacement_node(node, "SequenceConstruct", names, [result])
        return
    types = [reader.type_of(each) for each in (first, second)]
    condition_type = reader.type_of(condition)
    if None in types or condition_type is None:
        raise ModelError(
            f"the branches write {result!r} as a sequence, and the condition depends on data",
            where=where,
        )
    if len({(each.dtype, each.shape) for each in types if each is not None}) > 1:
        shapes = " or ".join(
            f"{each.dtype.value}{list(each.shape)}" for each in types if each is not None
        )
        raise ModelError(
            f"the branches write {result!r} as {shapes}, and the condition depends on data, so "
            f"the type of {result!r} is unknown",
            where=where,
        )
    first_data = reader.data(first)
    second_data = reader.data(second)
    if (
        first_data is not None
        and second_data is not None
        and np.array_equal(first_data, second_data)
    ):
        yield replacement_node(node, "Identity", [first], [result])
        return
    if condition_type.shape:
        yield replacement_node(node, "Constant", [], [f"{result}/scalar"], value_ints=[])
        yield replacement_node(
            node, "Reshape", [condition, f"{result}/scalar"], [f"{result}/condition"]
        )
        condition = f"{result}/condition"
    if types[0] is None or types[0].dtype is not DType.BOOL:
        yield replacement_node(node, "Where", [condition, first, second], [result])
        return
    parts = [f"{result}/{each}" for each in ("not", "first", "second")]
    yield replacement_node(node, "Not", [condition], parts[:1])
    yield replacement_node(node, "And", [condition, first], parts[1:2])
    yield replacement_node(node, "And", [parts[0], second], parts[2:])
    yield replacement_node(node, "Or", parts[1:], [result])


class _LoopUnroller:
    """Unrolls one loop (Loop, Scan or SequenceMap) into copies of its body. In the copy for
    iteration i, value NAME of the body is called `RESULT/i/NAME`, where RESULT is the loop's first
    result that has a name.
    """

    def __init__(
        self, node: onnx.NodeProto, body: onnx.GraphProto, reader: ReaderAccess, where: str
    ) -> None:
        self.node = node
        self.body = body
        self.reader = reader
        self.where = where
        self.title = next(filter(None, node.output))
        self.nodes = reader.order(body)
        self.size = sum(1 for _ in nodes_within(self.nodes)) + 1
        self.own = list(_defined_names(body, deep=True))
        self.iterations = 0
        """Number of iterations unrolled so far."""
        self.unkept_reason = ""
        """The reason why the loop cannot be kept as one operator; "" unless `_keep_as_operator` has
        found one.
        """

    def unroll_iteration(self, inputs: list[str]) -> Iterator[onnx.NodeProto]:
        """Yield the nodes of the next iteration, whose body reads the values `inputs`. Afterwards,
        `self.results` contains the names of the body's outputs in this iteration.

        Raises ModelError if the file has too many nodes, or if the numbers of inputs and outputs do
        not fit.
        """
        if not self.reader.count_nodes(self.size):
            raise ModelError(
                f"the model exceeds the maximum number of nodes after {self.iterations} "
                f"{plural(self.iterations, 'iteration')} of the unrolled loop, whose body has "
                f"{self.size - 1} {plural(self.size - 1, 'node')}",
                hint=self.unkept_reason
                and (
                    "the loop must be unrolled because it does not fit into one operator: "
                    f"{self.unkept_reason}"
                ),
                where=self.where,
            )
        if len(inputs) != len(self.body.input):
            raise ModelError(
                f"the body has {len(self.body.input)} {plural(len(self.body.input), 'input')}, "
                f"expected {len(inputs)}",
                where=self.where,
            )
        expected = len(self.node.output) + (self.node.op_type == "Loop")
        if len(self.body.output) != expected:
            raise ModelError(
                f"the body has {len(self.body.output)} "
                f"{plural(len(self.body.output), 'output')}, expected {expected}",
                where=self.where,
            )
        names = {name: f"{self.title}/{self.iterations}/{name}" for name in self.own}
        names.update(zip((each.name for each in self.body.input), inputs, strict=True))
        for each in self.nodes:
            yield _copy_with_names(each, names)
        self.results = [names.get(each.name, each.name) for each in self.body.output]
        self.iterations += 1

    def replace_loop(self, operands: tuple[str, ...]) -> Iterator[onnx.NodeProto]:
        """Yield the nodes that replace a Loop: copies of its body. If the loop becomes one loop
        operator instead, which is added to the graph separately, yield only the nodes that follow
        that operator.
        """
        most, condition, *carried = (*operands, "", "")[: max(len(operands), 2)]
        stacked: list[list[str]] = [[] for _ in self.node.output[len(carried) :]]
        limit = self._known_integer(most) if most else None
        if most and limit is None:
            raise self._unknown_count_error("the iteration count depends on data")
        alive = ""
        inner = carried
        ends = condition
        going = self._known_integer(condition) if condition else 1
        if limit is not None and going and self._should_keep(limit):
            kept = self._keep_as_operator(limit, carried, [], [(0, False)] * len(stacked))
            if kept is not None:
                yield from kept
                return
        while going != 0 and (limit is None or self.iterations < limit):
            if going is None:
                if stacked or self.iterations >= MAX_MASKED_ITERATIONS:
                    raise self._unknown_count_error(
                        "the end of the loop depends on data, and the loop has scan outputs or "
                        f"more than {MAX_MASKED_ITERATIONS} iterations"
                    )
                last = alive
                alive = f"{self.title}/{self.iterations}/alive"
                yield replacement_node(
                    self.node, *(("And", [last, ends]) if last else ("Identity", [ends])), [alive]
                )
            number, still = (
                f"{self.title}/{self.iterations}/{each}" for each in ("number", "going")
            )
            yield replacement_node(self.node, "Constant", [], [number], value_int=self.iterations)
            yield boolean_constant(self.node, still, True)
            yield from self.unroll_iteration([number, still, *inner])
            ends, *results = self.results
            inner = results[: len(carried)]
            results = results[len(carried) :]
            old = carried
            carried = [f"{alive}/{place}" for place in range(len(inner))] if alive else inner
            if alive:
                for names in zip(inner, old, carried, strict=True):
                    yield from _select_result(self.node, alive, *names, self.reader, self.where)
                # A result whose data is known while the file is read lets the next iteration be
                # evaluated at once, for example a counter. The next iteration may use this result
                # instead of the selected state, because after the end of the loop the result is
                # never selected.
                pairs = zip(inner, carried, strict=True)
                inner = [
                    new if self.reader.data(new) is not None else mixed for new, mixed in pairs
                ]
            for found, name in zip(stacked, results, strict=True):
                found.append(name)
            going = self._known_integer(ends)
        yield from self._name_final_states(carried)
        yield from self._stack_scan_outputs(
            list(self.node.output[len(carried) :]), stacked, [0] * len(stacked)
        )

    def _unknown_count_error(self, reason: str) -> ModelError:
        """Return the error of a loop whose iteration count or end depends on data."""
        return ModelError(
            reason,
            hint="export the loop with a fixed iteration count, or with a condition that does "
            "not depend on data",
            where=self.where,
        )

    def _name_final_states(self, carried: list[str]) -> Iterator[onnx.NodeProto]:
        """Yield the nodes that give the final loop-carried states the names of the loop's
        outputs.
        """
        for name, result in zip(self.node.output, carried, strict=False):
            if name:
                yield replacement_node(self.node, "Identity", [result], [name])

    def replace_scan(self, operands: tuple[str, ...]) -> Iterator[onnx.NodeProto]:
        """Yield the nodes that replace a Scan: copies of its body. If the loop becomes one loop
        operator instead, which is added to the graph separately, yield only the nodes that follow
        that operator.
        """
        stated = {each.name: each.i or list(each.ints) for each in self.node.attribute}
        if self.reader.opset < SCAN_WITHOUT_BATCH_SINCE:
            hint = "export the model with opset 9 or later"
            raise ModelError(
                "a Scan of opset 8 has a batch dimension, which is not supported",
                hint,
                self.where,
            )
        count = stated.get("num_scan_inputs", 0)
        if not isinstance(count, int) or not 0 < count <= len(operands):
            raise ModelError(
                f"num_scan_inputs is {count}, expected 1 to {len(operands)}", where=self.where
            )
        carried = list(operands[:-count])
        scanned = operands[-count:]
        gathered = list(self.node.output[len(carried) :])
        steps = []
        axes, backward = (
            _scan_attribute(stated, f"scan_input_{each}", count) for each in ("axes", "directions")
        )
        counts = self._iteration_counts(scanned, axes)
        if len(counts) == 1 and self._should_keep(next(iter(counts))):
            ways = (
                _scan_attribute(stated, f"scan_output_{each}", len(gathered))
                for each in ("axes", "directions")
            )
            slices = [
                (name, axis, bool(back))
                for name, axis, back in zip(scanned, axes, backward, strict=True)
            ]
            outward = [(axis, bool(back)) for axis, back in zip(*ways, strict=True)]
            if (
                kept := self._keep_as_operator(next(iter(counts)), carried, slices, outward)
            ) is not None:
                yield from kept
                return
        for place, (name, axis, back) in enumerate(zip(scanned, axes, backward, strict=True)):
            parts = f"{self.title}/steps{place}"
            yield replacement_node(
                self.node, "SplitToSequence", [name], [parts], axis=axis, keepdims=0
            )
            rows = self.reader.sequences[parts]
            steps.append(rows[::-1] if back else rows)
        if len({len(each) for each in steps}) > 1:
            raise ModelError(
                "the scan inputs have different sizes along their scan axes: "
                f"{', '.join(str(len(each)) for each in steps)}",
                where=self.where,
            )
        stacked: list[list[str]] = [[] for _ in gathered]
        for each in zip(*steps, strict=True):
            yield from self.unroll_iteration([*carried, *each])
            carried = self.results[: len(carried)]
            for found, name in zip(stacked, self.results[len(carried) :], strict=True):
                found.append(name)
        yield from self._name_final_states(carried)
        backward = _scan_attribute(stated, "scan_output_directions", len(gathered))
        for found, back in zip(stacked, backward, strict=True):
            found[:] = found[::-1] if back else found
        yield from self._stack_scan_outputs(
            gathered, stacked, _scan_attribute(stated, "scan_output_axes", len(gathered))
        )

    def replace_sequence_map(self, operands: tuple[str, ...]) -> Iterator[onnx.NodeProto]:
        """Yield the nodes that replace a SequenceMap: a copy of its body per element, and one
        SequenceConstruct per output.
        """
        given = [self.reader.sequences.get(name) for name in operands]
        counts = {len(each) for each in given if each is not None}
        if not given or given[0] is None or len(counts) > 1:
            raise ModelError(
                "the first operand is not a sequence, or the sequences have different lengths",
                where=self.where,
            )
        found: list[list[str]] = [[] for _ in self.node.output]
        for number in range(len(given[0])):
            yield from self.unroll_iteration(
                [
                    name if each is None else each[number]
                    for name, each in zip(operands, given, strict=True)
                ]
            )
            for gathered, name in zip(found, self.results, strict=True):
                gathered.append(name)
        for name, gathered in zip(self.node.output, found, strict=True):
            yield replacement_node(self.node, "SequenceConstruct", gathered, [name])

    def _should_keep(self, count: int) -> bool:
        """True if a loop of `count` iterations would be unrolled into more than
        `MAX_UNROLLED_NODES` nodes, and is short enough to be kept as one operator.
        """
        return count * (self.size - 1) > MAX_UNROLLED_NODES and count <= MAX_KEPT_ITERATIONS

    def _iteration_counts(self, scanned: Iterable[str], axes: Iterable[int]) -> set[int]:
        """Return the distinct sizes of the scan inputs `scanned` along their scan axes. Returns an
        empty set if the shape of a scan input is unknown or lacks the axis.
        """
        found = set()
        for name, axis in zip(scanned, axes, strict=True):
            kind = self.reader.type_of(name)
            found.add(
                kind.shape[axis]
                if kind is not None and -len(kind.shape) <= axis < len(kind.shape)
                else -1
            )
        return found if min(found) >= 0 else set()

    def _keep_as_operator(
        self,
        count: int,
        carried: list[str],
        scanned: list[tuple[str, int, bool]],
        gathers: list[tuple[int, bool]],
    ) -> list[onnx.NodeProto] | None:
        """Add the loop to the graph as one operator of `count` iterations, and return the nodes
        that follow the operator. Return None if that is not possible; `self.unkept_reason` then
        states the reason, unless the numbers of inputs and outputs of the body are wrong.

        `carried` lists the initial states, `scanned` (name, axis, backwards) of each scan input,
        and `gathers` (axis, backwards) of each scan output. States that no iteration changes are
        read from outside of the loop. A sequence becomes a scan output if each iteration appends a
        tensor.
        """
        counted = 2 * (self.node.op_type == "Loop")
        inputs, results = (
            [each.name for each in side] for side in (self.body.input, self.body.output)
        )
        if (
            len(inputs) != counted + len(carried) + len(scanned)
            or len(results) != len(self.node.output) + counted // 2
        ):
            # The numbers of inputs or results of the body do not match the loop. The caller then
            # unrolls the loop, and `unroll_iteration` raises the error.
            return None
        copies = {name: f"{self.title}/run/{name}" for name in self.own}
        nodes = list(self.nodes)
        ends = results[: counted // 2]
        outward = results[counted // 2 :]
        outputs = self.node.output
        same = {each.output[0]: each.input[0] for each in nodes if each.op_type == "Identity"}
        changing = []
        behind: list[onnx.NodeProto] = []
        for operand, name, result, output in zip(
            carried, inputs[counted:], outward, outputs, strict=False
        ):
            source = result
            while source in same:
                source = same[source]
            if source == name:
                copies[name] = operand
                behind += (
                    [replacement_node(self.node, "Identity", [operand], [output])] if output else []
                )
            else:
                changing.append((operand, name, result, output))
        states = list[LoopState]()
        lists = list[str]()
        gathered = list[ScanOutput]()
        for result, output, way in zip(
            outward[len(carried) :], outputs[len(carried) :], gathers, strict=True
        ):
            gathered += [ScanOutput(copies.get(result, result), output, *way)] if output else []
        for operand, name, result, output in changing:
            if operand in self.reader.sequences:
                added = self._find_append(nodes, name, result)
                if added is None or self.reader.sequences[operand]:
                    self.unkept_reason = (
                        f"{name!r} is a sequence, and iterations do more than append a tensor to it"
                    )
                    return None
                nodes.remove(added)
                lists += [output] if output else []
                tensor = added.input[1]
                gathered += (
                    [ScanOutput(copies.get(tensor, tensor), f"{output}/stack", 0, False)]
                    if output
                    else []
                )
            else:
                states.append(LoopState(operand, copies[name], copies.get(result, result), output))
        slices = zip(scanned, inputs[counted + len(carried) :], strict=True)
        number, going = (
            (copies[name] for name in inputs[:counted])
            if counted
            else (f"{self.title}/run/number", "")
        )
        runs = KeptLoop(
            title=self.title,
            name=self.node.name,
            count=count,
            nodes=[
                *([boolean_constant(self.node, going, True)] if going else []),
                *(_copy_with_names(each, copies) for each in nodes),
            ],
            number=number,
            states=tuple(states),
            scanned=tuple(ScanInput(*each, copies[name]) for each, name in slices),
            gathered=tuple(gathered),
            ends=tuple(copies.get(name, name) for name in ends),
        )
        self.unkept_reason = self.reader.keep_loop(runs)
        if self.unkept_reason:
            return None
        for name in lists:
            behind += self.reader.sequences.record_stacked(
                self.node, name, self.reader.readers(name)
            )
        return behind

    @staticmethod
    def _find_append(nodes: list[onnx.NodeProto], name: str, result: str) -> onnx.NodeProto | None:
        """Return the node that appends a tensor to the sequence `name` and writes the sequence
        `result`. Returns None if there is no such node, or if another node of the body reads either
        sequence.
        """
        read = Counter(each for node in nodes for each in read_names(node))
        found = [
            each for each in nodes if each.op_type == "SequenceInsert" and each.output[0] == result
        ]
        is_plain = bool(found) and found[0].input[0] == name and len(found[0].input) == 2
        return found[0] if is_plain and read[name] == 1 and not read[result] else None

    def _stack_scan_outputs(
        self, names: list[str], stacked: list[list[str]], axes: list[int]
    ) -> Iterator[onnx.NodeProto]:
        """Yield the nodes that write the scan outputs `names`. `stacked` contains for each output
        the names of the values of all iterations, which are stacked along a new axis, given in
        `axes`.
        """
        types = self.body.output[len(self.body.output) - len(names) :]
        for name, found, axis, info in zip(names, stacked, axes, types, strict=True):
            if name and not found:
                yield from self._empty_scan_output(name, info, axis)
            elif name:
                yield replacement_node(self.node, "SequenceConstruct", found, [f"{name}/stack"])
                yield replacement_node(
                    self.node,
                    "ConcatFromSequence",
                    [f"{name}/stack"],
                    [name],
                    axis=axis,
                    new_axis=1,
                )

    def _empty_scan_output(
        self, name: str, info: onnx.ValueInfoProto, axis: int
    ) -> list[onnx.NodeProto]:
        """Return the nodes that write scan output `name` of a loop without iterations. Its size is
        0 along `axis`; the body must declare its other dimensions in `info`. Raises ModelError if
        it does not.
        """
        kind = info.type.tensor_type
        shape = [each.dim_value if each.HasField("dim_value") else -1 for each in kind.shape.dim]
        if not kind.HasField("shape") or min(shape, default=0) < 0:
            raise ModelError(
                "the loop has no iterations, and the body declares no static shape for scan "
                f"output {name!r}",
                where=self.where,
            )
        shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, 0)
        return empty_tensor_nodes(self.node, name, kind.elem_type, shape)

    def _known_integer(self, name: str) -> int | None:
        """Return the integer that a value of one element holds; None if its data are unknown or
        have several elements.
        """
        array = self.reader.data(name)
        return None if array is None or array.size != 1 else int(array.reshape(-1)[0])


def _scan_attribute(stated: Mapping[str, Any], name: str, count: int) -> list[int]:
    """Return attribute `name` of a Scan, a list of `count` integers; zeros if it is absent.
    `stated` contains the node's attributes. Raises ModelError for a list of another length.
    """
    found = stated.get(name) or [0] * count
    if len(found) != count:
        raise ModelError(
            f"attribute {name!r} of Scan has {len(found)} {plural(len(found), 'value')}, "
            f"expected {count}"
        )
    return list(found)


def _copy_with_names(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """Return a copy of a node, including its bodies, in which `names` replaces the names of
    values.
    """
    copy = type(node)()
    copy.CopyFrom(node)
    for each in nodes_within([copy]):
        _rename_values(each, names)
        for graph in bodies_of(each):
            for value in itertools.chain(graph.input, graph.output):
                value.name = names.get(value.name, value.name)
    return copy
