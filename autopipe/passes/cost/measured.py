"""Costs from measurements: the time of a node is the measured time of its operation, on full
tensors and under each split that was measured.

The time of an operation that was not measured is extrapolated: the time of the roofline model
multiplied by the ratio of measured to roofline time of the same operator. If the operator was not
measured, the ratio is that of its class of operators, for example all matmuls; if the class was not
measured, the ratio is that of all measurements.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopipe.ir.attention_kernels import min_cuda_capability
from autopipe.ir.batch import resize_batch
from autopipe.ir.cluster import Cluster, Device, Level, Link
from autopipe.ir.equality import node_labels
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import is_even_split
from autopipe.ir.measured_costs import (
    P2P_MEASUREMENTS,
    Costs,
    DeviceCosts,
    ExchangeCost,
    Operation,
    OperationCost,
    OperationSample,
    operation_of,
)
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.operator import Signature
from autopipe.ir.placement import Split
from autopipe.ir.plan import CostCoverage
from autopipe.ir.problem import MeasuredNodeTime, NodeCost, Problem
from autopipe.ir.space import AxisKind
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.analysis.input_ranges import input_ranges
from autopipe.passes.analysis.operators import bias_additions, op_instances
from autopipe.passes.analysis.resharding import node_layouts
from autopipe.passes.cost.fusion import fused_work
from autopipe.passes.cost.roofline import node_seconds, roofline_costs

Splits = tuple[Split, ...]


class Operations:
    """The operations to measure for the nodes of a graph at one precision. An operation is an
    operator with the types and shapes of its operands, full or as one device's shards.
    """

    def __init__(self, graph: Graph, precision: str) -> None:
        self.graph = graph
        self.precision = precision
        self.uses = op_instances(graph)
        self._labels = node_labels(graph)
        self._gradients = differentiable_values(graph)
        self.additions = bias_additions(graph)
        """By node of a matmul or convolution: the addition of its bias, which generated code
        computes in the same call.
        """
        self.absorbed = frozenset(self.additions.values())
        """Nodes that generated code computes in the call of another node."""

    def key(self, index: int) -> Hashable:
        """Return a key of node `index`. Nodes with equal keys have equal operations."""
        addition = self.additions.get(index)
        more = (
            None
            if addition is None
            else (self._labels[addition], self._gradient_operands(addition))
        )
        return self._labels[index], self._gradient_operands(index), more

    def measurable_splits(self, index: int, degrees: Sequence[int]) -> Iterator[Splits]:
        """Yield the splits of node `index` along one axis, with a degree of `degrees`, under which
        each device computes its part of the node without communication. If the node sums over the
        axis, the partial sums of the devices are not reduced.
        """
        space = self.uses[index].space
        windowed = {each.axis for each in space.windows}
        for axis in space.axes:
            if (
                axis.kind not in (AxisKind.PARALLEL, AxisKind.SUM, AxisKind.MEAN)
                or axis.name in windowed
            ):
                continue
            for degree in degrees:
                if (
                    degree > 1
                    and axis.size % degree == 0
                    and is_even_split(space, axis.name, degree)
                ):
                    yield (Split(axis.name, degree),)

    def operation(self, index: int, splits: Splits = ()) -> Operation:
        """Return the operation that one device computes for node `index` under `splits`; () is the
        full node. If the node's call also adds a bias, the operation includes the addition.
        """
        own = self._local_signature(index, splits)
        operation = operation_of(own, self._gradient_operands(index), self.precision)
        bias = self._bias_addition(index, splits, own)
        if bias is None:
            return operation
        addition, place = bias
        flows = addition.node.inputs[place] in self._gradients
        return replace(
            operation,
            operator=f"{operation.operator}+{addition.node.op}",
            operands=(*operation.operands, operation_of(addition, (), "").operands[place]),
            gradients=(*operation.gradients, *((len(operation.operands),) if flows else ())),
        )

    def sample(self, index: int, work: NodeCost, splits: Splits = ()) -> OperationSample:
        """Return the input with which the profiler measures the operation of node `index` under
        `splits`: its operators, and all that is needed to generate operands. `work` is the work of
        the full node.
        """
        share = 1.0 / splits[0].degree if splits else 1.0
        own = self._local_signature(index, splits)
        bias = self._bias_addition(index, splits, own)
        signatures = (own,) if bias is None else (own, bias[0])
        read = [name for each in signatures for name in each.node.inputs]
        operands = {value.name: value for value in own.operands if value is not None}
        results = tuple(value for value in own.results if value is not None)
        alone = Graph(
            own.node.name, own.opset, tuple(operands.values()), (), (), (own.node,), (), results
        )
        below = {
            each.value.name: each.below
            for each in input_ranges(alone)
            if each.below is not None and each.value.dtype.is_integer
        }
        return OperationSample(
            operation=self.operation(index, splits),
            signatures=signatures,
            splits=splits,
            below=tuple(below.items()),
            wanted=tuple(name for name in read if name in self._gradients),
            parameters=tuple(name for name in read if self.graph.parameter(name) is not None),
            kind=work.kind,
            flops=(work.forward_flops * share, work.backward_flops * share),
            moved_bytes=(work.forward_bytes * share, work.backward_bytes * share),
        )

    def _gradient_operands(self, index: int) -> tuple[int, ...]:
        """Return the positions of the operands whose gradients the backward of node `index`
        computes.
        """
        node = self.graph.nodes[index]
        if self._gradients.isdisjoint(node.outputs):
            return ()
        return tuple(place for place, name in enumerate(node.inputs) if name in self._gradients)

    def _local_signature(self, index: int, splits: Splits) -> Signature:
        """Return the operator of node `index` with the types and shapes of one device's operands
        and results under `splits`.
        """
        signature = signature_of(self.graph, self.graph.nodes[index])
        if not splits:
            return signature
        form = node_layouts(self.graph, index, self.uses[index].space, splits, splits[0].degree)
        operands, results = (
            tuple(
                None
                if value is None or layout is None
                else replace(value, shape=layout.local_shape())
                for value, layout in zip(values, layouts, strict=True)
            )
            for values, layouts in (
                (signature.operands, form.operands),
                (signature.results, form.results),
            )
        )
        return signature.sharded(operands, results)

    def _bias_addition(
        self, index: int, splits: Splits, product: Signature
    ) -> tuple[Signature, int] | None:
        """Return (addition, position): the addition of a bias that runs in the call of node
        `index`, and the position of the bias among the operands of the addition.

        None if the call adds no bias, or if `splits` split an axis over which the node sums. Its
        partial sums must then be reduced before the addition. `product` is the operator of the node
        with one device's shapes.
        """
        addition = self.additions.get(index)
        if addition is None or any(
            self.uses[index].space.axis(each.axis).kind is AxisKind.SUM for each in splits
        ):
            return None
        whole = signature_of(self.graph, self.graph.nodes[addition])
        result = product.result()
        place = 1 if whole.operand(0).name == result.name else 0
        bias = replace(whole.operand(place), shape=result.shape[-1:])
        operands = (result, bias) if place else (bias, result)
        results = (replace(whole.result(), shape=result.shape),)
        return replace(whole, operands=operands, results=results, constants=(None, None)), place


_MAX_MEASURED_DEGREE = 64
"""Maximum degree of a split whose measured time is used. Times at larger degrees are extrapolated
with the roofline model.
"""


@memoize(MAX_CACHED_GRAPHS)
def costed_work(
    graph: Graph, precision: str, cluster: Cluster, costs: Costs | None, compiled: bool = False
) -> tuple[NodeCost, ...]:
    """Return the work of each node at `precision`, with its measured times on the device types of
    `cluster` if there are measured `costs`.

    If `compiled` is true and `costs` is None, the work is that under `torch.compile`, which fuses
    operators. With measured costs `compiled` has no effect, because measurements are made without
    `torch.compile`.

    Raises ConfigurationError if `costs` lacks a device type of the cluster.
    """
    work = roofline_costs(graph, precision, min_cuda_capability(cluster))
    if costs is None:
        return fused_work(graph, precision, work) if compiled else work
    lookups = [
        _MeasuredTimes(device, _device_costs(costs, cluster, device), precision)
        for device in cluster.kinds
    ]
    degrees = range(2, min(cluster.size, _MAX_MEASURED_DEGREE) + 1)
    operations = Operations(graph, precision)
    products = {addition: product for product, addition in operations.additions.items()}
    known: dict[Hashable, tuple[MeasuredNodeTime, ...]] = {}
    found = []
    for index, each in enumerate(work):
        product = products.get(index)
        key = operations.key(index), None if product is None else operations.key(product)
        if key not in known:
            place = index if product is None else product
            cuts = [(), *operations.measurable_splits(place, degrees)]
            shares = [
                (1 / (cut[0].degree if cut else 1), operations.operation(place, cut))
                for cut in cuts
            ]
            own = (lookup.measured(each, shares) for lookup in lookups)
            # The measured time of a matmul includes the addition of its bias if one call computes
            # both, so the time of the addition's node is 0.
            known[key] = tuple(
                own if product is None else (replace(one, points=((1.0, 0.0, 0.0),)) for one in own)
            )
        found.append(replace(each, measured=known[key]))
    return tuple(found)


def measured_cluster(cluster: Cluster, costs: Costs) -> Cluster:
    """Return `cluster` with the times that `costs` contains: those of tasks, of the host, and of
    messages and collectives inside a node. Times that were not measured stay those of `cluster`.

    Raises ConfigurationError if `costs` lacks a device type of the cluster.
    """
    own = {device: _device_costs(costs, cluster, device) for device in cluster.kinds}
    kinds = {}
    for device, found in own.items():
        messages = {
            each.kind: each.fit for each in found.exchanges if each.kind in P2P_MEASUREMENTS
        }
        kinds[device] = replace(
            device,
            tasks=found.tasks or device.tasks,
            collectives=tuple(
                each for each in found.exchanges if each.kind not in P2P_MEASUREMENTS
            ),
            post=messages.get("post"),
            follow=messages.get("follow"),
            host_launch_s=device.host_launch_s
            if found.host_launch_s is None
            else found.host_launch_s,
        )
    devices = tuple(kinds[device] for device in cluster.devices)

    def with_measured_link(
        levels: tuple[Level, ...], exchanges: Sequence[ExchangeCost]
    ) -> tuple[Level, ...]:
        """Return `levels` with the measured latency and bandwidth of messages at the innermost
        level; unchanged if `exchanges` contains no such measurement.
        """
        sent = next(
            (each.fit for each in exchanges if each.kind == "send" and each.fit.per_byte_s > 0),
            None,
        )
        if sent is None:
            return levels
        return (replace(levels[0], link=Link(sent.fixed_s, 1 / sent.per_byte_s)), *levels[1:])

    if not cluster.groups:
        exchanges = next((each.exchanges for each in own.values() if each.exchanges), ())
        return replace(
            cluster, devices=devices, levels=with_measured_link(cluster.levels, exchanges)
        )
    groups = []
    first = 0
    for group in cluster.groups:
        groups.append(
            replace(
                group,
                levels=with_measured_link(group.levels, own[cluster.devices[first]].exchanges),
            )
        )
        first += group.size
    return replace(cluster, devices=devices, groups=tuple(groups))


def cost_coverage(problem: Problem) -> CostCoverage | None:
    """Return how many nodes have measured times on all device types, and how many have extrapolated
    times; None if the problem has no measured costs.
    """
    if problem.costs is None:
        return None
    known = sum(all(each.known for each in work.measured) for work in problem.work)
    return CostCoverage(known, len(problem.work) - known)


def _device_costs(costs: Costs, cluster: Cluster, device: Device) -> DeviceCosts:
    """Return the measured costs of the device type `device`. Raises ConfigurationError if there are
    none.
    """
    found = costs.of(device.name)
    # `Costs.of` returns the only entry of a file for any name, so that a device type named
    # differently in the cluster can use it. In a cluster of several types, the entry could belong
    # to another type, so it is rejected.
    if found is None or (found.device != device.name and len(cluster.kinds) > 1):
        have = ", ".join(repr(each.device) for each in costs.devices)
        raise ConfigurationError(
            f"the measured costs lack device {device.name!r}",
            hint=f"use costs of this device; the file contains costs of {have}",
            where="costs",
        )
    return found


class _MeasuredTimes:
    """Measured times of operations on one device type, and the ratios of measured time to the time
    of the roofline model.
    """

    def __init__(self, device: Device, costs: DeviceCosts, precision: str) -> None:
        entries = [
            each for each in costs.operations if each.operation.precision == precision
        ] or costs.operations
        self.device = device
        self.precision = precision
        self.forward = {
            replace(each.operation, gradients=()): each.forward.seconds for each in costs.operations
        }
        """Seconds of forward by operation, independent of which gradients backward computes."""
        self.backward = {
            each.operation: each.backward.seconds for each in costs.operations if each.backward
        }
        self.scales = _roofline_ratios(entries, device, precision)
        views = [each for each in entries if each.kind == "view"]
        forward = [each.forward.seconds for each in views]
        backward = [each.backward.seconds for each in views if each.backward]
        self.view = float(np.mean(forward or [0.0])), float(np.mean(backward or [0.0]))
        """Mean measured seconds of a view in forward and in backward. They are stored separately
        because no ratio exists: the time of a view in the roofline model is 0.
        """

    def measured(
        self, work: NodeCost, shares: Sequence[tuple[float, Operation]]
    ) -> MeasuredNodeTime:
        """Return the times of a node on the device type, by fraction of the node that one device
        computes.

        `shares` are pairs (fraction of the node, operation of this fraction); the first pair is the
        full node. If the full node was not measured, the result contains a factor for the time of
        the roofline model instead of times. An unmeasured view gets the mean time of the measured
        views.
        """
        by_share: dict[float, list[tuple[float, float]]] = {}
        for share, operation in shares:
            found = self._seconds(work, share, operation)
            if found is not None:
                by_share.setdefault(share, []).append(found)
        name = self.device.name
        if 1.0 not in by_share:
            if work.kind == "view":
                return MeasuredNodeTime(
                    name,
                    False,
                    ((1.0, self.view[0], self.view[1] if work.backward_flops else 0.0),),
                )
            return MeasuredNodeTime(name, False, scale=self.scale(shares[0][1].operator, work.kind))
        points = sorted(
            (share, *np.mean(each, axis=0).tolist()) for share, each in by_share.items()
        )
        # Fractions below the smallest measured one would get its time, because interpolation does
        # not extrapolate. Add a point far below it whose time is scaled with the roofline model.
        least, forward, backward = points[0]
        shares_below = np.array([least / _MAX_MEASURED_DEGREE, least])
        ratios = [
            float(each[0] / each[1]) if each[1] else 1.0
            for each in node_seconds([work, work], self.device, self.precision, shares_below)
        ]
        below = least / _MAX_MEASURED_DEGREE, forward * ratios[0], backward * ratios[1]
        return MeasuredNodeTime(name, True, (below, *map(tuple, points)))

    def _seconds(
        self, work: NodeCost, share: float, operation: Operation
    ) -> tuple[float, float] | None:
        """Return the seconds (forward, backward) of `operation`, which is the fraction `share` of a
        node; None if its forward was not measured.

        If only forward was measured, backward is extrapolated with the roofline model.
        """
        forward = self.forward.get(replace(operation, gradients=()))
        if forward is None:
            return None
        backward = self.backward.get(operation)
        if backward is None:
            _, judged = node_seconds([work], self.device, self.precision, share)
            backward = float(judged[0]) * self.scale(operation.operator, work.kind)[1]
        return forward, backward

    def scale(self, operator: str, kind: str) -> tuple[float, float]:
        """Return the ratios (forward, backward) of measured to roofline time for operator
        `operator` of class `kind`; (1, 1) without any measurement.
        """
        return (
            self.scales.get(operator)
            or self.scales.get(f"class {kind}")
            or self.scales.get("", (1.0, 1.0))
        )


def _roofline_ratios(
    entries: Sequence[OperationCost], device: Device, precision: str
) -> dict[str, tuple[float, float]]:
    """Return the ratios (forward, backward) of measured to roofline time by operator, by class of
    operators, and for all measurements together.

    The keys are the name of an operator, `class matmul` for the class of matmuls, and "" for all
    measurements. A ratio is a quotient of sums, so that long operations have a large weight. It is
    1 if one of the sums is 0.
    """
    sums: dict[str, np.ndarray] = {}
    for each in entries:
        if each.kind == "view":
            continue
        work = NodeCost(
            each.kind, each.flops[0], each.flops[1], each.moved_bytes[0], each.moved_bytes[1], 0
        )
        forward, backward = (float(found[0]) for found in node_seconds([work], device, precision))
        own = [each.forward.seconds, forward, 0.0, 0.0]
        if each.backward is not None:
            own[2:] = [each.backward.seconds, backward]
        for name in (each.operation.operator, f"class {each.kind}", ""):
            sums[name] = sums.get(name, np.zeros(4)) + own

    def ratio(measured: float, expected: float) -> float:
        """Return the quotient of two times; 1 if one of them is 0."""
        return measured / expected if measured and expected else 1.0

    return {name: (ratio(*each[:2]), ratio(*each[2:])) for name, each in sums.items()}


@memoize(MAX_CACHED_GRAPHS)
def with_micro_batch_size(problem: Problem, size: int) -> Problem:
    """Return the problem with micro-batches of `size` samples and an unchanged global batch.

    Nodes keep their indices. Raises ConfigurationError if `size` does not divide the micro-batch
    size of the problem, and ModelError if the graph cannot be divided by samples (see
    `resize_batch`).
    """
    if size == problem.micro_batch_size:
        return problem
    graph = resize_batch(problem.graph, size)
    return replace(
        problem,
        graph=graph,
        work=costed_work(
            graph, problem.precision, problem.cluster, problem.costs, problem.compiled
        ),
        micro_batches=problem.batch_size // size,
        micro_batch_sizes=tuple(each for each in problem.micro_batch_sizes if size % each == 0),
    )
