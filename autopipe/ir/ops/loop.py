"""The operator `autopipe.Loop`: an ONNX Loop or Scan as one node, whose body is a graph.

Inputs of the body, in order: the iteration number, the loop-carried states, one slice of each
scanned value, and the loop-invariant values. Outputs of the body: the states of the next iteration,
then the values of this iteration that the loop gathers.

Operands of the loop, in order: the initial states, the scanned values, the loop-invariant values,
and the constants of the body. Results: the final states, then the gathered values.

Attributes: `count` is the number of iterations and `states` the number of states. `scan_axes` and
`gather_axes` contain the axis along which a value is scanned or gathered. `scan_directions` and
`gather_directions` contain the direction: 1 is from the last slice to the first.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.graph import Graph, Node, Value
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.ops.operator import (
    OPERATORS,
    Operator,
    Signature,
    qualified_name,
    signature_of,
    space_from_words,
)
from autopipe.ir.space import AxisKind, Space

LOOP = "autopipe.Loop"


@dataclass(frozen=True, slots=True)
class LoopPort:
    """An operand or result of a loop: the name of the corresponding value in the body and, if each
    iteration has one slice, the axis of the slices and their direction (`backwards`: from the last
    slice to the first).
    """

    name: str
    axis: int | None = None
    """Axis of the operand or result that is sliced, one slice per iteration; None for a value
    without slices.
    """
    backwards: bool = False

    def places(self, rank: int) -> list[tuple[str, int] | None]:
        """Return, for each of the `rank` dimensions of the operand or result, the corresponding
        dimension (name, index) of the body's value; None for the axis of the slices.
        """
        inner = [(self.name, place) for place in range(rank - (self.axis is not None))]
        return [*inner] if self.axis is None else [*inner[: self.axis], None, *inner[self.axis :]]


def loop_body(node: Node) -> Graph:
    """Return the body of a loop node."""
    assert node.body is not None, f"{node.op} has no body"
    return node.body


def operand_ports(node: Node) -> tuple[LoopPort, ...]:
    """Return the ports of the loop's operands, in order."""
    body = loop_body(node)
    return _loop_ports(node, "scan", [*body.inputs[1:], *(each.value for each in body.constants)])


def result_ports(node: Node) -> tuple[LoopPort, ...]:
    """Return the ports of the loop's results, in order."""
    body = loop_body(node)
    return _loop_ports(node, "gather", [body.type_of(name) for name in body.outputs])


def _loop_ports(node: Node, title: str, values: list[Value]) -> tuple[LoopPort, ...]:
    """Return the ports of the operands (`title` "scan") or results (`title` "gather") of a loop.
    `values` are the corresponding values of the body.
    """
    states = node.integer("states")
    axes = node.integers(f"{title}_axes")
    names = [value.name for value in values]
    sliced = zip(names[states:], axes, node.integers(f"{title}_directions"), strict=False)
    return (
        *map(LoopPort, names[:states]),
        *(LoopPort(name, axis, bool(way)) for name, axis, way in sliced),
        *map(LoopPort, names[states + len(axes) :]),
    )


@dataclass(frozen=True, slots=True)
class SplittableLoopAxis:
    """An axis along which a loop can be split into independent loops, such as the batch. `extent`
    is its size.
    """

    name: str
    extent: int
    dimensions: dict[str, int]
    """For each value of the body that has the axis: the index of its dimension, by the name of the
    value.
    """
    nodes: dict[int, str]
    """For each node of the body that has the axis: the name of the axis in the node's iteration
    space, by the index of the node.
    """


BodyDimension = tuple[str, int]
"""A dimension of a value of the body: (name of the value, index of the dimension)."""


class _DimensionSets:
    """Disjoint sets (union-find) of dimensions of values and axes of nodes. Members of a set must
    be split together, so each set is a candidate for an axis of the loop.
    """

    def __init__(self) -> None:
        self.following: dict[BodyDimension, BodyDimension] = {}

    def first(self, place: BodyDimension) -> BodyDimension:
        """Return the representative of the set that contains `place`."""
        while (following := self.following.setdefault(place, place)) != place:
            place = following
        return place

    def join(self, one: BodyDimension, other: BodyDimension) -> None:
        """Merge the sets of two dimensions."""
        self.following[self.first(other)] = self.first(one)


@memoize(MAX_CACHED_GRAPHS)
def splittable_axes(node: Node) -> tuple[SplittableLoopAxis, ...]:
    """Return the axes along which a loop can be split into independent loops.

    The dimensions of the body's values and the axes of the nodes that index them form sets that
    must be split together. A set is an axis of the loop if all of the following hold:

    - each axis in it is parallel, and each dimension in it has an axis
    - it contains no inner axis of a dimension that merges several axes
    - it contains at most one dimension of each value and at most one axis of each node
    - its dimensions of the loop's operands and results have one common size, which is not 1
    - this size divides the sizes of all of its dimensions and axes
    """
    body = loop_body(node)
    spaces = _body_spaces(loop_body(node))
    sets = _DimensionSets()
    whole = list[BodyDimension]()
    marks: dict[BodyDimension, tuple[int, str]] = {}
    for index, (each, space) in enumerate(zip(body.nodes, spaces, strict=True)):
        own = {axis.name: (f"\0{index}\0{axis.name}", 0) for axis in space.axes}
        marks |= {own[name]: (index, name) for name in own}
        whole += [own[axis.name] for axis in space.axes if axis.kind is not AxisKind.PARALLEL]
        tensors = zip((*each.inputs, *each.outputs), (*space.operands, *space.results), strict=True)
        for name, tensor in tensors:
            for at, dimension in enumerate(tensor or ()):
                if dimension:
                    sets.join((name, at), own[dimension[0]])
                    whole += [own[axis] for axis in dimension[1:]]
                else:
                    whole.append((name, at))
    states = node.integer("states")
    for before, after in zip(body.inputs[1 : 1 + states], body.outputs[:states], strict=True):
        for at in range(len(before.shape)):
            sets.join((before.name, at), (after, at))
    members: dict[BodyDimension, list[BodyDimension]] = {}
    for place in list(sets.following):
        members.setdefault(sets.first(place), []).append(place)
    ends = {port.name for port in (*operand_ports(node), *result_ports(node))}
    inner = {sets.first(place) for place in whole}
    found: list[SplittableLoopAxis] = []
    for first, places in members.items():
        values = [place for place in places if place not in marks]
        axes = [marks[place] for place in places if place in marks]
        reached = {body.type_of(name).shape[at] for name, at in values if name in ends}
        once = len(dict(values)) == len(values) and len(dict(axes)) == len(axes)
        if first in inner or len(reached) != 1 or reached == {1} or not once:
            continue
        (extent,) = reached
        extents = [body.type_of(name).shape[at] for name, at in values]
        extents += [spaces[index].axis(axis).size for index, axis in axes]
        # In a merged dimension, the axis may be the outermost of several factors. So a dimension is
        # accepted if its size is a multiple of `extent`.
        if not any(each % extent for each in extents):
            found.append(SplittableLoopAxis(f"d{len(found)}", extent, dict(values), dict(axes)))
    return tuple(found)


@memoize(MAX_CACHED_GRAPHS)
def _body_spaces(body: Graph) -> tuple[Space, ...]:
    """Return the iteration space of each node of a loop's body."""
    return tuple(
        OPERATORS[qualified_name(node)].space(signature_of(body, node)) for node in body.nodes
    )


def _loop_space(signature: Signature) -> Space:
    """Return the iteration space of a loop. Its axes are those of `splittable_axes`; no axis
    indexes the other dimensions or the dimension of the iterations.
    """
    names = {
        place: axis.name
        for axis in splittable_axes(signature.node)
        for place in axis.dimensions.items()
    }

    def dimension_words(
        ports: tuple[LoopPort, ...], values: tuple[Value | None, ...]
    ) -> list[list[str]]:
        """Return the notation of each operand or result: for each dimension, the name of its axis
        or "1".
        """
        places = (
            port.places(len(value.shape) if value else 0)
            for port, value in zip(ports, values, strict=False)
        )
        return [["1" if each is None else names.get(each, "1") for each in own] for own in places]

    operands = operand_ports(signature.node)
    results = result_ports(signature.node)
    return space_from_words(
        signature,
        dimension_words(operands, signature.operands),
        dimension_words(results, signature.results),
    )


def _loop_flops(signature: Signature, space: Space) -> float:
    """Return the FLOPs of all iterations of a loop."""
    body = loop_body(signature.node)
    flops = (
        OPERATORS[qualified_name(node)].flops(signature_of(body, node), own)
        for node, own in zip(body.nodes, _body_spaces(body), strict=True)
    )
    return signature.node.integer("count") * sum(flops)


OPERATOR_DEFINITIONS = (Operator(LOOP, _loop_space, "recurrent", _loop_flops),)
