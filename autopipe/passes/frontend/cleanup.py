"""Graph to graph, meaning kept: aliases of outputs, equal computations, what nothing reads. All
linear.

Besides: gathers that spell a broadcast, as attention masks are exported (`mask[batch_index,
key_index]`), become Reshape and Expand; a model exported in training mode at inference; and the
branches that may run side by side.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.ir.graph import Constant, DType, Graph, Node, Value
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.elementwise import is_active
from autopipe.ir.ops.loop import body_of, operand_ports
from autopipe.ir.ops.normalization import trains
from autopipe.passes.frontend.inference import RANDOM, ConstantFolder
from autopipe.passes.frontend.uses import VIEWS

_LOOKS = 8
"""Operations on each index until it is known what a gather spells."""
GATHERS = frozenset({"Gather", "GatherND"})


STOP_GRADIENT = "StopGradient"
"""Operator of domain `autopipe` whose result is its operand, with no gradient."""
TAKEN_APART = frozenset({"Unpack", "DequantizeLinear"})
"""Operators that make numbers of packed and quantised parameters."""


class Additions:
    """Values and constants that are added to a graph, under names that it has not."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._taken = set[str]()
        self.constants = list(graph.constants)
        self.values = list(graph.values)

    def free(self, name: str) -> str:
        while self._graph.has(name) or name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def value(self, name: str, dtype: DType, shape: tuple[int, ...]) -> str:
        """The name of a new value of this type."""
        self.values.append(Value(self.free(name), dtype, shape))
        return self.values[-1].name

    def shape(self, name: str, shape: tuple[int, ...]) -> str:
        """The name of a new constant that holds the shape that `name` is to have."""
        return self.constant(f"{name}_shape", np.asarray(shape, dtype=np.int64))

    def constant(self, name: str, array: np.ndarray) -> str:
        value = Value(self.free(name), DType(array.dtype.name), array.shape)
        self.constants.append(Constant(value, array))
        return value.name

    def graph(self, nodes: Iterable[Node]) -> Graph:
        """The graph with all of them, and with these nodes."""
        return dataclasses.replace(
            self._graph,
            nodes=tuple(nodes),
            constants=tuple(self.constants),
            values=tuple(self.values),
        )


def with_plain_gathers(graph: Graph) -> Graph:
    """Replace gathers that read all elements in order, each for a block of results, by Reshape and
    Expand.
    """
    if not any(node.op in GATHERS and not node.domain for node in graph.nodes):
        return graph
    known = ConstantFolder(graph)
    added = Additions(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        apart = _apart(graph, known, node) if node.op in GATHERS and not node.domain else None
        if apart is None:
            nodes.append(node)
            continue
        result = graph.type_of(node.outputs[0])
        source = node.inputs[0]
        operator = "Reshape"
        if apart != result.shape:
            middle = added.value(f"{result.name}_apart", result.dtype, apart)
            operands = (source, added.shape(middle, apart))
            nodes.append(Node(added.free(f"{node.name}/apart"), "Reshape", operands, (middle,)))
            source = middle
            operator = "Expand"
        nodes.append(
            Node(
                node.name, operator, (source, added.shape(result.name, result.shape)), node.outputs
            )
        )
    return added.graph(nodes)


def with_places_from_front(graph: Graph) -> Graph:
    """Count from the front where a Gather's indices are differences, such as widths of boxes: ONNX
    counts negative ones from the end, and torch's embedding refuses them.
    """
    found = [
        node.op == "Gather" and not node.domain and _is_difference(graph, node.inputs[1])
        for node in graph.nodes
    ]
    if not any(found):
        return graph
    added = Additions(graph)
    nodes = list[Node]()
    for node, counts_back in zip(graph.nodes, found, strict=True):
        if counts_back:
            indices = graph.type_of(node.inputs[1])
            data = graph.type_of(node.inputs[0])
            numbers = (0, data.shape[node.integer("axis") % len(data.shape)])
            zero, extent = (
                added.constant(f"{indices.name}_{each}", np.asarray(each, indices.dtype.value))
                for each in numbers
            )
            signs, moved, places = (
                added.value(f"{indices.name}_{title}", dtype, indices.shape)
                for title, dtype in (
                    ("negative", DType.BOOL),
                    ("moved", indices.dtype),
                    ("places", indices.dtype),
                )
            )
            nodes.append(
                Node(added.free(f"{node.name}/negative"), "Less", (indices.name, zero), (signs,))
            )
            nodes.append(
                Node(added.free(f"{node.name}/moved"), "Add", (indices.name, extent), (moved,))
            )
            nodes.append(
                Node(
                    added.free(f"{node.name}/places"),
                    "Where",
                    (signs, moved, indices.name),
                    (places,),
                )
            )
            node = dataclasses.replace(node, inputs=(node.inputs[0], places))
        nodes.append(node)
    return added.graph(nodes)


def _is_difference(graph: Graph, name: str) -> bool:
    while (place := graph.producer(name)) is not None and not graph.nodes[place].domain:
        made = graph.nodes[place]
        if made.op not in VIEWS:
            return made.op in ("Neg", "Sub")
        name = made.inputs[0]
    return False


def _apart(graph: Graph, known: ConstantFolder, node: Node) -> tuple[int, ...] | None:
    """The shape under which the data expands to the result; None where the gather is no such thing.

    Parameters are left alone: their gathers are embeddings.
    """
    data = graph.type_of(node.inputs[0])
    result = graph.type_of(node.outputs[0])
    if graph.parameter(data.name) is not None or not data.elements:
        return None
    indices = known.array(node.inputs[1])
    if indices is None or not known.inference.operations.takes(_LOOKS * indices.size):
        return None
    found = _rows(node, data.shape, indices)
    if found is None:
        return None
    before, places, after = found
    if (*before, *places.shape, *after) != result.shape:
        return None
    if not result.elements:
        return (1,) * len(result.shape) if data.elements == 1 else None
    moving = _moving(places, data.elements // (math.prod(before) * math.prod(after)))
    return None if moving is None else (*before, *moving, *after)


def _moving(places: np.ndarray, rows: int) -> tuple[int, ...] | None:
    """The shape under which the numbers from 0 to `rows` in order expand to `places`, which are not
    empty.
    """
    if places.size < rows:
        return None
    # A dimension along which nothing changes is broadcast; the others must read all rows, in order.
    moving = tuple(
        extent if extent > 1 and (places.take(0, axis) != places.take(1, axis)).any() else 1
        for axis, extent in enumerate(places.shape)
    )
    if math.prod(moving) != rows:
        return None
    return (
        moving
        if np.array_equal(places, np.broadcast_to(np.arange(rows).reshape(moving), places.shape))
        else None
    )


def _rows(
    node: Node, shape: tuple[int, ...], indices: np.ndarray
) -> tuple[tuple[int, ...], np.ndarray, tuple[int, ...]] | None:
    """Which row each index reads, between the dimensions before and after the rows, which are read
    whole and in order.

    A row is what one index takes; rows are counted in row-major order. None where an index is out
    of range.
    """
    if node.op == "Gather":
        axis = node.integer("axis") % max(len(shape), 1)
        limits = shape[axis : axis + 1]
        places = indices[..., None]
    else:
        if node.integer("batch_dims") or not indices.size:
            return None
        axis = 0
        limits = shape[: indices.shape[-1]]
        places = indices
    if math.prod(limits) > max(
        places.size, 1
    ):  # Also where the numbers of rows would be too large for numpy.
        return None
    rows: np.ndarray | None = None
    for position, limit in enumerate(limits):
        column = places[..., position]
        if column.size and not -limit <= column.min() <= column.max() < limit:
            return None
        column = column % limit
        column *= math.prod(limits[position + 1 :])
        rows = column if rows is None else rows + column
    assert rows is not None
    return shape[:axis], rows, shape[axis + len(limits) :]


def with_late_weights(graph: Graph) -> Graph:
    """Weights become numbers where they are used: what only takes packed or quantised parameters
    apart stands right before its first reader. Files name all of it at their beginning, where it
    would be held at once.
    """
    held = (
        {each.value.name for each in graph.parameters}
        | {each.value.name for each in graph.constants}
        | {""}
    )
    waiting: dict[str, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        own = node.op in TAKEN_APART or not waiting.keys().isdisjoint(node.inputs)
        if (
            own
            and all(name in held or name in waiting for name in node.inputs)
            and len(node.outputs) == 1
        ):
            waiting[node.outputs[0]] = node
            continue
        nodes.extend(_taken(waiting, node.inputs))
        nodes.append(node)
    nodes.extend(_taken(waiting, graph.outputs))
    return with_nodes(graph, nodes) if tuple(nodes) != graph.nodes else graph


def _taken(waiting: dict[str, Node], names: Iterable[str]) -> list[Node]:
    """The nodes that make values, and those before them, in order; they wait no longer."""
    found: list[Node] = []
    stack = [name for name in names if name in waiting]
    while stack:
        node = waiting.get(stack[-1])
        before = [] if node is None else [name for name in node.inputs if name in waiting]
        if node is not None and not before:
            found.append(waiting.pop(stack[-1]))
        if node is None or not before:
            stack.pop()
        stack.extend(before)
    return found


def cleaned(graph: Graph) -> Graph:
    """The same function with fewer nodes; parameters that matter are kept as they are."""
    plain = with_places_from_front(with_plain_gathers(with_named_outputs(graph)))
    return with_late_weights(without_unread(without_repeats(merged_constants(plain))))


def with_nodes(graph: Graph, nodes: Iterable[Node]) -> Graph:
    """The graph with these nodes, which write values that it knows."""
    nodes = tuple(nodes)
    values = tuple(graph.type_of(name) for node in nodes for name in node.outputs if name)
    return dataclasses.replace(graph, nodes=nodes, values=values)


def _reading(node: Node, names: dict[str, str]) -> Node:
    """The node, reading `names[x]` wherever it read x."""
    if names.keys().isdisjoint(node.inputs):
        return node
    return dataclasses.replace(node, inputs=tuple(names.get(name, name) for name in node.inputs))


def with_named_outputs(graph: Graph) -> Graph:
    """Drop an Identity that only names an output, giving that name to the node that computes it."""
    names: dict[str, str] = {}
    kept: list[Node] = []
    results = frozenset(graph.outputs)
    for node in graph.nodes:
        source = node.inputs[0] if node.inputs else ""
        movable = (
            graph.producer(source) is not None and source not in results and source not in names
        )
        if node.op == "Identity" and not node.domain and node.outputs[0] in results and movable:
            names[source] = node.outputs[0]
        else:
            kept.append(node)
    if not names:
        return graph
    return with_nodes(
        graph,
        (
            dataclasses.replace(
                _reading(node, names), outputs=tuple(names.get(name, name) for name in node.outputs)
            )
            for node in kept
        ),
    )


def without_repeats(graph: Graph) -> Graph:
    """Keep one of several nodes that compute the same from the same."""
    first: dict[object, Node] = {}
    names: dict[str, str] = {}
    kept: list[Node] = []
    results = frozenset(graph.outputs)
    for node in graph.nodes:
        node = _reading(node, names)
        key = (node.domain, node.op, node.inputs, node.attributes, tuple(map(bool, node.outputs)))
        earlier = (
            first.setdefault(key, node) if node.op not in RANDOM and node.body is None else node
        )
        if earlier is node or not results.isdisjoint(node.outputs):
            kept.append(node)
        else:
            names.update(zip(node.outputs, earlier.outputs, strict=True))
    return with_nodes(graph, kept)


def merged_constants(graph: Graph) -> Graph:
    """Keep one of several equal constants. Parameters are never merged."""
    first: dict[object, str] = {}
    names: dict[str, str] = {}
    for constant in graph.constants:
        key = (constant.value.dtype, constant.value.shape, constant.array.tobytes())
        kept = first.setdefault(key, constant.value.name)
        if kept != constant.value.name:
            names[constant.value.name] = kept
    return dataclasses.replace(graph, nodes=tuple(_reading(node, names) for node in graph.nodes))


def without_unread(graph: Graph) -> Graph:
    """Drop nodes, parameters and constants on which no output depends."""
    needed = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            node = node if node.body is None else _read_results(node, needed)
            kept.append(node)
            needed.update(node.inputs)
            needed.discard("")  # An operand that is absent.
    return dataclasses.replace(
        with_nodes(graph, reversed(kept)),
        parameters=tuple(
            parameter for parameter in graph.parameters if parameter.value.name in needed
        ),
        constants=tuple(constant for constant in graph.constants if constant.value.name in needed),
    )


def _read_results(loop: Node, needed: set[str]) -> Node:
    """A loop without the states and results on which no other value depends."""
    body = body_of(loop)
    states = loop.integer("states")
    names = [value.name for value in body.inputs]
    kept = {place for place, name in enumerate(loop.outputs) if name in needed}
    while True:
        run = without_unread(
            dataclasses.replace(body, outputs=tuple(body.outputs[place] for place in sorted(kept)))
        )
        read = {*run.outputs, *(name for node in run.nodes for name in node.inputs)}
        if not (more := {place for place in range(states) if names[1 + place] in read} - kept):
            break
        kept |= more
    if len(kept) == len(body.outputs) and run.nodes == body.nodes:
        return dataclasses.replace(
            loop, outputs=tuple(name if name in needed else "" for name in loop.outputs)
        )
    read |= {names[0], *(names[1 + place] for place in kept if place < states)}
    operands = zip(operand_ports(loop), loop.inputs, strict=True)
    scans = [
        place
        for place, name in enumerate(names[1 + states :][: len(loop.integers("scan_axes"))])
        if name in read
    ]
    gathers = sorted(place - states for place in kept if place >= states)
    chosen = {"scan": scans, "gather": gathers}
    stated = dict(loop.attributes) | {"states": len(kept) - len(gathers)}
    for title, places in chosen.items():
        for key in (f"{title}_axes", f"{title}_directions"):
            stated[key] = tuple(loop.integers(key)[place] for place in places)
    return dataclasses.replace(
        loop,
        inputs=tuple(name for port, name in operands if port.name in read),
        outputs=tuple(
            name if name in needed else ""
            for place, name in enumerate(loop.outputs)
            if place in kept
        ),
        attributes=tuple(sorted(stated.items())),
        body=dataclasses.replace(
            run, inputs=tuple(value for value in run.inputs if value.name in read)
        ),
    )


HEAVY = 1e-3
"""Share of all operations from which a node counts when paths are compared."""
TRUNK = 0.05
"""A node is on the trunk where less than this share of all operations may run beside it."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A connected part of a graph beside which others may run."""

    first: str
    """Name of its first node."""
    nodes: int
    flops: float


def branches_of(graph: Graph, flops: Sequence[float]) -> tuple[Branch, ...]:
    """The largest set of branches that are independent of one another, in topological order; () for
    a chain.

    `flops` are the operations of each node. A branch is a connected part off the trunk with a share
    of at least `TRUNK` of all operations; heads of one attention, or its three projections, are
    less unless the model is small.
    """
    total = sum(flops)
    heavy = [index for index, count in enumerate(flops) if total and count >= HEAVY * total]
    if len(heavy) < 2:
        return ()
    before = _reached(graph, heavy)
    after = _reached(graph, heavy, backwards=True)
    weights = np.asarray([flops[index] for index in heavy])
    beside = weights.sum() - (before | after) @ weights
    positions = {index: position for position, index in enumerate(heavy)}
    found: list[tuple[Branch, list[int]]] = []
    for nodes in _parts(
        graph, [index for index in range(len(graph.nodes)) if beside[index] >= TRUNK * total]
    ):
        work = sum(flops[index] for index in nodes)
        inside = [positions[index] for index in nodes if index in positions]
        if work < TRUNK * total or not inside:
            continue
        pairs = [pair for _, others in found for pair in ((inside, others), (others, inside))]
        if not any(before[[heavy[each] for each in last]][:, first].any() for first, last in pairs):
            found.append((Branch(graph.nodes[nodes[0]].name, len(nodes), work), inside))
    return tuple(branch for branch, _ in found) if len(found) > 1 else ()


def _reached(graph: Graph, heavy: list[int], backwards: bool = False) -> np.ndarray:
    """[nodes, heavy nodes]: which heavy nodes lie before (or after) each node, itself included."""
    table = np.zeros((len(graph.nodes), len(heavy)), dtype=bool)
    table[heavy, np.arange(len(heavy))] = True
    edges = [
        (source, index) for index, sources in enumerate(graph.sources()) for _, source in sources
    ]
    for source, index in reversed(edges) if backwards else edges:
        if backwards:
            table[source] |= table[index]
        else:
            table[index] |= table[source]
    return table


def _parts(graph: Graph, nodes: list[int]) -> list[list[int]]:
    """Return the connected components of these nodes, each ascending, in order of their first
    nodes.

    By union and find with halved paths; scipy's function would take longer to import than `inspect`
    takes in all.
    """
    parents = {each: each for each in nodes}

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for each in nodes:
        for _, source in graph.sources()[each]:
            if source in parents:
                parents[root(source)] = root(each)
    parts: dict[int, list[int]] = {}
    for each in nodes:
        parts.setdefault(root(each), []).append(each)
    return list(parts.values())


def at_inference(graph: Graph) -> Graph:
    """The graph without Dropout, whose BatchNormalization reads running statistics; itself where it
    is so already.
    """
    return _without_batch_statistics(without_dropout(graph))


def without_dropout(graph: Graph) -> Graph:
    """The graph in which nothing is dropped; itself where nothing is."""
    names: dict[str, str] = {}
    kept: list[Node] = []
    for node in graph.nodes:
        if node.op != "Dropout" or node.domain or not is_active(signature_of(graph, node)):
            kept.append(node)
        elif any(_is_used(graph, name) for name in node.outputs[1:]):
            kept.append(
                dataclasses.replace(node, inputs=node.inputs[:2], attributes=(("is_test", 1),))
            )
        elif node.outputs[0] in graph.outputs:
            kept.append(Node(node.name, "Identity", node.inputs[:1], node.outputs[:1]))
        else:
            names[node.outputs[0]] = names.get(node.inputs[0], node.inputs[0])
    if tuple(kept) == graph.nodes:
        return graph
    return without_unread(with_nodes(graph, (_reading(node, names) for node in kept)))


def without_idle_stops(graph: Graph, trains: bool = True) -> Graph:
    """The graph without each StopGradient that stops none: no trained parameter is behind it, or
    nothing `trains`; nor a Where of a value and the same value stopped. The graph itself if it has
    no such node.
    """
    if not any(node.op == STOP_GRADIENT for node in graph.nodes):
        return graph
    # Values computed from trained parameters.
    computed = (
        {each.value.name for each in graph.parameters if each.trainable} if trains else set[str]()
    )
    names: dict[str, str] = {}
    kept: list[Node] = []
    for node in graph.nodes:
        if not computed.isdisjoint(node.inputs):
            computed.update(node.outputs)
        if node.op == STOP_GRADIENT and node.inputs[0] not in computed:
            same = node.inputs[0]
        elif node.op == "Where" and names and (chosen := _one_of_equals(graph, node, names)):
            same = chosen
        else:
            kept.append(node)
            continue
        if node.outputs[0] in graph.outputs:
            kept.append(Node(node.name, "Identity", (same,), node.outputs))
        else:
            names[node.outputs[0]] = names.get(same, same)
    if tuple(kept) == graph.nodes:
        return graph
    return without_unread(with_nodes(graph, (_reading(node, names) for node in kept)))


def _one_of_equals(graph: Graph, node: Node, names: Mapping[str, str]) -> str:
    """Return the value that a Where chooses from twice, with `names` read in other values' place;
    "" if the two differ or the Where repeats the value.
    """
    first, second = (names.get(each, each) for each in node.inputs[1:])
    is_same = first == second and graph.type_of(first).shape == graph.type_of(node.outputs[0]).shape
    return first if is_same else ""


def _without_batch_statistics(graph: Graph) -> Graph:
    kept: list[Node] = []
    for node in graph.nodes:
        is_plain = (
            node.op != "BatchNormalization" or node.domain or not trains(signature_of(graph, node))
        )
        if is_plain or any(_is_used(graph, name) for name in node.outputs[1:3]):
            kept.append(node)  # A graph that gives the new statistics is about them.
        else:
            settings = tuple(each for each in node.attributes if each[0] != "training_mode")
            kept.append(dataclasses.replace(node, outputs=node.outputs[:1], attributes=settings))
    return graph if tuple(kept) == graph.nodes else with_nodes(graph, kept)


def _is_used(graph: Graph, name: str) -> bool:
    return bool(name) and (name in graph.consumers() or name in graph.outputs)
