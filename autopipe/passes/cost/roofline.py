"""Work of each node, and the seconds a device takes for it: the slower of computing and moving
bytes, plus the launch.

Williams, Waterman, Patterson, "Roofline", Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Final

import numpy as np

from autopipe.ir.attention_kernels import Capability
from autopipe.ir.cluster import Device
from autopipe.ir.graph import Graph, Node
from autopipe.ir.measured_costs import Affine
from autopipe.ir.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, WEIGHT, score_extents
from autopipe.ir.ops.loop import run_axes
from autopipe.ir.problem import BACKWARD_OPERATORS, Problem, Work
from autopipe.passes.analysis.gradients import (
    attention_tensors,
    differentiable_values,
    kept_values,
    trained_body,
)
from autopipe.passes.analysis.operators import (
    PRODUCT_KINDS,
    OpInstance,
    SampleAxes,
    bias_additions,
    element_bytes,
    uses_of,
)
from autopipe.passes.analysis.stage_nodes import live_nodes

Seconds = np.ndarray
"""Seconds, one entry a node."""


def node_seconds(
    work: Sequence[Work], device: Device, precision: str, shares: float | np.ndarray = 1.0
) -> tuple[Seconds, Seconds]:
    """Seconds of forward and of backward of each node on `device`, which does `shares` of it (1 /
    degree).

    Products use the peak of `precision`, other operators that of fp32. Views take no time, and no
    backward of a node without gradients does. What was measured on the device counts in place of
    that (`Work.measured`); between measured shares time is linear. Raises ConfigurationError where
    the device states no figure for an operator class.
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
    # A product launches a kernel for each factor's gradient: two where backward computes twice what
    # forward does. What is one kernel forwards together with others is one backwards, too.
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
    """FLOP/s, bytes/s and seconds a launch for one kind of operator."""
    if kind == "view":
        return np.inf, np.inf, 0.0
    fraction = device.fraction(kind)
    peak = device.peak(precision if kind in PRODUCT_KINDS else "fp32")
    return peak * fraction, device.bandwidth_bytes_per_s * fraction, device.launch_latency_s


def mean_seconds(problem: Problem) -> tuple[Seconds, Seconds]:
    """Seconds of forward and of backward of each whole node, on average over the cluster's kinds of
    devices.

    For what weighs nodes against one another before it is known which device has them.
    """
    kinds = problem.cluster.kinds
    seconds = [node_seconds(problem.work, device, problem.precision) for device in kinds]
    forward, backward = (np.mean([each[phase] for each in seconds], axis=0) for phase in (0, 1))
    return forward, backward


class StepSeconds:
    """Seconds of a micro-batch for each node that a step runs, forward and backward, on devices
    that share every node.

    A part of a node, of its samples included, is counted as that part of its work, parameters read
    included, and a launch: never too much.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._is_live = np.isin(
            np.arange(len(problem.graph.nodes)), live_nodes(problem.graph, problem.wanted)
        )
        self._known: dict[tuple[tuple[Device, ...], int], Seconds] = {}

    def of(self, kinds: tuple[Device, ...], parts: int) -> Seconds:
        """Of one of `parts` parts of each node, on the fastest of some kinds of devices; 0 for
        nodes no step runs.
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


def accumulate_seconds(device: Device, gradient_bytes: float, tensors: int = 1) -> float:
    """Seconds of adding a micro-batch's gradients to those before."""
    starts = 0.0 if device.tasks is None else device.tasks.accumulate.per_tensor_s * tensors
    return starts + accumulate_per_byte(device) * gradient_bytes


def accumulate_per_byte(device: Device) -> float:
    """Seconds a byte of that: two operands read, their sum written."""
    if device.tasks is not None:
        return device.tasks.accumulate.per_byte_s
    return 3 / (device.bandwidth_bytes_per_s * device.fraction("elementwise"))


def update_seconds(device: Device, parameter_bytes: float, states: int, tensors: int = 1) -> float:
    """Seconds of an optimizer's update of parameters; none where there are none."""
    if not parameter_bytes:
        return 0.0
    starts = 0.0 if device.tasks is None else device.tasks.updates[states].per_tensor_s * tensors
    return starts + update_line(device, states).seconds(parameter_bytes)


def cast_per_byte(device: Device) -> float:
    """Seconds a byte of a parameter's 16-bit copy: two read for each that is written."""
    return 3 / (device.bandwidth_bytes_per_s * device.fraction("elementwise"))


def update_line(device: Device, states: int) -> Affine:
    """The same by bytes: parameter and states read and written, gradient read, in one fused
    launch.
    """
    if device.tasks is not None:
        return Affine(device.tasks.update_s, device.tasks.updates[states].per_byte_s)
    bandwidth = device.bandwidth_bytes_per_s * device.fraction("elementwise")
    return Affine(device.launch_latency_s, (3 + 2 * states) / bandwidth)


def task_seconds(device: Device) -> tuple[float, float]:
    """Seconds that a forward and a backward take besides their operators, where that was
    measured.
    """
    return (0.0, 0.0) if device.tasks is None else (device.tasks.forward_s, device.tasks.backward_s)


def posting_seconds(device: Device, messages: int, size_bytes: float) -> float:
    """CPU seconds that a task's messages take, of these bytes together, where that was measured."""
    if device.post is None or not messages:
        return 0.0
    following = device.post if device.follow is None else device.follow
    return device.post.seconds(size_bytes) + following.fixed_s * (messages - 1)


_FUSED: Mapping[int, float] = {}
_NO_LOOPS: Mapping[int, Work] = {}
_PASSES = 4
"""How often the math kernel of attention writes or reads all scores: a product, a softmax and a
product after it. So does a cross-entropy that makes its scores itself: a product, the largest, and
exponentials that it adds up.
"""

_STEPS = 12
"""The same of one computed step by step: a cap by three operations, and a mask, each of which reads
and writes them.
"""


def annotate(
    graph: Graph, precision: str = "fp32", capability: Capability | None = None
) -> tuple[Work, ...]:
    """The work of every node, in order, with the widths its tensors have at `precision`, by the
    kernels of GPUs of `capability`.

    Backward of a product costs one product for each factor that needs a gradient, so the first
    layer's is cheaper. Raises ModelError for an operator without a row.
    """
    uses = uses_of(graph)
    widths = element_bytes(graph, precision)
    sizes = {name: float(width * graph.type_of(name).elements) for name, width in widths.items()}
    kept = []
    seen = set[tuple[str, int]]()
    # Bytes count at the first node that makes backward keep them.
    for values in kept_values(graph, precision, capability):
        new = {each.key: each.bytes for each in values if each.key not in seen}
        seen |= new.keys()
        kept.append(sum(new.values()))
    beside = attention_tensors(graph, precision, capability)
    scores = {index: _PASSES * each.tensor.bytes for index, each in beside.items() if each.scores}
    loops = {
        index: _runs(graph, node, precision)
        for index, node in enumerate(graph.nodes)
        if node.body is not None
    }
    flops = [use.flops for use in uses]
    return _annotated(graph, widths, sizes, flops, kept, scores | _own_scores(graph), loops)


def annotate_share(
    graph: Graph, samples: SampleAxes, precision: str, share: float
) -> tuple[Work, ...]:
    """The work of every node on `share` of the graph's samples, equal to `annotate` of a graph of
    that size.

    It leaves open what backward keeps.
    """
    widths = element_bytes(graph, precision)
    sizes = {
        name: width * graph.type_of(name).elements * (share if samples.carries(name) else 1.0)
        for name, width in widths.items()
    }
    flops = [
        use.flops * (share if own else 1.0)
        for use, own in zip(samples.uses, samples.batch.nodes, strict=True)
    ]
    scores = {
        index: size * (share if samples.axes[index] else 1.0)
        for index, size in _own_scores(graph).items()
    }
    loops = {
        index: _runs(graph, node, precision, share, samples.axes[index])
        for index, node in enumerate(graph.nodes)
        if node.body is not None
    }
    return _annotated(graph, widths, sizes, flops, [0] * len(flops), scores, loops)


def _runs(
    graph: Graph, node: Node, precision: str, share: float = 1.0, axis: str | None = None
) -> Work:
    """The work of a loop, as often that of its body as it runs, on `share` of its axis `axis`."""
    body = trained_body(graph, node)
    count = node.integer("count")
    cut = next((each for each in run_axes(node) if each.name == axis), None)
    widths = element_bytes(body, precision)
    sizes = {
        name: width
        * body.type_of(name).elements
        * (share if cut is not None and name in cut.dimensions else 1.0)
        for name, width in widths.items()
    }
    flops = [
        use.flops * (share if cut is not None and index in cut.nodes else 1.0)
        for index, use in enumerate(uses_of(body))
    ]
    every = _annotated(body, widths, sizes, flops, [0] * len(flops))
    run = [each for each in every if each.kind != "view"]
    return Work(
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


def _annotated(
    graph: Graph,
    widths: Mapping[str, int],
    sizes: Mapping[str, float],
    flops: Sequence[float],
    kept: Sequence[int],
    scores: Mapping[int, float] = _FUSED,
    loops: Mapping[int, Work] = _NO_LOOPS,
) -> tuple[Work, ...]:
    """Return the work of every node.

    `widths` has the bytes per element of each value, `sizes` its bytes. `flops` and `kept` have the
    FLOPs of each node and the bytes that it saves for backward. `scores` has further bytes that a
    node moves, by its index, and `loops` the work of each loop, without the bytes that it saves.
    """
    gradient = differentiable_values(graph)
    added_biases = frozenset(bias_additions(graph).values())
    found = []
    nodes = zip(graph.nodes, uses_of(graph), flops, kept, strict=True)
    for index, (node, use, count, kept_bytes) in enumerate(nodes):
        if index in loops:
            found.append(replace(loops[index], kept_bytes=kept_bytes))
            continue
        read = {name: sizes[name] for name in node.inputs if name}
        written = sum(sizes[name] for name in node.outputs if name)
        moved = float(sum(read.values()) + (2 * use.row.kernels - 1) * written)
        cleared = 0.0
        if use.row.kind == "memory":
            # Copies read no more than they write: a lookup reads the rows it returns. But the
            # gradient of a table is as large as the table: backward writes zeros where only parts
            # were read.
            moved = float(sum(min(size, written) for size in read.values()) + written)
            cleared = sum(
                max(0.0, size - written) for name, size in read.items() if name in gradient
            )
        moved = 0 if use.row.kind == "view" else moved + scores.get(index, 0)
        share = 0.0
        if use.row.differentiable and not gradient.isdisjoint(node.inputs):
            share = _backward_share(node, use, gradient)
        operators = 0.0 if index in added_biases else float(use.row.kernels)
        found.append(
            Work(
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
"""Elements: 16-bit matrices whose rows are no multiple of it are multiplied by slow kernels."""
_UNALIGNED_RATE: Final = 0.25
"""Fraction of the rate of products that is left if a 16-bit matrix is not aligned.

Measured on one H200 with torch 2.11: the three products of a loss over 50,257 classes (8,192 rows
of 2,048 features, bf16) take 13 ms each, at 0.17 of the rate of a large aligned product; roofline
presets count 0.65 of the peak.
"""


def _is_unaligned(graph: Graph, node: Node, use: OpInstance, widths: Mapping[str, int]) -> bool:
    """True if a product reads or writes a 16-bit matrix whose rows have a length that is no
    multiple of `_ALIGNMENT`.

    Rows of the left factor and of the result count. The right factor is stored by rows of one of
    these two lengths.
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


def _own_scores(graph: Graph) -> dict[int, int]:
    """Bytes moved of all scores, in single precision, of each cross-entropy that makes them itself
    and each attention that no kernel computes, on any device.
    """
    own = (
        (index, use)
        for index, use in enumerate(uses_of(graph))
        if use.row.name == LINEAR_CROSS_ENTROPY
    )
    found = {index: _PASSES * 4 * math.prod(score_extents(use.space, {})) for index, use in own}
    return found | {
        index: _STEPS * each.tensor.bytes for index, each in attention_tensors(graph).items()
    }


def _backward_share(node: Node, use: OpInstance, gradient: Set[str]) -> float:
    """The part of a node's backward that some gradient needs: a product for each factor that has
    one, and where scores are made again a product for them.
    """
    if use.row.name == LINEAR_CROSS_ENTROPY:
        return (1 + sum(node.inputs[place] in gradient for place in (0, WEIGHT))) / 3
    operands = factors(node, use) if use.row.kind in ("matmul", "convolution") else ()
    return sum(name in gradient for name in operands) / len(operands) if operands else 1.0


def factors(node: Node, use: OpInstance) -> tuple[str, ...]:
    """Operands that the gradients of others need; a bias or a mask is none."""
    keeps = use.row.keeps
    return tuple(
        name
        for place, name in enumerate(node.inputs)
        if name and ("*" in keeps or str(place) in keeps)
    )
