"""Costs from measurements: the time of a node is the measured time of its operation, on full
tensors and under each split that was measured.

The time of an operation that was not measured is extrapolated: the roofline's time multiplied by
the ratio of measured to roofline time of the same operator. If the operator was not measured, the
ratio is that of its class of operators; if the class was not measured, the ratio is that of all
measurements.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopipe.ir.attention_kernels import min_cuda_capability
from autopipe.ir.batch import resize_batch
from autopipe.ir.cluster import Cluster, Device, Level, Link
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
from autopipe.passes.analysis.operators import bias_additions, uses_of
from autopipe.passes.analysis.resharding import node_layouts
from autopipe.passes.cost.fusion import fused
from autopipe.passes.cost.roofline import annotate, node_seconds

Splits = tuple[Split, ...]


class Operations:
    """The measurable operations of a graph's nodes at a precision, on full tensors and under
    splits.
    """

    def __init__(self, graph: Graph, precision: str) -> None:
        self.graph = graph
        self.precision = precision
        self.uses = uses_of(graph)
        self._gradients = differentiable_values(graph)
        self.additions = bias_additions(graph)
        """By node of a matmul or convolution: the addition of its bias, which generated code
        computes in the same call.
        """
        self.absorbed = frozenset(self.additions.values())
        """Nodes that generated code computes in the call of another node."""

    def key(self, index: int) -> Hashable:
        """Return a key that is equal for nodes with equal operations."""
        addition = self.additions.get(index)
        more = None if addition is None else (id(self.uses[addition]), self._flowing(addition))
        return id(self.uses[index]), self._flowing(index), more

    def cuts(self, index: int, degrees: Sequence[int]) -> Iterator[Splits]:
        """Yield the splits of a node along one axis, with a degree of `degrees`, under which each
        device computes its shard without communication.
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
        """Return the operation that one device computes for a node under `splits`."""
        own = self._local(index, splits)
        operation = operation_of(own, self._flowing(index), self.precision)
        bias = self._bias(index, splits, own)
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
        """Return a node to measure under `splits`. `work` is the work of the full node."""
        share = 1.0 / splits[0].degree if splits else 1.0
        own = self._local(index, splits)
        bias = self._bias(index, splits, own)
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

    def _flowing(self, index: int) -> tuple[int, ...]:
        """Return the indices of the operands whose gradients the node's backward computes."""
        node = self.graph.nodes[index]
        if self._gradients.isdisjoint(node.outputs):
            return ()
        return tuple(place for place, name in enumerate(node.inputs) if name in self._gradients)

    def _local(self, index: int, splits: Splits) -> Signature:
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

    def _bias(self, index: int, splits: Splits, product: Signature) -> tuple[Signature, int] | None:
        """Return (addition, index of the bias among its operands) for a node whose bias is added in
        the same call; None if there is none, or if a split of a summed axis requires a reduction
        first.
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
"""Maximum degree of splits whose measurements are used. Times of larger degrees are extrapolated by
the roofline.
"""


@memoize(MAX_CACHED_GRAPHS)
def costed_work(
    graph: Graph, precision: str, cluster: Cluster, costs: Costs | None, compiled: bool = False
) -> tuple[NodeCost, ...]:
    """Return the work of each node, with its measured times on the device types of `cluster`.

    Measurements were made without `torch.compile`. `compiled` fuses the work of operators only if
    there are no measurements (`costs` is None).

    Raises ConfigurationError if `costs` lacks a device type of the cluster.
    """
    work = annotate(graph, precision, min_cuda_capability(cluster))
    if costs is None:
        return fused(graph, precision, work) if compiled else work
    lookups = [
        _Lookup(device, _found(costs, cluster, device), precision) for device in cluster.kinds
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
            cuts = [(), *operations.cuts(place, degrees)]
            shares = [
                (1 / (cut[0].degree if cut else 1), operations.operation(place, cut))
                for cut in cuts
            ]
            own = (lookup.measured(each, shares) for lookup in lookups)
            # An addition that runs in the call of another node takes no time of its own.
            known[key] = tuple(
                own if product is None else (replace(one, points=((1.0, 0.0, 0.0),)) for one in own)
            )
        found.append(replace(each, measured=known[key]))
    return tuple(found)


def measured_cluster(cluster: Cluster, costs: Costs) -> Cluster:
    """Return the cluster with the measured times of tasks, of the host, and of messages and
    collectives inside a node.

    Raises ConfigurationError if `costs` lacks a device type of the cluster.
    """
    own = {device: _found(costs, cluster, device) for device in cluster.kinds}
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

    def measured(levels: tuple[Level, ...], exchanges: Sequence[ExchangeCost]) -> tuple[Level, ...]:
        """Return the levels with the measured latency and bandwidth of messages inside a node."""
        sent = next(
            (each.fit for each in exchanges if each.kind == "send" and each.fit.per_byte_s > 0),
            None,
        )
        if sent is None:
            return levels
        return (replace(levels[0], link=Link(sent.fixed_s, 1 / sent.per_byte_s)), *levels[1:])

    if not cluster.groups:
        exchanges = next((each.exchanges for each in own.values() if each.exchanges), ())
        return replace(cluster, devices=devices, levels=measured(cluster.levels, exchanges))
    groups = []
    first = 0
    for group in cluster.groups:
        groups.append(
            replace(group, levels=measured(group.levels, own[cluster.devices[first]].exchanges))
        )
        first += group.size
    return replace(cluster, devices=devices, groups=tuple(groups))


def coverage(problem: Problem) -> CostCoverage | None:
    """Return the numbers of nodes with measured and with extrapolated times; None without
    measurements.
    """
    if problem.costs is None:
        return None
    known = sum(all(each.known for each in work.measured) for work in problem.work)
    return CostCoverage(known, len(problem.work) - known)


def _found(costs: Costs, cluster: Cluster, device: Device) -> DeviceCosts:
    found = costs.of(device.name)
    # Measurements of one device serve a device type of any name. In a cluster with several types,
    # the names must be equal.
    if found is None or (found.device != device.name and len(cluster.kinds) > 1):
        have = ", ".join(repr(each.device) for each in costs.devices)
        raise ConfigurationError(
            f"the measured costs lack device {device.name!r}",
            hint=f"use costs of this device; the file contains costs of {have}",
            where="costs",
        )
    return found


class _Lookup:
    """Measured times on one device type, by operation, and their ratios to the roofline."""

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
        self.scales = _scales(entries, device, precision)
        views = [each for each in entries if each.kind == "view"]
        forward = [each.forward.seconds for each in views]
        backward = [each.backward.seconds for each in views if each.backward]
        self.view = float(np.mean(forward or [0.0])), float(np.mean(backward or [0.0]))
        """Mean measured seconds of a view in forward and in backward. The roofline's time is 0."""

    def measured(
        self, work: NodeCost, shares: Sequence[tuple[float, Operation]]
    ) -> MeasuredNodeTime:
        """Return the measured times of a node on the device.

        `shares` are pairs (fraction of the node, operation); the first pair is the full node. If
        the full node was not measured, the result has a factor on the roofline's time instead of
        times.
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
        # Add a point at a much smaller fraction than the smallest measured one, extrapolated by the
        # roofline.
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
        """Return the seconds of forward and backward, or None if forward was not measured.

        If only forward was measured, backward is extrapolated from the roofline.
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
        """Return the ratios of measured to roofline time for forward and for backward."""
        return (
            self.scales.get(operator)
            or self.scales.get(f"class {kind}")
            or self.scales.get("", (1.0, 1.0))
        )


def _scales(
    entries: Sequence[OperationCost], device: Device, precision: str
) -> dict[str, tuple[float, float]]:
    """Return the ratios (forward, backward) of measured to roofline time.

    The keys are an operator, a class of operators as `class matmul`, and "" for all measurements. A
    ratio is a quotient of sums, so that long operations have a large weight.
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
        return measured / expected if measured and expected else 1.0

    return {name: (ratio(*each[:2]), ratio(*each[2:])) for name, each in sums.items()}


@memoize(MAX_CACHED_GRAPHS)
def resized(problem: Problem, size: int) -> Problem:
    """Return the problem with micro-batches of `size` samples and an unchanged batch.

    Nodes keep their indices. Raises ConfigurationError if `size` does not divide the micro-batch,
    and ModelError if the graph cannot be divided by samples (see `resize_batch`).
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
