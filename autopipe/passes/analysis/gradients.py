"""Which values gradients flow through, what backward keeps of each node, and what a split backward
leaves to its second half: the gradients of parameters that cost a product of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopipe.ir.attention_kernels import (
    AttentionForm,
    Capability,
    Kernel,
    kernels_of,
    repeats_heads,
)
from autopipe.ir.graph import DType, Fill, Graph, Node, Parameter
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.ops import operator_of
from autopipe.ir.ops.attention import is_stepwise
from autopipe.ir.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, WEIGHT, scratch_bytes
from autopipe.ir.ops.loop import body_of, operand_ports, run_axes
from autopipe.ir.ops.operator import single
from autopipe.ir.space import Dimension, Windowed
from autopipe.passes.analysis.operators import (
    PRODUCT_KINDS,
    OpInstance,
    element_bytes,
    low_precision_copies,
    narrows,
    uses_of,
)


@remembered(GRAPHS)
def differentiable_values(graph: Graph) -> frozenset[str]:
    """Values whose gradient a trainable parameter needs: floating, computed from one through
    differentiable nodes.
    """
    found = {parameter.value.name for parameter in graph.parameters if parameter.trainable}
    for node in graph.nodes:
        row = operator_of(node)
        if row is not None and row.differentiable and any(name in found for name in node.inputs):
            found.update(
                name for name in node.outputs if name and graph.type_of(name).dtype.is_floating
            )
    return frozenset(found)


@remembered(GRAPHS)
def trained_body(graph: Graph, node: Node) -> Graph:
    """A loop's body whose parameters are what gradients flow through in `graph`, and the states
    that a run computes of it.
    """
    body = body_of(node)
    gradient = differentiable_values(graph)
    flowing = {
        port.name
        for port, name in zip(operand_ports(node), node.inputs, strict=True)
        if name in gradient
    }
    while True:
        inputs = tuple(value for value in body.inputs if value.name not in flowing)
        parameters = tuple(
            Parameter(value, Fill(0.0)) for value in body.inputs if value.name in flowing
        )
        found = replace(body, inputs=inputs, parameters=parameters)
        reached = differentiable_values(found)
        states = zip(body.inputs[1 : 1 + node.integer("states")], body.outputs, strict=False)
        if not (more := {value.name for value, result in states if result in reached} - flowing):
            return found
        flowing |= more


_NARROW = {"bf16": DType.BFLOAT16, "fp16": DType.FLOAT16}


@remembered(GRAPHS)
def message_types(graph: Graph, precision: str) -> dict[str, DType]:
    """The type in which each value, and its gradient, goes from stage to stage: under autocast 16
    bits of what has single precision and a gradient. A single number keeps its own: nothing would
    be saved. So do masks and counts, which 16 bits may not hold.
    """
    narrow = _NARROW.get(precision)
    differentiable = differentiable_values(graph)
    return {
        value.name: narrow
        if narrow is not None
        and value.dtype is DType.FLOAT32
        and value.shape
        and value.name in differentiable
        else value.dtype
        for value in (*graph.inputs, *graph.values)
    }


@remembered(GRAPHS)
def sent_bytes(graph: Graph, precision: str) -> dict[str, int]:
    """Bytes of each value, all of it, in messages."""
    types = message_types(graph, precision)
    return {name: graph.type_of(name).elements * dtype.itemsize for name, dtype in types.items()}


def most_widened(precision: str) -> int:
    """By how much a value that a stage computes with is larger than its message, at most."""
    return 2 if narrows(precision) else 1


@remembered(GRAPHS)
def waiting_operands(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each node the positions of the operands whose gradients the second half of a split
    backward computes. They are parameters, or views of such, whose gradient costs a product or a
    lookup of its own (`Operator.weights`). A vector is none: its gradient is a sum, cheaper
    computed than waited for.
    """

    differentiable = differentiable_values(graph)

    def is_weight(name: str) -> bool:
        if name not in differentiable:
            return False  # A view of a parameter behind StopGradient.
        found = graph.parameter(viewed(graph, name))
        return bool(
            found
            and found.trainable
            and found.value.dtype.is_floating
            and len(found.value.shape) > 1
        )

    found: list[tuple[int, ...]] = []
    for node in graph.nodes:
        row = operator_of(node)
        weights = () if row is None or len(node.outputs) != 1 else row.weights
        found.append(
            tuple(
                each for each in weights if each < len(node.inputs) and is_weight(node.inputs[each])
            )
        )
    return tuple(found)


def viewed(graph: Graph, name: str) -> str:
    """The value that a value is, at the end, a view of."""
    return views(graph).get(name, name)


@remembered(GRAPHS)
def views(graph: Graph) -> dict[str, str]:
    """For each value that is a view the one that it is, at the end, a view of."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        row = operator_of(node)
        if row is not None and row.kind == "view":
            source = node.inputs[0]
            found |= dict.fromkeys(filter(None, node.outputs), found.get(source, source))
    return found


_BESIDE = {"mask": 1, "places": 8}
"""Bytes an element of the first result of what is no value of the graph."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor kept from forward to backward. Two nodes that keep the same tensor give it the same
    `key`. `bytes` is its whole size; `dimensions` say, in the axes of the node that keeps it, which
    splits cut it, and `windows` which dimensions, of what extent, it is read through windows along.
    """

    key: tuple[str, int]
    bytes: int
    dimensions: tuple[Dimension, ...]
    windows: tuple[tuple[Windowed, int], ...] = ()

    def local_bytes(self, degrees: dict[str, int]) -> int:
        """Bytes on one device of a group that splits the node's axes by `degrees`."""
        if not degrees:
            return self.bytes
        size = self.bytes // math.prod(
            degrees.get(axis, 1) for dimension in self.dimensions for axis in dimension
        )
        for window, extent in self.windows:
            degree = degrees.get(window.axis, 1)
            if degree > 1:
                size = size * window.span(window.count // degree) // extent
        return size


@dataclass(frozen=True, slots=True)
class AttentionTensor:
    """A tensor that an attention writes besides its result: its scores, or the keys and values of
    every query head. Backward reads them where they are `kept`, else it writes them again.
    """

    tensor: SavedTensor
    scores: bool
    kept: bool = True


@remembered(GRAPHS)
def attention_tensors(
    graph: Graph, precision: str = "fp32", capability: Capability | None = None
) -> dict[int, AttentionTensor]:
    """A tensor that devices of `capability`, or CPUs, write for an attention, by node: with the
    math kernel its probabilities, in single precision at least, with the fused one for fp32 and
    masks the keys and values of every query head; the scores of one that is computed step by step.
    """
    found: dict[int, AttentionTensor] = {}
    for index, (node, use) in enumerate(zip(graph.nodes, uses_of(graph), strict=True)):
        if use.row.name != "Attention":
            continue
        axes = use.space.axis_sizes()
        value = graph.type_of(node.inputs[0])
        stepwise = is_stepwise(node, value.dtype)
        if capability is None and not stepwise:
            continue
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(precision, value.dtype.value)
        rows = axes["b"] * axes["h"] * axes["r"]
        keys = axes["k"] + axes.get("p", 0)
        result = node.outputs[0]
        width = 2 if dtype in ("bfloat16", "float16") else value.dtype.itemsize
        form = _form_of(node, axes, dtype)
        if stepwise or (capability is not None and kernels_of(form, capability)[0] is Kernel.MATH):
            size = rows * axes["q"] * keys * max(width, 4)
            tensor = SavedTensor(
                (f"{result}\0scores", max(width, 4)), size, (("b",), ("h", "r"), ("q",))
            )
            found[index] = AttentionTensor(tensor, True, not stepwise or any(node.outputs[3:]))
        elif capability is not None and repeats_heads(form, capability):
            size = rows * keys * (axes["d"] + axes["v"]) * width
            tensor = SavedTensor((f"{result}\0heads", width), size, (("b",), ("h", "r")))
            found[index] = AttentionTensor(tensor, False)
    return found


def _form_of(node: Node, axes: Mapping[str, int], dtype: str) -> AttentionForm:
    """The traits of an attention of whole sequences. Windows, and a causal one behind a cache,
    reach torch as masks.
    """
    windows = (node.integer("left_window_size", -1), node.integer("right_window_size", -1))
    masked = any(node.inputs[3:4]) or any(node.inputs[6:7]) or max(windows) >= 0
    causal = bool(node.integer("is_causal"))
    masked = masked or (causal and (any(node.inputs[4:]) or any(node.outputs[1:])))
    square = axes["q"] == axes["k"]
    return AttentionForm(
        dtype, axes["d"], axes["v"], masked, causal and not masked, square, axes["r"] > 1
    )


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes on one device of what a node makes and lets go while it computes, forwards or back, for
    its samples; and of the gradient of its weight, which is whole before it is added to those of
    earlier micro-batches.
    """

    samples: int = 0
    weight: int = 0


def scratch_of(
    graph: Graph, precision: str, index: int, use: OpInstance, degrees: Mapping[str, int]
) -> Scratch:
    """Return the scratch memory of a cross-entropy, none for other operators.

    One that recomputes its scores needs a block of them. One that keeps them needs a copy in single
    precision under autocast, of the scores forwards, of their gradient back.
    """
    node = graph.nodes[index]
    if use.row.name == "SoftmaxCrossEntropyLoss":
        scores = graph.type_of(node.inputs[0])
        if not narrows(precision) or scores.dtype is not DType.FLOAT32:
            return Scratch()
        copy = SavedTensor(("copy", 4), scores.bytes, use.space.operands[0] or ())
        return Scratch(copy.local_bytes(dict(degrees)))
    if use.row.name != LINEAR_CROSS_ENTROPY:
        return Scratch()
    dtype = graph.type_of(node.inputs[0]).dtype
    weight = graph.type_of(node.inputs[WEIGHT])
    narrow = dtype in _NARROW.values() or (narrows(precision) and dtype is DType.FLOAT32)
    gradient = 0
    if weight.name in differentiable_values(graph):
        # That of a copy in 16 bits, and as it is added.
        width = weight.dtype.itemsize + 2 * (weight.name in low_precision_copies(graph, precision))
        gradient = weight.elements * width // degrees.get("c", 1)
    return Scratch(scratch_bytes(use.space, degrees, single(dtype), narrow), gradient)


Dimensions = tuple[Dimension, ...] | None
Kept = SavedTensor | None


@remembered(GRAPHS)
def kept_values(
    graph: Graph,
    precision: str = "fp32",
    capability: Capability | None = None,
    made: tuple[str, ...] = (),
) -> tuple[tuple[SavedTensor, ...], ...]:
    """For each node what backward needs of it, at `precision` on GPUs of `capability`, or on CPUs.

    Parameters, constants and graph inputs are there anyway and do not count, but the 16-bit copies
    that autocast makes of a product's operands do: one of a trained parameter for all products of a
    forward, one of anything else for each that reads it (PyTorch documentation, "Automatic Mixed
    Precision package", `cache_enabled`). A view keeps nothing; keeping a view keeps what it is a
    view of. Nodes through which no gradient flows keep nothing. Of a graph that is a loop's body,
    `made` are the values that are there only because the loop has made them.
    """
    gradient = differentiable_values(graph)
    widths = element_bytes(graph, precision)
    trained = {each.value.name for each in graph.parameters if each.trainable}
    free = {value.name for value in graph.inputs} | {each.value.name for each in graph.constants}
    free = (free | {each.value.name for each in graph.parameters}) - set(made)
    beside = attention_tensors(graph, precision, capability)

    def tensor(
        name: str, dimensions: Dimensions, windows: Iterable[Windowed] = (), cast: str = ""
    ) -> Kept:
        """A value, if it is kept; `cast` names the copy that its reader makes of it, if it makes
        one.
        """
        through = tuple((window, graph.type_of(name).shape[window.dimension]) for window in windows)
        root = viewed(graph, name)
        value = graph.type_of(root)
        width = widths[root]
        if cast and value.dtype.is_floating and width > 2:
            return SavedTensor(
                (root if root in trained else cast, 2),
                value.elements * 2,
                dimensions or (),
                through,
            )
        if root in free:
            return None
        return SavedTensor((root, width), value.elements * width, dimensions or (), through)

    def tensors(node: Node, use: OpInstance) -> Iterator[Kept]:
        result = node.outputs[0]
        read = node.inputs
        # A factor is needed for the gradients of the other factors only.
        multiplies = (
            use.row.kind in ("matmul", "convolution") and use.row.name != LINEAR_CROSS_ENTROPY
        )
        multiplies = multiplies or use.row.name == "Mul"
        casts = narrows(precision) and use.row.kind in PRODUCT_KINDS
        for what in use.row.keeps:
            if what in _BESIDE:
                width = _BESIDE[what]
                elements = graph.type_of(result).elements
                yield SavedTensor(
                    (f"{result}\0{what}", width), elements * width, use.space.results[0] or ()
                )
            elif what == "rows":
                elements = graph.type_of(read[1]).elements
                width = 8 + 2 * single(graph.type_of(read[0]).dtype)
                yield SavedTensor(
                    (f"{result}\0rows", width), elements * width, use.space.operands[1] or ()
                )
            elif what == "probabilities":
                # Logarithms in the scores' own type: autocast runs losses in single precision.
                scores = graph.type_of(read[0])
                key = f"{result}\0probabilities", scores.dtype.itemsize
                yield SavedTensor(key, scores.bytes, use.space.operands[0] or ())
            elif what.startswith(">"):
                place = int(what[1:])
                if place < len(node.outputs) and node.outputs[place]:
                    yield tensor(node.outputs[place], use.space.results[place])
            else:
                for place in range(len(read)) if what == "*" else (int(what),):
                    others = read[:place] + read[place + 1 :]
                    if (
                        place < len(read)
                        and read[place]
                        and not (multiplies and gradient.isdisjoint(others))
                    ):
                        cast = f"{result}\0{place}" if casts else ""
                        yield tensor(
                            read[place],
                            use.space.operands[place],
                            use.space.windows_of(place),
                            cast,
                        )

    def kept(index: int, node: Node, use: OpInstance) -> tuple[SavedTensor, ...]:
        if use.row.kind == "view" or not use.row.differentiable or gradient.isdisjoint(node.inputs):
            return ()
        found: dict[tuple[str, int], SavedTensor] = {}
        own = beside.get(index)
        inside = (
            ()
            if node.body is None
            else _kept_of_runs(graph, node, use, tensor, (precision, capability))
        )
        for each in (
            *tensors(node, use),
            *inside,
            own.tensor if own is not None and own.kept else None,
        ):
            if each is not None:
                found.setdefault(each.key, each)
        return tuple(found.values())

    return tuple(map(kept, itertools.count(), graph.nodes, uses_of(graph)))


def _kept_of_runs(
    graph: Graph,
    node: Node,
    use: OpInstance,
    tensor: Callable[[str, Dimensions], Kept],
    target: tuple[str, Capability | None],
) -> Iterator[Kept]:
    """The tensors of a run of a loop as often as it runs, but for those that all runs read, which
    are there once.
    """
    body = trained_body(graph, node)
    states = node.integer("states")
    title = next(filter(None, node.outputs))
    outside = {
        port.name: place for place, port in enumerate(operand_ports(node)) if place >= states
    }
    names = {
        (index, axis): each.name for each in run_axes(node) for index, axis in each.nodes.items()
    }
    given = tuple(value.name for value in body_of(node).inputs)
    for index, own in enumerate(kept_values(body, *target, given)):
        for each in own:
            (name, width) = each.key
            place = outside.get(each.key[0])
            if place is not None:
                yield tensor(node.inputs[place], use.space.operands[place])
                continue
            dimensions = tuple(
                tuple(names.get((index, axis), "") for axis in axes) for axes in each.dimensions
            )
            yield SavedTensor(
                (f"{title}\0{name}", width), each.bytes * node.integer("count"), dimensions
            )
