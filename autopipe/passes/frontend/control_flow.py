"""If, Loop, Scan and SequenceMap, resolved while a file is read: branches that are taken, bodies
repeated as they run.

That takes conditions and numbers of iterations that are known once dimensions are bound. A branch
that depends on data is computed beside the other, and one of the two results chosen; a Loop that
may end early is computed to the end that is known, and what it would no longer do is undone. A body
that would become too many nodes stays one, of an operator that runs it.
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
from autopipe.passes.frontend.elements import made_node
from autopipe.passes.frontend.protobuf_scan import CONTROL_OPERATORS, DEEPEST_BODY, nested
from autopipe.passes.frontend.sequences import empty, truth

if TYPE_CHECKING:
    import onnx

    from autopipe.ir.graph import FileSlice, Value, VarintSlice
    from autopipe.passes.frontend.sequences import Sequences

MOST_CHOSEN = 512
"""Nodes of both branches of an If whose condition depends on data: both are computed."""

_SCAN_OF_ONE = 9
"""The opset since which a Scan knows nothing of samples."""

MOST_REPEATED = 2000
"""Nodes that the runs of a body may become before it stays one body."""

MOST_RUNS = 1 << 16
"""Runs of such a body: a number in a file can spell any."""

MOST_UNDONE = 1024
"""Iterations of a Loop whose end depends on data: all are computed."""


def nodes_within(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes and those of the graphs that they hold."""
    for node in nodes:
        yield node
        for graph in bodies_of(node):
            yield from nodes_within(graph.node)


def bodies_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        yield from (attribute.g,) if attribute.HasField("g") else ()
        yield from attribute.graphs


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node reads, those that its bodies read among them, which may be the bodies'
    own.
    """
    yield from (name for name in node.input if name)
    for graph in bodies_of(node):
        yield from (each.name for each in graph.output)
        for inner in graph.node:
            yield from reads(inner)


def _written(graph: onnx.GraphProto, deep: bool) -> Iterator[str]:
    """The names that a body defines, with `deep` those that the bodies in it define, too."""
    yield from (each.name for each in itertools.chain(graph.input, graph.initializer))
    for node in graph.node:
        yield from filter(None, node.output)
        if deep:
            for inner in bodies_of(node):
                yield from _written(inner, deep)


def hoist(graph: onnx.GraphProto, slices: dict[str, FileSlice | VarintSlice]) -> None:
    """Give each value of a body a name that is its own in the whole file, and move weights and
    constants out of bodies.

    Constants are put behind the nodes of `graph`, whose positions stay. `slices` holds where
    numbers lie in the file, for tensors of bodies under `nested` names; it gets their new ones.
    Raises ModelError where bodies lie too deep.
    """
    if any(node.op_type in CONTROL_OPERATORS for node in graph.node):
        _Hoist(graph, slices, set(_written(graph, deep=False))).run()


@dataclass(slots=True)
class _Hoist:
    top: onnx.GraphProto
    slices: dict[str, FileSlice | VarintSlice]
    taken: set[str]

    def run(self) -> None:
        numbers = itertools.count()
        counts = itertools.count(1)

        def body(graph: onnx.GraphProto, outside: Mapping[str, str], depth: int) -> None:
            if depth > DEEPEST_BODY:
                raise ModelError(
                    f"more than {DEEPEST_BODY} bodies of control flow lie in one another"
                )
            if graph.sparse_initializer:
                raise ModelError("sparse weights are not supported")
            number = next(numbers)
            names = dict(outside)
            for name in dict.fromkeys(_written(graph, deep=False)):
                own = name
                while own in self.taken:
                    own = f"{name}/{next(counts)}"
                self.taken.add(own)
                names[name] = own
                if (place := self.slices.pop(nested(number, name), None)) is not None:
                    self.slices[own] = place
            del graph.value_info[:]
            for value in itertools.chain(graph.input, graph.output, graph.initializer):
                value.name = names.get(value.name, value.name)
            self.top.initializer.extend(graph.initializer)
            del graph.initializer[:]
            nodes = list(graph.node)
            del graph.node[:]
            for node in nodes:
                _rename(node, names)
                visit(node, names, depth)
                is_constant = node.op_type == "Constant" and node.domain in ("", "ai.onnx")
                (self.top if is_constant else graph).node.append(node)

        def visit(node: onnx.NodeProto, names: Mapping[str, str], depth: int) -> None:
            if node.op_type in CONTROL_OPERATORS:
                for attribute in node.attribute:
                    if attribute.HasField("g"):
                        body(attribute.g, names, depth + 1)

        for node in list(self.top.node):
            visit(node, {}, 0)


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]


@dataclass(frozen=True, slots=True)
class Known:
    """The reader's knowledge of the values so far; names may be other names of values."""

    numbers: Callable[[str], np.ndarray | None]
    kind: Callable[[str], Value | None]
    sequences: Sequences
    opset: int
    order: Callable[[onnx.GraphProto], list[onnx.NodeProto]]
    """The nodes of a body in topological order."""
    takes: Callable[[int], bool]
    """Counts nodes of bodies; False where they become too many."""
    keeps: Callable[[Runs], str]
    """Adds the operator that runs a body; where it cannot, the reason is what it gives."""
    readers: Callable[[str], list[str]]
    """The operators in the file that read a value."""


@dataclass(frozen=True, slots=True)
class Carried:
    """A state of a body: what it is at first, its names before and after a run, and what it is at
    last.
    """

    operand: str
    name: str
    result: str
    output: str


@dataclass(frozen=True, slots=True)
class Scanned:
    """A value of which each run has a slice along an axis, called `name`."""

    operand: str
    axis: int
    backwards: bool
    name: str


@dataclass(frozen=True, slots=True)
class Gathered:
    """A result of every run: all of them become one value along a new axis."""

    result: str
    output: str
    axis: int
    backwards: bool


@dataclass(frozen=True, slots=True)
class Runs:
    """A body that runs `count` times; its nodes have names that stand for the values of any run."""

    title: str
    name: str
    count: int
    nodes: list[onnx.NodeProto]
    number: str
    """Which run it is."""
    states: tuple[Carried, ...]
    scanned: tuple[Scanned, ...]
    gathered: tuple[Gathered, ...]
    ends: tuple[str, ...]
    """The values that have to be true after every run."""


def resolved(
    node: onnx.NodeProto, operands: tuple[str, ...], known: Known
) -> Iterator[onnx.NodeProto]:
    """The nodes that an If, Loop, Scan or SequenceMap comes to, each to be read before the next is
    asked for.

    Raises ModelError, naming the node, where control flow depends on data in a way that cannot be
    computed for all.
    """
    where = f"{node.op_type} {node.name!r}"
    bodies = {each.name: each.g for each in node.attribute if each.HasField("g")}
    needed = ("then_branch", "else_branch") if node.op_type == "If" else ("body",)
    if any(name not in bodies for name in needed) or not node.output:
        raise ModelError(f"it has no {' or '.join(needed)}", where=where)
    if node.op_type == "If":
        return _if(node, operands[0], [bodies[name] for name in needed], known, where)
    repeat = _Repetition(node, bodies["body"], known, where)
    return {"Loop": repeat.loop, "Scan": repeat.scan, "SequenceMap": repeat.map}[node.op_type](
        operands
    )


def _if(
    node: onnx.NodeProto, condition: str, branches: list[onnx.GraphProto], known: Known, where: str
) -> Iterator[onnx.NodeProto]:
    for branch in branches:
        if len(branch.output) != len(node.output) or branch.input:
            raise ModelError("its branches do not give what it writes", where=where)
    numbers = known.numbers(condition)
    if numbers is not None:
        taken = branches[0 if numbers.all() else 1]
        yield from known.order(taken)
        for name, result in zip(node.output, taken.output, strict=True):
            yield made_node(node, "Identity", [result.name], [name])
        return
    if sum(1 for branch in branches for _ in nodes_within(branch.node)) > MOST_CHOSEN:
        raise ModelError(
            (
                f"it depends on data, and its branches have more than {MOST_CHOSEN} nodes, of "
                "which "
                "both would be computed"
            ),
            hint=(
                "export the model with one of them, or give the condition with --set "
                "model.inputs.NAME=true"
            ),
            where=where,
        )
    for branch in branches:
        yield from known.order(branch)
    for name, first, second in zip(
        node.output, branches[0].output, branches[1].output, strict=True
    ):
        yield from _chosen(node, condition, first.name, second.name, name, known, where)


def _chosen(
    node: onnx.NodeProto,
    condition: str,
    first: str,
    second: str,
    result: str,
    known: Known,
    where: str,
) -> Iterator[onnx.NodeProto]:
    """One of two values of one type, or sequences of them, by a condition that is known at run time
    alone.
    """
    ours = known.sequences.get(first)
    others = known.sequences.get(second)
    if ours is not None and others is not None and len(ours) == len(others):
        names = [f"{result}/{number}" for number in range(len(ours))]
        for pair in zip(ours, others, names, strict=True):
            yield from _chosen(node, condition, *pair, known, where)
        yield made_node(node, "SequenceConstruct", names, [result])
        return
    kinds = [known.kind(each) for each in (first, second)]
    asked = known.kind(condition)
    if None in kinds or asked is None:
        raise ModelError("it depends on data which sequence it gives", where=where)
    if len({(each.dtype, each.shape) for each in kinds if each is not None}) > 1:
        shapes = " or ".join(
            f"{each.dtype}{list(each.shape)}" for each in kinds if each is not None
        )
        raise ModelError(f"it depends on data whether {result!r} is {shapes}", where=where)
    one = known.numbers(first)
    other = known.numbers(second)
    if one is not None and other is not None and np.array_equal(one, other):
        yield made_node(node, "Identity", [first], [result])
        return
    if asked.shape:
        yield made_node(node, "Constant", [], [f"{result}/scalar"], value_ints=[])
        yield made_node(node, "Reshape", [condition, f"{result}/scalar"], [f"{result}/condition"])
        condition = f"{result}/condition"
    if kinds[0] is None or kinds[0].dtype is not DType.BOOL:
        yield made_node(node, "Where", [condition, first, second], [result])
        return
    parts = [f"{result}/{each}" for each in ("not", "first", "second")]
    yield made_node(node, "Not", [condition], parts[:1])
    yield made_node(node, "And", [condition, first], parts[1:2])
    yield made_node(node, "And", [parts[0], second], parts[2:])
    yield made_node(node, "Or", parts[1:], [result])


class _Repetition:
    """A body that is run again and again: values of each run have the run's number before their
    names.
    """

    def __init__(
        self, node: onnx.NodeProto, body: onnx.GraphProto, known: Known, where: str
    ) -> None:
        self.node = node
        self.body = body
        self.known = known
        self.where = where
        self.title = next(filter(None, node.output))
        self.nodes = known.order(body)
        self.size = sum(1 for _ in nodes_within(self.nodes)) + 1
        self.own = list(_written(body, deep=True))
        self.runs = 0
        self.kept_apart = ""
        """The reason why the body cannot stay one."""

    def run(self, inputs: list[str]) -> Iterator[onnx.NodeProto]:
        """The body's nodes on values of these names; `results` has what they write."""
        if not self.known.takes(self.size):
            raise ModelError(
                f"after {self.runs} times its body of {self.size - 1} "
                f"{plural(self.size - 1, 'node')}, the file has become too many nodes",
                hint=self.kept_apart and f"it cannot run as a loop: {self.kept_apart}",
                where=self.where,
            )
        if len(inputs) != len(self.body.input):
            raise ModelError(
                (
                    f"its body takes {len(self.body.input)} "
                    f"{plural(len(self.body.input), 'value')}, not {len(inputs)}"
                ),
                where=self.where,
            )
        if len(self.body.output) != len(self.node.output) + (self.node.op_type == "Loop"):
            raise ModelError("its body does not give what it writes", where=self.where)
        names = {name: f"{self.title}/{self.runs}/{name}" for name in self.own}
        names.update(zip((each.name for each in self.body.input), inputs, strict=True))
        for each in self.nodes:
            yield _copied(each, names)
        self.results = [names.get(each.name, each.name) for each in self.body.output]
        self.runs += 1

    def loop(self, operands: tuple[str, ...]) -> Iterator[onnx.NodeProto]:
        most, condition, *carried = (*operands, "", "")[: max(len(operands), 2)]
        stacked: list[list[str]] = [[] for _ in self.node.output[len(carried) :]]
        limit = self._number(most) if most else None
        if most and limit is None:
            raise self._unbounded("how often its body runs depends on data")
        alive = ""
        inner = carried
        ends = condition
        going = self._number(condition) if condition else 1
        if limit is not None and going and self._is_long(limit):
            kept = self._kept(limit, carried, [], [(0, False)] * len(stacked))
            if kept is not None:
                yield from kept
                return
        while going != 0 and (limit is None or self.runs < limit):
            if going is None:
                if stacked or self.runs >= MOST_UNDONE:
                    raise self._unbounded(
                        "when it ends depends on data, and nothing bounds that or what it gathers"
                    )
                last = alive
                alive = f"{self.title}/{self.runs}/alive"
                yield made_node(
                    self.node, *(("And", [last, ends]) if last else ("Identity", [ends])), [alive]
                )
            number, still = (f"{self.title}/{self.runs}/{each}" for each in ("number", "going"))
            yield made_node(self.node, "Constant", [], [number], value_int=self.runs)
            yield truth(self.node, still, True)
            yield from self.run([number, still, *inner])
            ends, *results = self.results
            inner = results[: len(carried)]
            results = results[len(carried) :]
            old = carried
            carried = [f"{alive}/{place}" for place in range(len(inner))] if alive else inner
            if alive:
                for names in zip(inner, old, carried, strict=True):
                    yield from _chosen(self.node, alive, *names, self.known, self.where)
                # A counter stays one: what it would be after the end is never given.
                pairs = zip(inner, carried, strict=True)
                inner = [
                    new if self.known.numbers(new) is not None else mixed for new, mixed in pairs
                ]
            for found, name in zip(stacked, results, strict=True):
                found.append(name)
            going = self._number(ends)
        yield from self._handed_on(carried)
        yield from self._stacks(list(self.node.output[len(carried) :]), stacked, [0] * len(stacked))

    def _unbounded(self, reason: str) -> ModelError:
        return ModelError(
            reason, hint="export it with a fixed number, or a condition that ends", where=self.where
        )

    def _handed_on(self, carried: list[str]) -> Iterator[onnx.NodeProto]:
        for name, result in zip(self.node.output, carried, strict=False):
            if name:
                yield made_node(self.node, "Identity", [result], [name])

    def scan(self, operands: tuple[str, ...]) -> Iterator[onnx.NodeProto]:
        stated = {each.name: each.i or list(each.ints) for each in self.node.attribute}
        if self.known.opset < _SCAN_OF_ONE:
            hint = "write it as the Scan of opset 9, whose body takes all samples"
            raise ModelError(
                "the Scan of opset 8, which runs for each sample alone, is not supported",
                hint,
                self.where,
            )
        count = stated.get("num_scan_inputs", 0)
        if not isinstance(count, int) or not 0 < count <= len(operands):
            raise ModelError(f"num_scan_inputs is {count}", where=self.where)
        carried = list(operands[:-count])
        scanned = operands[-count:]
        gathered = list(self.node.output[len(carried) :])
        steps = []
        axes, backward = (
            _listed(stated, f"scan_input_{each}", count) for each in ("axes", "directions")
        )
        extents = self._extents(scanned, axes)
        if len(extents) == 1 and self._is_long(next(iter(extents))):
            ways = (
                _listed(stated, f"scan_output_{each}", len(gathered))
                for each in ("axes", "directions")
            )
            slices = [
                (name, axis, bool(back))
                for name, axis, back in zip(scanned, axes, backward, strict=True)
            ]
            outward = [(axis, bool(back)) for axis, back in zip(*ways, strict=True)]
            if (kept := self._kept(next(iter(extents)), carried, slices, outward)) is not None:
                yield from kept
                return
        for place, (name, axis, back) in enumerate(zip(scanned, axes, backward, strict=True)):
            parts = f"{self.title}/steps{place}"
            yield made_node(self.node, "SplitToSequence", [name], [parts], axis=axis, keepdims=0)
            rows = self.known.sequences[parts]
            steps.append(rows[::-1] if back else rows)
        if len({len(each) for each in steps}) > 1:
            raise ModelError(
                "the values that it goes through have different extents", where=self.where
            )
        stacked: list[list[str]] = [[] for _ in gathered]
        for each in zip(*steps, strict=True):
            yield from self.run([*carried, *each])
            carried = self.results[: len(carried)]
            for found, name in zip(stacked, self.results[len(carried) :], strict=True):
                found.append(name)
        yield from self._handed_on(carried)
        backward = _listed(stated, "scan_output_directions", len(gathered))
        for found, back in zip(stacked, backward, strict=True):
            found[:] = found[::-1] if back else found
        yield from self._stacks(
            gathered, stacked, _listed(stated, "scan_output_axes", len(gathered))
        )

    def map(self, operands: tuple[str, ...]) -> Iterator[onnx.NodeProto]:
        given = [self.known.sequences.get(name) for name in operands]
        counts = {len(each) for each in given if each is not None}
        if not given or given[0] is None or len(counts) > 1:
            raise ModelError(
                "it goes through no sequences, or through such of different lengths",
                where=self.where,
            )
        found: list[list[str]] = [[] for _ in self.node.output]
        for number in range(len(given[0])):
            yield from self.run(
                [
                    name if each is None else each[number]
                    for name, each in zip(operands, given, strict=True)
                ]
            )
            for gathered, name in zip(found, self.results, strict=True):
                gathered.append(name)
        for name, gathered in zip(self.node.output, found, strict=True):
            yield made_node(self.node, "SequenceConstruct", gathered, [name])

    def _is_long(self, count: int) -> bool:
        return count * (self.size - 1) > MOST_REPEATED and count <= MOST_RUNS

    def _extents(self, scanned: Iterable[str], axes: Iterable[int]) -> set[int]:
        """How often a Scan runs by each value that it goes through; none where a shape is not known
        or has no such axis.
        """
        found = set()
        for name, axis in zip(scanned, axes, strict=True):
            kind = self.known.kind(name)
            found.add(
                kind.shape[axis]
                if kind is not None and -len(kind.shape) <= axis < len(kind.shape)
                else -1
            )
        return found if min(found) >= 0 else set()

    def _kept(
        self,
        count: int,
        carried: list[str],
        scanned: list[tuple[str, int, bool]],
        gathers: list[tuple[int, bool]],
    ) -> list[onnx.NodeProto] | None:
        """The nodes behind an operator that runs the body `count` times; None where there can be no
        such operator.

        What it carries unchanged is the same in all runs; a list to which each run adds a tensor is
        gathered.
        """
        counted = 2 * (self.node.op_type == "Loop")
        inputs, results = (
            [each.name for each in side] for side in (self.body.input, self.body.output)
        )
        if (
            len(inputs) != counted + len(carried) + len(scanned)
            or len(results) != len(self.node.output) + counted // 2
        ):
            return None  # `run` says so.
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
                behind += [made_node(self.node, "Identity", [operand], [output])] if output else []
            else:
                changing.append((operand, name, result, output))
        states = list[Carried]()
        lists = list[str]()
        gathered = list[Gathered]()
        for result, output, way in zip(
            outward[len(carried) :], outputs[len(carried) :], gathers, strict=True
        ):
            gathered += [Gathered(copies.get(result, result), output, *way)] if output else []
        for operand, name, result, output in changing:
            if operand in self.known.sequences:
                added = self._added(nodes, name, result)
                if added is None or self.known.sequences[operand]:
                    self.kept_apart = (
                        f"{name!r} is a sequence, to which a run does more than to add a tensor"
                    )
                    return None
                nodes.remove(added)
                lists += [output] if output else []
                tensor = added.input[1]
                gathered += (
                    [Gathered(copies.get(tensor, tensor), f"{output}/stack", 0, False)]
                    if output
                    else []
                )
            else:
                states.append(Carried(operand, copies[name], copies.get(result, result), output))
        slices = zip(scanned, inputs[counted + len(carried) :], strict=True)
        number, going = (
            (copies[name] for name in inputs[:counted])
            if counted
            else (f"{self.title}/run/number", "")
        )
        runs = Runs(
            title=self.title,
            name=self.node.name,
            count=count,
            nodes=[
                *([truth(self.node, going, True)] if going else []),
                *(_copied(each, copies) for each in nodes),
            ],
            number=number,
            states=tuple(states),
            scanned=tuple(Scanned(*each, copies[name]) for each, name in slices),
            gathered=tuple(gathered),
            ends=tuple(copies.get(name, name) for name in ends),
        )
        self.kept_apart = self.known.keeps(runs)
        if self.kept_apart:
            return None
        for name in lists:
            behind += self.known.sequences.stacked(self.node, name, self.known.readers(name))
        return behind

    @staticmethod
    def _added(nodes: list[onnx.NodeProto], name: str, result: str) -> onnx.NodeProto | None:
        """The node that adds a tensor to a sequence, if that is all that a body does with it."""
        read = Counter(each for node in nodes for each in reads(node))
        found = [
            each for each in nodes if each.op_type == "SequenceInsert" and each.output[0] == result
        ]
        is_plain = bool(found) and found[0].input[0] == name and len(found[0].input) == 2
        return found[0] if is_plain and read[name] == 1 and not read[result] else None

    def _stacks(
        self, names: list[str], stacked: list[list[str]], axes: list[int]
    ) -> Iterator[onnx.NodeProto]:
        """Of each of these values, all that the runs have written, along a new axis."""
        types = self.body.output[len(self.body.output) - len(names) :]
        for name, found, axis, info in zip(names, stacked, axes, types, strict=True):
            if name and not found:
                yield from self._empty(name, info, axis)
            elif name:
                yield made_node(self.node, "SequenceConstruct", found, [f"{name}/stack"])
                yield made_node(
                    self.node,
                    "ConcatFromSequence",
                    [f"{name}/stack"],
                    [name],
                    axis=axis,
                    new_axis=1,
                )

    def _empty(self, name: str, info: onnx.ValueInfoProto, axis: int) -> list[onnx.NodeProto]:
        """The result of a body that never runs, whose other extents are those that it states."""
        kind = info.type.tensor_type
        shape = [each.dim_value if each.HasField("dim_value") else -1 for each in kind.shape.dim]
        if not kind.HasField("shape") or min(shape, default=0) < 0:
            raise ModelError(
                f"its body never runs, and states no shape for what {name!r} gathers",
                where=self.where,
            )
        shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, 0)
        return empty(self.node, name, kind.elem_type, shape)

    def _number(self, name: str) -> int | None:
        array = self.known.numbers(name)
        return None if array is None or array.size != 1 else int(array.reshape(-1)[0])


def _listed(stated: Mapping[str, Any], name: str, count: int) -> list[int]:
    """Numbers of an attribute of Scan, zeros where it is absent."""
    found = stated.get(name) or [0] * count
    if len(found) != count:
        raise ModelError(
            f"Scan's {name} has {len(found)} {plural(len(found), 'number')}, not {count}"
        )
    return list(found)


def _copied(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """The node with other names in it and in its bodies."""
    copy = type(node)()
    copy.CopyFrom(node)
    for each in nodes_within([copy]):
        _rename(each, names)
        for graph in bodies_of(each):
            for value in itertools.chain(graph.input, graph.output):
                value.name = names.get(value.name, value.name)
    return copy
