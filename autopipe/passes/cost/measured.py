"""Costs from measurements: each node takes what its operation took, at every share that was
measured of it.

What was not measured takes the roofline's seconds times the ratio of measured to roofline of the
same operator; of the same class where there are none of the operator; of all where there are none
of the class.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopipe.ir.attention_kernels import capability_of
from autopipe.ir.batch import rebatched
from autopipe.ir.cluster import Cluster, Device, Level, Link
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import is_even_split
from autopipe.ir.measured_costs import (
    MESSAGES,
    Costs,
    DeviceCosts,
    ExchangeCost,
    Operation,
    OperationCost,
    Sample,
    operation_of,
)
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.operator import Signature
from autopipe.ir.placement import Split
from autopipe.ir.plan import CostCoverage
from autopipe.ir.problem import Measured, Problem, Work
from autopipe.ir.space import AxisKind
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.analysis.input_ranges import input_ranges
from autopipe.passes.analysis.operators import bias_additions, uses_of
from autopipe.passes.analysis.resharding import node_layouts
from autopipe.passes.cost.fusion import fused
from autopipe.passes.cost.roofline import annotate, node_seconds

Splits = tuple[Split, ...]


class Operations:
    """The operations of a graph's nodes at a precision, whole and under splits."""

    def __init__(self, graph: Graph, precision: str) -> None:
        self.graph = graph
        self.precision = precision
        self.uses = uses_of(graph)
        self._gradients = differentiable_values(graph)
        self.additions = bias_additions(graph)
        """Products that code generation computes together with the addition of a bias, and those
        additions.
        """
        self.absorbed = frozenset(self.additions.values())
        """Nodes that are computed as a part of others."""

    def key(self, index: int) -> Hashable:
        """Equal for nodes that are the same operation."""
        addition = self.additions.get(index)
        more = None if addition is None else (id(self.uses[addition]), self._flowing(addition))
        return id(self.uses[index]), self._flowing(index), more

    def cuts(self, index: int, degrees: Sequence[int]) -> Iterator[Splits]:
        """The splits of a node along one axis that leave every device a share which it computes by
        itself.
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

    def sample(self, index: int, work: Work, splits: Splits = ()) -> Sample:
        """A node to be measured, whose whole is `work`."""
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
        return Sample(
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
        """Places of the operands to which a node's backward gives gradients."""
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
        """The addition that is computed together with a product on one device, and the place of its
        bias.
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


_MOST_WAYS = 64
"""Shares are looked up for splits of up to this many ways; smaller ones follow the roofline from
there.
"""


@remembered(GRAPHS)
def costed_work(
    graph: Graph, precision: str, cluster: Cluster, costs: Costs | None, compiled: bool = False
) -> tuple[Work, ...]:
    """The work of every node, in order, with what was measured of it, uncompiled, on the devices of
    `cluster`.

    Raises ConfigurationError where a device of the cluster is not among those of `costs`.
    """
    work = annotate(graph, precision, capability_of(cluster))
    if costs is None:
        return fused(graph, precision, work) if compiled else work
    lookups = [
        _Lookup(device, _found(costs, cluster, device), precision) for device in cluster.kinds
    ]
    degrees = range(2, min(cluster.size, _MOST_WAYS) + 1)
    operations = Operations(graph, precision)
    products = {addition: product for product, addition in operations.additions.items()}
    known: dict[Hashable, tuple[Measured, ...]] = {}
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
            # An addition that its product's call does takes nothing more, whatever the share.
            known[key] = tuple(
                own if product is None else (replace(one, points=((1.0, 0.0, 0.0),)) for one in own)
            )
        found.append(replace(each, measured=known[key]))
    return tuple(found)


def measured_cluster(cluster: Cluster, costs: Costs) -> Cluster:
    """The cluster with what was measured of tasks, the host, and messages and collectives within a
    node.

    Raises ConfigurationError where a device of the cluster is not among those of `costs`.
    """
    own = {device: _found(costs, cluster, device) for device in cluster.kinds}
    kinds = {}
    for device, found in own.items():
        messages = {each.kind: each.fit for each in found.exchanges if each.kind in MESSAGES}
        kinds[device] = replace(
            device,
            tasks=found.tasks or device.tasks,
            collectives=tuple(each for each in found.exchanges if each.kind not in MESSAGES),
            post=messages.get("post"),
            follow=messages.get("follow"),
            host_launch_s=device.host_launch_s
            if found.host_launch_s is None
            else found.host_launch_s,
        )
    devices = tuple(kinds[device] for device in cluster.devices)

    def measured(levels: tuple[Level, ...], exchanges: Sequence[ExchangeCost]) -> tuple[Level, ...]:
        """The levels with what messages within a node were measured to take."""
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
    """How many nodes take what was measured of them; None where nothing was."""
    if problem.costs is None:
        return None
    known = sum(all(each.known for each in work.measured) for work in problem.work)
    return CostCoverage(known, len(problem.work) - known)


def _found(costs: Costs, cluster: Cluster, device: Device) -> DeviceCosts:
    found = costs.of(device.name)
    # One device's costs may have any name, but not where they would be those of several kinds.
    if found is None or (found.device != device.name and len(cluster.kinds) > 1):
        have = ", ".join(repr(each.device) for each in costs.devices)
        raise ConfigurationError(
            f"nothing was measured on device {device.name!r}",
            hint=f"there are costs of {have}",
            where="costs",
        )
    return found


class _Lookup:
    """Measured times on one kind of device, by operation, and the ratio of its roofline to them."""

    def __init__(self, device: Device, costs: DeviceCosts, precision: str) -> None:
        entries = [
            each for each in costs.operations if each.operation.precision == precision
        ] or costs.operations
        self.device = device
        self.precision = precision
        self.forward = {
            replace(each.operation, gradients=()): each.forward.seconds for each in costs.operations
        }
        """Seconds by operation, whatever gradients it gives."""
        self.backward = {
            each.operation: each.backward.seconds for each in costs.operations if each.backward
        }
        self.scales = _scales(entries, device, precision)
        views = [each for each in entries if each.kind == "view"]
        forward = [each.forward.seconds for each in views]
        backward = [each.backward.seconds for each in views if each.backward]
        self.view = float(np.mean(forward or [0.0])), float(np.mean(backward or [0.0]))
        """Seconds of views, for which a roofline has nothing."""

    def measured(self, work: Work, shares: Sequence[tuple[float, Operation]]) -> Measured:
        """Time of a node on the device at the shares that were measured; the first is the whole
        node.
        """
        by_share: dict[float, list[tuple[float, float]]] = {}
        for share, operation in shares:
            found = self._seconds(work, share, operation)
            if found is not None:
                by_share.setdefault(share, []).append(found)
        name = self.device.name
        if 1.0 not in by_share:
            if work.kind == "view":
                return Measured(
                    name,
                    False,
                    ((1.0, self.view[0], self.view[1] if work.backward_flops else 0.0),),
                )
            return Measured(name, False, scale=self.scale(shares[0][1].operator, work.kind))
        points = sorted(
            (share, *np.mean(each, axis=0).tolist()) for share, each in by_share.items()
        )
        # A point at a much smaller share than any that was measured, as the roofline goes on from
        # there.
        least, forward, backward = points[0]
        shares_below = np.array([least / _MOST_WAYS, least])
        ratios = [
            float(each[0] / each[1]) if each[1] else 1.0
            for each in node_seconds([work, work], self.device, self.precision, shares_below)
        ]
        below = least / _MOST_WAYS, forward * ratios[0], backward * ratios[1]
        return Measured(name, True, (below, *map(tuple, points)))

    def _seconds(
        self, work: Work, share: float, operation: Operation
    ) -> tuple[float, float] | None:
        """Of forward and backward; where only forward was measured, backward is judged by the
        roofline.
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
        """How much longer than the roofline says forward and backward take."""
        return (
            self.scales.get(operator)
            or self.scales.get(f"class {kind}")
            or self.scales.get("", (1.0, 1.0))
        )


def _scales(
    entries: Sequence[OperationCost], device: Device, precision: str
) -> dict[str, tuple[float, float]]:
    """Measured over roofline, by operator, class ("class …") and for all (""): sums, so that long
    ones count most.
    """
    sums: dict[str, np.ndarray] = {}
    for each in entries:
        if each.kind == "view":
            continue
        work = Work(
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


@remembered(GRAPHS)
def resized(problem: Problem, size: int) -> Problem:
    """The problem with the graph and work of `size` samples, of which a step has as many
    micro-batches as it takes.

    Nodes keep their indices. Raises ConfigurationError where `size` does not divide the
    micro-batch, ModelError where the graph's samples are not alike: see `rebatched`.
    """
    if size == problem.micro_batch_size:
        return problem
    graph = rebatched(problem.graph, size)
    return replace(
        problem,
        graph=graph,
        work=costed_work(
            graph, problem.precision, problem.cluster, problem.costs, problem.compiled
        ),
        micro_batches=problem.batch_size // size,
        micro_batch_sizes=tuple(each for each in problem.micro_batch_sizes if size % each == 0),
    )
