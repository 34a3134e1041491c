"""The roofline model: the work of each node, and its time on a device.

    seconds = max(FLOPs / peak, bytes / bandwidth) + launches * launch latency

Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures", Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.attention_kernels import Capability
from autopipe.ir.cluster import Device
from autopipe.ir.graph import Graph, Node
from autopipe.ir.measured_costs import AffineTime
from autopipe.ir.ops.linear_cross_entropy import (
    LINEAR_CROSS_ENTROPY,
    WEIGHT_OPERAND,
    local_label_and_class_counts,
)
from autopipe.ir.ops.loop import splittable_axes
from autopipe.ir.problem import BACKWARD_OPERATORS, NodeCost, Problem
from autopipe.passes.analysis.gradients import (
    attention_tensors,
    differentiable_values,
    saved_tensors,
    trained_body,
)
from autopipe.passes.analysis.operators import (
    PRODUCT_KINDS,
    OpInstance,
    SampleAxes,
    bias_additions,
    element_bytes,
    op_instances,
)
from autopipe.passes.analysis.stage_nodes import live_nodes

Seconds = np.ndarray
"""Array of seconds with one entry per node."""

Bytes = TypeVar("Bytes", float, NDArray[np.float64])
"""Bytes of one stage, or an array with the bytes of several stages. Functions of these bytes return
the seconds of one stage or an array of equal shape.
"""


def node_seconds(
    work: Sequence[NodeCost], device: Device, precision: str, shares: float | np.ndarray = 1.0
) -> tuple[Seconds, Seconds]:
    """Return (forward, backward): the seconds of each node of `work` on the device type `device`.

    `shares` is the fraction of each node that one device computes: 1 divided by the product of the
    degrees of its splits.

    Matmuls, convolutions and recurrent operators use the peak of `precision`, other operators the
    peak of fp32. Views take no time in the model, and a node without gradients has no backward. If
    the node was measured on this device type (`NodeCost.measured`), the measured times replace the
    times of the model, interpolated linearly between the measured fractions. If only other nodes
    were measured, the measurements give a factor for the times of the model.

    Raises ConfigurationError if the device type lacks a rate for a class of operators.
    """
    rates = {kind: _rates(device, precision, kind) for kind in {each.kind for each in work}}
    figures = np.array(
        [
            (
                each.forward_flops,
                each.forward_bytes,
                each.backward_flops,
                each.backward_bytes,
                each.launches,
                each.product_rate,
                *rates[each.kind],
            )
            for each in work
        ],
        dtype=float,
    ).reshape(-1, 9)
    flops, moved, back_flops, back_moved, starts, product_rate, peak, bandwidth, latency = figures.T
    peak = peak * product_rate
    forward = np.maximum(flops * shares / peak, moved * shares / bandwidth) + starts * latency
    # The backward of a matmul launches one kernel per gradient: two if its FLOPs are twice those of
    # forward. For a node of a fused kernel (launches < 1), both numbers of launches are equal.
    launches = np.where((starts == 1.0) & (back_flops > 1.5 * flops), 2.0, starts) * (
        back_moved > 0
    )
    backward = (
        np.maximum(back_flops * shares / peak, back_moved * shares / bandwidth) + launches * latency
    )
    if any(each.measured for each in work):
        own = np.broadcast_to(shares, len(work))
        for index, found in (
            (index, found) for index, each in enumerate(work) for found in each.measured
        ):
            if found.device == device.name and found.points:
                at, forward_s, backward_s = zip(*found.points, strict=True)
                forward[index] = np.interp(own[index], at, forward_s)
                backward[index] = np.interp(own[index], at, backward_s)
            elif found.device == device.name:
                forward[index] *= found.scale[0]
                backward[index] *= found.scale[1]
    return forward, backward


def _rates(device: Device, precision: str, kind: str) -> tuple[float, float, float]:
    """Return (FLOP/s, bytes/s, seconds per kernel launch) of a device type for operators of class
    `kind`, for example "matmul". A view takes no time.
    """
    if kind == "view":
        return np.inf, np.inf, 0.0
    fraction = device.efficiency_of(kind)
    peak = device.peak(precision if kind in PRODUCT_KINDS else "fp32")
    return peak * fraction, device.bandwidth_bytes_per_s * fraction, device.launch_latency_s


def mean_node_seconds(problem: Problem) -> tuple[Seconds, Seconds]:
    """Return (forward, backward): the seconds of each unsplit node for one micro-batch, averaged
    over the device types of the cluster.

    Strategies use these times to compare nodes before the nodes are placed on devices.
    """
    kinds = problem.cluster.kinds
    seconds = [node_seconds(problem.work, device, problem.precision) for device in kinds]
    forward, backward = (np.mean([each[phase] for each in seconds], axis=0) for phase in (0, 1))
    return forward, backward


class StepSeconds:
    """Lower bounds on the seconds that a part of each node takes, for one micro-batch.

    One of n equal parts of a node counts as 1 / n of the node's work plus its kernel launches. The
    work includes reading the parameters. If n devices divide the samples, each device reads the
    parameters in full, so the time can be longer than this bound.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._is_live = np.isin(
            np.arange(len(problem.graph.nodes)), live_nodes(problem.graph, problem.wanted)
        )
        self._known: dict[tuple[tuple[Device, ...], int], Seconds] = {}

    def of(self, kinds: tuple[Device, ...], parts: int) -> Seconds:
        """Return the seconds of one of `parts` equal parts of each node on the fastest of the
        device types `kinds`; 0 for nodes on which no required output of a step depends.

        The seconds are those of forward and, in training, of backward, with a second forward if all
        stages recompute.
        """
        key = kinds, parts
        if key not in self._known:
            problem = self._problem
            each = []
            for device in kinds:
                forward, backward = node_seconds(
                    problem.work, device, problem.precision, 1.0 / parts
                )
                each.append(
                    forward * (1 + problem.recomputes_all) + (backward if problem.train else 0.0)
                )
            self._known[key] = np.where(self._is_live, np.minimum.reduce(each), 0.0)
        return self._known[key]


def accumulate_seconds(device: Device, gradient_bytes: Bytes, tensors: int = 1) -> Bytes:
    """Return the seconds to add the gradients of one micro-batch, of `gradient_bytes` bytes, to the
    gradients accumulated from earlier micro-batches.

    `tensors` is the number of gradient tensors; it has an effect only if the device type has
    measured task times.
    """
    starts = 0.0 if device.tasks is None else device.tasks.accumulate.per_tensor_s * tensors
    return starts + accumulate_seconds_per_byte(device) * gradient_bytes


def mean_accumulate_seconds(
    device: Device, gradient_bytes: Bytes, micro_batches: int, tensors: int = 1
) -> Bytes:
    """Return `accumulate_seconds` averaged over the micro-batches of a step. The first micro-batch
    takes none, because there are no earlier gradients.
    """
    return accumulate_seconds(device, gradient_bytes, tensors) * (1 - 1 / micro_batches)


def accumulate_seconds_per_byte(device: Device) -> float:
    """Return the seconds to accumulate one byte of gradients. Without measured task times, this is
    the time to read two bytes and write one.
    """
    if device.tasks is not None:
        return device.tasks.accumulate.per_byte_s
    return 3 / (device.bandwidth_bytes_per_s * device.efficiency_of("elementwise"))


def update_seconds(device: Device, parameter_bytes: Bytes, states: int, tensors: int = 1) -> Bytes:
    """Return the seconds of an optimizer's update of `parameter_bytes` bytes; 0 for 0 bytes.

    `states` is the number of state tensors that the optimizer has per parameter. `tensors` is the
    number of parameters; it has an effect only if the device type has measured task times.
    """
    starts = 0.0 if device.tasks is None else device.tasks.updates[states].per_tensor_s * tensors
    line = update_time(device, states)
    seconds = starts + (line.fixed_s + line.per_byte_s * parameter_bytes)
    return seconds * (parameter_bytes > 0)


def cast_seconds_per_byte(device: Device) -> float:
    """Return the seconds to write one byte of the 16-bit copy of a parameter: the time to read two
    bytes and write one.
    """
    return 3 / (device.bandwidth_bytes_per_s * device.efficiency_of("elementwise"))


def update_time(device: Device, states: int) -> AffineTime:
    """Return the seconds of an optimizer's update as a function of the bytes of the parameters.
    `states` is the number of state tensors that the optimizer has per parameter.

    Without measured task times, this is the time of one fused kernel that reads and writes the
    parameters and states, and reads the gradients.
    """
    if device.tasks is not None:
        return AffineTime(device.tasks.update_s, device.tasks.updates[states].per_byte_s)
    bandwidth = device.bandwidth_bytes_per_s * device.efficiency_of("elementwise")
    return AffineTime(device.launch_latency_s, (3 + 2 * states) / bandwidth)


def task_overhead_seconds(device: Device) -> tuple[float, float]:
    """Return (forward, backward): the measured seconds that a forward and a backward of one
    micro-batch take in addition to their operators; (0, 0) if they were not measured.
    """
    return (0.0, 0.0) if device.tasks is None else (device.tasks.forward_s, device.tasks.backward_s)


def posting_seconds(device: Device, messages: int, size_bytes: float) -> float:
    """Return the CPU seconds in which a forward or backward starts the sends and receives of
    `messages` messages with `size_bytes` bytes in total; 0 if they were not measured.
    """
    if device.post is None or not messages:
        return 0.0
    following = device.post if device.follow is None else device.follow
    return device.post.seconds(size_bytes) + following.fixed_s * (messages - 1)


_FUSED: Mapping[int, float] = {}
_NO_LOOPS: Mapping[int, NodeCost] = {}
_PASSES = 4
"""Number of times that an attention without a fused kernel reads or writes all its scores: one
matmul writes the scores, the softmax reads and writes them, and another matmul reads them. A
cross-entropy that computes its logits itself reads or writes its logits equally often.
"""

_STEPS = 12
"""Number of times that an attention that is computed operator by operator reads or writes all its
scores: `_PASSES`, and eight more for a soft cap of three operations and a mask, because each of
these four operations reads and writes the scores.
"""


def roofline_costs(
    graph: Graph, precision: str = "fp32", capability: Capability | None = None
) -> tuple[NodeCost, ...]:
    """Return the work of each node at `precision`, on GPUs of compute capability `capability` or,
    if it is None, on CPUs.

    The backward of a matmul has one matmul per operand that needs a gradient, so the backward of
    the first layer is cheaper. Raises ModelError for an operator without a definition in `ir/ops`.
    """
    uses = op_instances(graph)
    widths = element_bytes(graph, precision)
    sizes = {name: float(width * graph.type_of(name).elements) for name, width in widths.items()}
    kept = []
    seen = set[tuple[str, int]]()
    # A value that several nodes save uses memory for one tensor, so it counts at the first node
    # only.
    for values in saved_tensors(graph, precision, capability):
        new = {each.key: each.bytes for each in values if each.key not in seen}
        seen |= new.keys()
        kept.append(sum(new.values()))
    beside = attention_tensors(graph, precision, capability)
    scores = {index: _PASSES * each.tensor.bytes for index, each in beside.items() if each.scores}
    loops = {
        index: _loop_cost(graph, node, precision)
        for index, node in enumerate(graph.nodes)
        if node.body is not None
    }
    flops = [use.flops for use in uses]
    return _costs_of_nodes(
        graph, widths, sizes, flops, kept, scores | _extra_score_bytes(graph), loops
    )


def roofline_costs_of_share(
    graph: Graph, samples: SampleAxes, precision: str, share: float
) -> tuple[NodeCost, ...]:
    """Return the work of each node on the fraction `share` of the graph's samples, without bytes
    saved for backward (`kept_bytes` is 0).

    Apart from that, the result equals that of `roofline_costs`, without a capability, for a graph
    that has this fraction of the samples. `samples` are the batch axes of `graph`.
    """
    widths = element_bytes(graph, precision)
    sizes = {
        name: width
        * graph.type_of(name).elements
        * (share if samples.has_batch_dimension(name) else 1.0)
        for name, width in widths.items()
    }
    flops = [
        use.flops * (share if own else 1.0)
        for use, own in zip(samples.uses, samples.batch.nodes, strict=True)
    ]
    scores = {
        index: size * (share if samples.axes[index] else 1.0)
        for index, size in _extra_score_bytes(graph).items()
    }
    loops = {
        index: _loop_cost(graph, node, precision, share, samples.axes[index])
        for index, node in enumerate(graph.nodes)
        if node.body is not None
    }
    return _costs_of_nodes(graph, widths, sizes, flops, [0] * len(flops), scores, loops)


def _loop_cost(
    graph: Graph, node: Node, precision: str, share: float = 1.0, axis: str | None = None
) -> NodeCost:
    """Return the work of the loop `node`: the work of its body times its number of iterations.

    Only the fraction `share` of the loop's axis `axis` is computed; None is the full loop.
    """
    body = trained_body(graph, node)
    count = node.integer("count")
    cut = next((each for each in splittable_axes(node) if each.name == axis), None)
    widths = element_bytes(body, precision)
    sizes = {
        name: width
        * body.type_of(name).elements
        * (share if cut is not None and name in cut.dimensions else 1.0)
        for name, width in widths.items()
    }
    flops = [
        use.flops * (share if cut is not None and index in cut.nodes else 1.0)
        for index, use in enumerate(op_instances(body))
    ]
    every = _costs_of_nodes(body, widths, sizes, flops, [0] * len(flops))
    run = [each for each in every if each.kind != "view"]
    return NodeCost(
        kind="recurrent",
        forward_flops=count * sum(each.forward_flops for each in run),
        backward_flops=count * sum(each.backward_flops for each in run),
        forward_bytes=count * sum(each.forward_bytes for each in run),
        backward_bytes=count * sum(each.backward_bytes for each in run),
        kept_bytes=0,
        launches=count * sum(each.launches for each in run),
        operators=count * sum(each.operators for each in every),
        recomputed_flops=count * sum(each.recomputed_flops for each in run),
        backward_operators=count * sum(each.backward_operators for each in every),
    )


def _costs_of_nodes(
    graph: Graph,
    widths: Mapping[str, int],
    sizes: Mapping[str, float],
    flops: Sequence[float],
    kept: Sequence[int],
    scores: Mapping[int, float] = _FUSED,
    loops: Mapping[int, NodeCost] = _NO_LOOPS,
) -> tuple[NodeCost, ...]:
    """Return the work of every node of `graph`, from these properties of its values and nodes:

    widths: bytes per element of each value.
    sizes: bytes of each value.
    flops: FLOPs of each node in forward.
    kept: bytes that each node saves for backward.
    scores: by node index, bytes of attention scores or logits that the node moves additionally.
    loops: by node index, the work of each loop, without the bytes that the loop saves.
    """
    gradient = differentiable_values(graph)
    added_biases = frozenset(bias_additions(graph).values())
    found = []
    nodes = zip(graph.nodes, op_instances(graph), flops, kept, strict=True)
    for index, (node, use, count, kept_bytes) in enumerate(nodes):
        if index in loops:
            found.append(replace(loops[index], kept_bytes=kept_bytes))
            continue
        read = {name: sizes[name] for name in node.inputs if name}
        written = sum(sizes[name] for name in node.outputs if name)
        moved = float(sum(read.values()) + (2 * use.row.kernels - 1) * written)
        cleared = 0.0
        if use.row.kind == "memory":
            # A copy reads at most the bytes that it writes: an embedding reads only the rows that
            # it returns. Its gradient has the size of the full table, however, and backward writes
            # zeros to all rows that were not read.
            moved = float(sum(min(size, written) for size in read.values()) + written)
            cleared = sum(
                max(0.0, size - written) for name, size in read.items() if name in gradient
            )
        moved = 0 if use.row.kind == "view" else moved + scores.get(index, 0)
        share = 0.0
        if use.row.differentiable and not gradient.isdisjoint(node.inputs):
            share = _backward_fraction(node, use, gradient)
        operators = 0.0 if index in added_biases else float(use.row.kernels)
        found.append(
            NodeCost(
                kind=use.row.kind,
                forward_flops=count,
                backward_flops=use.row.backward * count * share,
                forward_bytes=moved,
                backward_bytes=(use.row.backward * moved + cleared) * share,
                kept_bytes=kept_bytes,
                launches=use.row.kernels,
                operators=operators,
                backward_operators=BACKWARD_OPERATORS * operators if share else 0.0,
                product_rate=_UNALIGNED_RATE if _is_unaligned(graph, node, use, widths) else 1.0,
                recomputed_flops=use.row.recomputes * count if share else 0.0,
            )
        )
    return tuple(found)


_ALIGNMENT: Final = 8
"""Number of elements. A matmul uses slow kernels if the row length of one of its 16-bit matrices is
not a multiple of this number.
"""
_UNALIGNED_RATE: Final = 0.25
"""Rate of a matmul with an unaligned 16-bit matrix, as a fraction of the aligned rate.

Measured on one H200 with torch 2.11: the three matmuls of a loss over 50,257 classes (8,192 rows of
2,048 features, bf16) take 13 ms each. This is 0.17 of the rate of a large aligned matmul. For
aligned matmuls, the built-in cluster `h200` assumes 0.65 of the peak.
"""


def _is_unaligned(graph: Graph, node: Node, use: OpInstance, widths: Mapping[str, int]) -> bool:
    """True if `node` is a matmul that reads or writes a 16-bit matrix whose row length is not a
    multiple of `_ALIGNMENT`.

    The left operand and the result are checked. The right operand needs no check, because its rows
    are as long as the rows of one of these two. A cross-entropy that computes its logits itself is
    not checked. `widths` contains the bytes per element of each value.
    """
    if use.row.kind != "matmul" or use.row.name == LINEAR_CROSS_ENTROPY:
        return False
    for name in (node.inputs[0], node.outputs[0]):
        value = graph.type_of(name)
        if (
            value.dtype.is_floating
            and widths[name] == 2
            and value.shape
            and value.shape[-1] % _ALIGNMENT
        ):
            return True
    return False


def _extra_score_bytes(graph: Graph) -> dict[int, int]:
    """Return, by node index, the additional bytes that a node moves because it stores attention
    scores or logits in fp32.

    The nodes are each cross-entropy that computes its logits itself, and each attention that is
    computed operator by operator because no fused kernel supports it on any device.
    """
    own = (
        (index, use)
        for index, use in enumerate(op_instances(graph))
        if use.row.name == LINEAR_CROSS_ENTROPY
    )
    found = {
        index: _PASSES * 4 * math.prod(local_label_and_class_counts(use.space, {}))
        for index, use in own
    }
    return found | {
        index: _STEPS * each.tensor.bytes for index, each in attention_tensors(graph).items()
    }


def _backward_fraction(node: Node, use: OpInstance, gradient: Set[str]) -> float:
    """Return the fraction of a node's full backward that runs, because not all of its operands need
    gradients. `gradient` contains the values that need one.

    The backward of a matmul or convolution has one matmul or convolution per operand that needs a
    gradient. That of a cross-entropy that computes its logits itself has another matmul, which
    recomputes the logits. The backward of other operators counts in full.
    """
    if use.row.name == LINEAR_CROSS_ENTROPY:
        return (1 + sum(node.inputs[place] in gradient for place in (0, WEIGHT_OPERAND))) / 3
    operands = saved_factors(node, use) if use.row.kind in ("matmul", "convolution") else ()
    return sum(name in gradient for name in operands) / len(operands) if operands else 1.0


def saved_factors(node: Node, use: OpInstance) -> tuple[str, ...]:
    """Return the operands of a node that its operator saves because the gradients of other operands
    depend on them. A bias or a mask is not among them.
    """
    keeps = use.row.keeps
    return tuple(
        name
        for place, name in enumerate(node.inputs)
        if name and ("*" in keeps or str(place) in keeps)
    )
