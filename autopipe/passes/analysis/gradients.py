"""Analyses of the backward pass: which values have a gradient, which tensors each node saves from
forward to backward, and which weight gradients a split backward postpones. A split backward
computes the gradients of activations in one task and the gradients of weights in a second, later
task.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopipe.ir.attention_kernels import (
    AttentionProperties,
    Capability,
    Kernel,
    must_repeat_heads,
    usable_kernels,
)
from autopipe.ir.graph import DType, Fill, Graph, Node, Parameter
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.ops import operator_of
from autopipe.ir.ops.attention import needs_stepwise_softmax
from autopipe.ir.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, WEIGHT_OPERAND, scratch_bytes
from autopipe.ir.ops.loop import loop_body, operand_ports, splittable_axes
from autopipe.ir.ops.operator import bytes_per_statistic
from autopipe.ir.space import Dimension, Windowed
from autopipe.passes.analysis.operators import (
    PRODUCT_KINDS,
    OpInstance,
    element_bytes,
    is_autocast,
    low_precision_copies,
    op_instances,
)


@memoize(MAX_CACHED_GRAPHS)
def differentiable_values(graph: Graph) -> frozenset[str]:
    """Return the names of the values with a gradient: the trainable parameters, and the
    floating-point results of differentiable nodes that read a value with a gradient.
    """
    found = {parameter.value.name for parameter in graph.parameters if parameter.trainable}
    for node in graph.nodes:
        row = operator_of(node)
        if row is not None and row.differentiable and any(name in found for name in node.inputs):
            found.update(
                name for name in node.outputs if name and graph.type_of(name).dtype.is_floating
            )
    return frozenset(found)


@memoize(MAX_CACHED_GRAPHS)
def trained_body(graph: Graph, node: Node) -> Graph:
    """Return the body of the loop `node`, in which each input that has a gradient is replaced by a
    trainable parameter.

    An input of the body has a gradient if it receives an operand of `node` that has a gradient in
    `graph`, or if it is a loop-carried state that an iteration computes from inputs with a
    gradient.
    """
    body = loop_body(node)
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


_AUTOCAST_TYPES = {"bf16": DType.BFLOAT16, "fp16": DType.FLOAT16}


@memoize(MAX_CACHED_GRAPHS)
def message_types(graph: Graph, precision: str) -> dict[str, DType]:
    """Return, for each value, the element type in which the value and its gradient are sent between
    stages.

    Under autocast, fp32 values with a gradient are sent in 16 bits, except scalars, which are too
    small for this to save bandwidth. Values without a gradient, such as masks and counts, keep
    their type, because 16 bits may not represent them.
    """
    narrow = _AUTOCAST_TYPES.get(precision)
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


@memoize(MAX_CACHED_GRAPHS)
def sent_bytes(graph: Graph, precision: str) -> dict[str, int]:
    """Return, for each value, the bytes of its message between stages if the full, unsharded value
    is sent.
    """
    types = message_types(graph, precision)
    return {name: graph.type_of(name).elements * dtype.itemsize for name, dtype in types.items()}


def max_received_to_sent_ratio(precision: str) -> int:
    """Return the maximum ratio of the bytes of a received value to the bytes of its message: 2
    under autocast, where fp32 values are sent in 16 bits, otherwise 1.
    """
    return 2 if is_autocast(precision) else 1


@memoize(MAX_CACHED_GRAPHS)
def weight_operands(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return, for each node, the indices of its weight operands: the operands whose gradients are
    computed in the second task of a split backward. The result has one entry per node, in graph
    order.

    A weight operand is a trainable parameter of at least two dimensions, or a view of such a
    parameter, whose gradient needs a separate matmul or scatter (`Operator.weights`). The gradient
    of a vector, such as a bias, is a sum, which is cheaper to compute immediately than to postpone.
    """

    differentiable = differentiable_values(graph)

    def is_weight(name: str) -> bool:
        """True if `name` is a trainable floating-point parameter of at least two dimensions, or a
        view of one that has a gradient.
        """
        if name not in differentiable:
            # A view of a parameter behind a StopGradient is not differentiable, so it does not
            # count as a weight.
            return False
        found = graph.parameter(view_base(graph, name))
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


def view_base(graph: Graph, name: str) -> str:
    """Return the value whose memory `name` shares, followed through any number of views, or `name`
    itself if it is no view.
    """
    return view_bases(graph).get(name, name)


@memoize(MAX_CACHED_GRAPHS)
def view_bases(graph: Graph) -> dict[str, str]:
    """Return, for each view, the value whose memory it shares, followed through any number of
    views. Views are the results of operators of kind "view", such as Reshape.
    """
    found: dict[str, str] = {}
    for node in graph.nodes:
        row = operator_of(node)
        if row is not None and row.kind == "view":
            source = node.inputs[0]
            found |= dict.fromkeys(filter(None, node.outputs), found.get(source, source))
    return found


_SAVED_ELEMENT_BYTES = {"mask": 1, "places": 8}
"""Bytes per element of saved tensors that are not values of the graph and have as many elements as
the node's first result. The keys are entries of `Operator.keeps`.
"""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that a node saves from forward to backward.

    key: two nodes with equal keys save one common tensor.
    bytes: size of the full, unsharded tensor.
    dimensions: for each dimension of the tensor, the axes of the saving node's iteration space that
    index it.
    windows: pairs (window, size of the dimension) for the dimensions that the node reads through
    sliding windows, as a convolution does.
    """

    key: tuple[str, int]
    bytes: int
    dimensions: tuple[Dimension, ...]
    windows: tuple[tuple[Windowed, int], ...] = ()

    def local_bytes(self, degrees: dict[str, int]) -> int:
        """Return the bytes on one device if the axes of the saving node are split. `degrees` has
        the number of parts of each split axis.
        """
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
    """A tensor that an attention node writes in addition to its result.

    scores: True for attention scores, False for keys and values repeated for each query head.
    kept: True if the tensor is saved for backward, False if it is temporary and backward computes
    it again.
    """

    tensor: SavedTensor
    scores: bool
    kept: bool = True


@memoize(MAX_CACHED_GRAPHS)
def attention_tensors(
    graph: Graph, precision: str = "fp32", capability: Capability | None = None
) -> dict[int, AttentionTensor]:
    """Return the additional tensor of each attention node that writes one, by the index of the
    node. `capability` is the compute capability of the GPUs, None for CPUs.

    Attention in torch's math kernel writes its probabilities, in fp32 or a wider type. The fused
    kernel that repeats heads writes keys and values for each query head. An attention that is
    computed operator by operator writes its scores; on CPUs, only this kind has an entry.
    """
    found: dict[int, AttentionTensor] = {}
    for index, (node, use) in enumerate(zip(graph.nodes, op_instances(graph), strict=True)):
        if use.row.name != "Attention":
            continue
        axes = use.space.axis_sizes()
        value = graph.type_of(node.inputs[0])
        stepwise = needs_stepwise_softmax(node, value.dtype)
        if capability is None and not stepwise:
            continue
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(precision, value.dtype.value)
        rows = axes["b"] * axes["h"] * axes["r"]
        keys = axes["k"] + axes.get("p", 0)
        result = node.outputs[0]
        width = 2 if dtype in ("bfloat16", "float16") else value.dtype.itemsize
        form = _attention_properties(node, axes, dtype)
        if stepwise or (
            capability is not None and usable_kernels(form, capability)[0] is Kernel.MATH
        ):
            size = rows * axes["q"] * keys * max(width, 4)
            tensor = SavedTensor(
                (f"{result}\0scores", max(width, 4)), size, (("b",), ("h", "r"), ("q",))
            )
            found[index] = AttentionTensor(tensor, True, not stepwise or any(node.outputs[3:]))
        elif capability is not None and must_repeat_heads(form, capability):
            size = rows * keys * (axes["d"] + axes["v"]) * width
            tensor = SavedTensor((f"{result}\0heads", width), size, (("b",), ("h", "r")))
            found[index] = AttentionTensor(tensor, False)
    return found


def _attention_properties(node: Node, axes: Mapping[str, int], dtype: str) -> AttentionProperties:
    """Return the properties by which torch selects the kernel of an attention over full sequences.

    `axes` contains the size of each axis of the node's iteration space. Sliding windows, and a
    causal attention with a cache, count as masked, because they are passed to torch as masks.
    """
    windows = (node.integer("left_window_size", -1), node.integer("right_window_size", -1))
    masked = any(node.inputs[3:4]) or any(node.inputs[6:7]) or max(windows) >= 0
    causal = bool(node.integer("is_causal"))
    masked = masked or (causal and (any(node.inputs[4:]) or any(node.outputs[1:])))
    square = axes["q"] == axes["k"]
    return AttentionProperties(
        dtype, axes["d"], axes["v"], masked, causal and not masked, square, axes["r"] > 1
    )


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes of the temporary tensors of a node on one device.

    samples: tensors that exist only during the node's forward or backward and whose size grows with
    the number of samples.
    weight: the gradient of the weight before it is added to the accumulated gradient.
    """

    samples: int = 0
    weight: int = 0


def workspace_of(
    graph: Graph, precision: str, index: int, use: OpInstance, degrees: Mapping[str, int]
) -> Workspace:
    """Return the bytes of the temporary tensors of the node `index`: 0 unless the node is a
    cross-entropy. `degrees` contains the number of parts of each split axis.

    A cross-entropy that recomputes its logits from the last hidden state needs the logits of one
    block of classes, and the gradient of the weight if it is trained. A cross-entropy that reads
    fp32 logits needs an fp32 copy under autocast: of the logits in forward, of their gradient in
    backward.
    """
    node = graph.nodes[index]
    if use.row.name == "SoftmaxCrossEntropyLoss":
        scores = graph.type_of(node.inputs[0])
        if not is_autocast(precision) or scores.dtype is not DType.FLOAT32:
            return Workspace()
        copy = SavedTensor(("copy", 4), scores.bytes, use.space.operands[0] or ())
        return Workspace(copy.local_bytes(dict(degrees)))
    if use.row.name != LINEAR_CROSS_ENTROPY:
        return Workspace()
    dtype = graph.type_of(node.inputs[0]).dtype
    weight = graph.type_of(node.inputs[WEIGHT_OPERAND])
    narrow = dtype in _AUTOCAST_TYPES.values() or (
        is_autocast(precision) and dtype is DType.FLOAT32
    )
    gradient = 0
    if weight.name in differentiable_values(graph):
        # If ranks store a 16-bit copy of the weight, its gradient is computed in 16 bits and then
        # converted to the parameter's type. Both gradients exist simultaneously, so the bytes of
        # both count.
        width = weight.dtype.itemsize + 2 * (weight.name in low_precision_copies(graph, precision))
        gradient = weight.elements * width // degrees.get("c", 1)
    return Workspace(
        scratch_bytes(use.space, degrees, bytes_per_statistic(dtype), narrow), gradient
    )


Dimensions = tuple[Dimension, ...] | None
Kept = SavedTensor | None


@memoize(MAX_CACHED_GRAPHS)
def saved_tensors(
    graph: Graph,
    precision: str = "fp32",
    capability: Capability | None = None,
    made: tuple[str, ...] = (),
) -> tuple[tuple[SavedTensor, ...], ...]:
    """Return the tensors that each node saves for backward, one tuple per node in graph order.
    `capability` is the compute capability of the GPUs, None for CPUs.

    - Parameters, constants and graph inputs do not count, because they are in memory anyway.
    - The 16-bit copies that autocast makes of the operands of a matmul count: one copy of a trained
      parameter for all matmuls of a forward, and one copy per reader of other values (PyTorch
      documentation, "Automatic Mixed Precision package", `cache_enabled`).
    - A view saves no tensor. A node that saves a view saves the value whose memory the view shares.
    - A node that is not differentiable or reads no value with a gradient saves no tensor.

    `made` is not empty for the graph of a loop body only: it has the graph inputs that count
    although they are inputs, because the loop creates them.
    """
    gradient = differentiable_values(graph)
    widths = element_bytes(graph, precision)
    trained = {each.value.name for each in graph.parameters if each.trainable}
    free = {value.name for value in graph.inputs} | {each.value.name for each in graph.constants}
    free = (free | {each.value.name for each in graph.parameters}) - set(made)
    beside = attention_tensors(graph, precision, capability)

    def saved_value(
        name: str, dimensions: Dimensions, windows: Iterable[Windowed] = (), cast: str = ""
    ) -> Kept:
        """Return the saved tensor of the value `name`, or None if the value is in memory anyway.

        `dimensions` contains, for each dimension, the axes of the reader's iteration space that
        index it, and `windows` the dimensions that the reader reads through sliding windows. `cast`
        is the key of the 16-bit copy that the reader makes of the value, "" if it makes none.
        """
        through = tuple((window, graph.type_of(name).shape[window.dimension]) for window in windows)
        root = view_base(graph, name)
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

    def operator_tensors(node: Node, use: OpInstance) -> Iterator[Kept]:
        """Yield the tensors that `Operator.keeps` lists for the node; None for tensors that are in
        memory anyway.
        """
        result = node.outputs[0]
        read = node.inputs
        # A factor of a product is saved only if another factor is differentiable, because only the
        # gradients of other factors depend on it.
        multiplies = (
            use.row.kind in ("matmul", "convolution") and use.row.name != LINEAR_CROSS_ENTROPY
        )
        multiplies = multiplies or use.row.name == "Mul"
        casts = is_autocast(precision) and use.row.kind in PRODUCT_KINDS
        for what in use.row.keeps:
            if what in _SAVED_ELEMENT_BYTES:
                width = _SAVED_ELEMENT_BYTES[what]
                elements = graph.type_of(result).elements
                yield SavedTensor(
                    (f"{result}\0{what}", width), elements * width, use.space.results[0] or ()
                )
            elif what == "rows":
                elements = graph.type_of(read[1]).elements
                width = 8 + 2 * bytes_per_statistic(graph.type_of(read[0]).dtype)
                yield SavedTensor(
                    (f"{result}\0rows", width), elements * width, use.space.operands[1] or ()
                )
            elif what == "probabilities":
                # Log-probabilities have the declared type of the logits, because autocast computes
                # losses in fp32.
                scores = graph.type_of(read[0])
                key = f"{result}\0probabilities", scores.dtype.itemsize
                yield SavedTensor(key, scores.bytes, use.space.operands[0] or ())
            elif what.startswith(">"):
                place = int(what[1:])
                if place < len(node.outputs) and node.outputs[place]:
                    yield saved_value(node.outputs[place], use.space.results[place])
            else:
                for place in range(len(read)) if what == "*" else (int(what),):
                    others = read[:place] + read[place + 1 :]
                    if (
                        place < len(read)
                        and read[place]
                        and not (multiplies and gradient.isdisjoint(others))
                    ):
                        cast = f"{result}\0{place}" if casts else ""
                        yield saved_value(
                            read[place],
                            use.space.operands[place],
                            use.space.windows_of(place),
                            cast,
                        )

    def saved_by_node(index: int, node: Node, use: OpInstance) -> tuple[SavedTensor, ...]:
        """Return the distinct tensors that a node saves, () if it reads no value with a
        gradient.
        """
        if use.row.kind == "view" or not use.row.differentiable or gradient.isdisjoint(node.inputs):
            return ()
        found: dict[tuple[str, int], SavedTensor] = {}
        own = beside.get(index)
        inside = (
            ()
            if node.body is None
            else _saved_by_iterations(graph, node, use, saved_value, (precision, capability))
        )
        for each in (
            *operator_tensors(node, use),
            *inside,
            own.tensor if own is not None and own.kept else None,
        ):
            if each is not None:
                found.setdefault(each.key, each)
        return tuple(found.values())

    return tuple(map(saved_by_node, itertools.count(), graph.nodes, op_instances(graph)))


def _saved_by_iterations(
    graph: Graph,
    node: Node,
    use: OpInstance,
    saved_value: Callable[[str, Dimensions], Kept],
    target: tuple[str, Capability | None],
) -> Iterator[Kept]:
    """Yield the tensors that the loop `node` saves. A tensor that an iteration of the body saves
    exists once per iteration. A tensor that all iterations read, an operand of the loop, exists
    once.

    `saved_value` returns the saved tensor of a value of `graph`. `target` is (precision, compute
    capability).
    """
    body = trained_body(graph, node)
    states = node.integer("states")
    title = next(filter(None, node.outputs))
    outside = {
        port.name: place for place, port in enumerate(operand_ports(node)) if place >= states
    }
    names = {
        (index, axis): each.name
        for each in splittable_axes(node)
        for index, axis in each.nodes.items()
    }
    given = tuple(value.name for value in loop_body(node).inputs)
    for index, own in enumerate(saved_tensors(body, *target, given)):
        for each in own:
            (name, width) = each.key
            place = outside.get(each.key[0])
            if place is not None:
                yield saved_value(node.inputs[place], use.space.operands[place])
                continue
            dimensions = tuple(
                tuple(names.get((index, axis), "") for axis in axes) for axes in each.dimensions
            )
            yield SavedTensor(
                (f"{title}\0{name}", width), each.bytes * node.integer("count"), dimensions
            )
