"""Planning with measured costs: each node has what its operation took, at every share that was measured of it.

What was not measured takes what the roofline says, times how much longer than that the measured operations of the same
operator took; of the same class where there are none of the operator; all of them where there are none of the class.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopipe.ir.cluster import Cluster, Device, Level, Link
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.measured_costs import MESSAGES, Costs, DeviceCosts, ExchangeCost, Operation, OperationCost
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.plan import CostCoverage
from autopipe.ir.problem import Measured, Problem, Work
from autopipe.passes.cost.operations import Operations
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.work import annotate

_MOST_WAYS = 64
"""Shares are looked up for splits of up to this many ways; smaller ones follow the roofline from there."""
_NOTHING = ((1.0, 0.0, 0.0),)
"""No seconds, whatever the share."""


@remembered(GRAPHS)
def costed_work(graph: Graph, precision: str, cluster: Cluster, costs: Costs | None) -> tuple[Work, ...]:
    """The work of every node, in order, with what was measured of it on the devices of `cluster`.

    Raises ConfigurationError where a device of the cluster is not among those of `costs`.
    """
    work = annotate(graph, precision)
    if costs is None:
        return work
    lookups = [_Lookup.of(device, _found(costs, cluster, device), precision) for device in cluster.kinds]
    degrees = range(2, min(cluster.size, _MOST_WAYS) + 1)
    operations = Operations.of(graph, precision)
    products = {addition: product for product, addition in operations.additions.items()}
    known: dict[Hashable, tuple[Measured, ...]] = {}
    found = []
    for index, each in enumerate(work):
        product = products.get(index)
        key = operations.key(index), None if product is None else operations.key(product)
        if key not in known:
            shares = tuple(_shares(operations, index if product is None else product, degrees))
            own = (lookup.measured(each, shares) for lookup in lookups)
            # An addition that its product's call does takes nothing more.
            known[key] = tuple(own if product is None else (replace(one, points=_NOTHING) for one in own))
        found.append(replace(each, measured=known[key]))
    return tuple(found)


def measured_cluster(cluster: Cluster, costs: Costs) -> Cluster:
    """The cluster with what was measured of tasks, and of messages and collectives within a node.

    Raises ConfigurationError where a device of the cluster is not among those of `costs`.
    """
    own = {device: _found(costs, cluster, device) for device in cluster.kinds}
    kinds = {device: _measured_device(device, found) for device, found in own.items()}
    devices = tuple(kinds[device] for device in cluster.devices)
    if not cluster.groups:
        exchanges = next((each.exchanges for each in own.values() if each.exchanges), ())
        return replace(cluster, devices=devices, levels=_measured_levels(cluster.levels, exchanges))
    groups = []
    first = 0
    for group in cluster.groups:
        exchanges = own[cluster.devices[first]].exchanges
        groups.append(replace(group, levels=_measured_levels(group.levels, exchanges)))
        first += group.size
    return replace(cluster, devices=devices, groups=tuple(groups))


def _measured_device(device: Device, found: DeviceCosts) -> Device:
    """The device with what was measured of its tasks, and of exchanges with others like it."""
    messages = {each.kind: each.fit for each in found.exchanges if each.kind in MESSAGES}
    return replace(
        device,
        tasks=found.tasks or device.tasks,
        collectives=tuple(each for each in found.exchanges if each.kind not in MESSAGES),
        post=messages.get("post"),
        follow=messages.get("follow"),
    )


def _measured_levels(levels: tuple[Level, ...], exchanges: Sequence[ExchangeCost]) -> tuple[Level, ...]:
    """The levels with what messages within a node were measured to take."""
    sent = next((each.fit for each in exchanges if each.kind == "send" and each.fit.per_byte_s > 0), None)
    if sent is None:
        return levels
    return (replace(levels[0], link=Link(sent.fixed_s, 1 / sent.per_byte_s)), *levels[1:])


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
            f"nothing was measured on device {device.name!r}", hint=f"there are costs of {have}", where="costs"
        )
    return found


def _shares(operations: Operations, index: int, degrees: Sequence[int]) -> Iterator[tuple[float, Operation]]:
    """The node's operation whole, then under each split along one axis, with the share of it that each is."""
    for splits in ((), *operations.cuts(index, degrees)):
        yield 1.0 / (splits[0].degree if splits else 1), operations.operation(index, splits)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Measured times on one kind of device, by operation, and the ratio of its roofline to them."""

    device: Device
    precision: str
    forward: dict[Operation, float]
    """By operation whatever gradients it gives."""
    backward: dict[Operation, float]
    scales: dict[str, tuple[float, float]]
    """How much longer than the roofline says, by operator, by class and, under "", for all."""
    view: tuple[float, float]
    """Seconds of views, for which a roofline has nothing."""

    @staticmethod
    def of(device: Device, costs: DeviceCosts, precision: str) -> _Lookup:
        entries = [each for each in costs.operations if each.operation.precision == precision] or costs.operations
        return _Lookup(
            device=device,
            precision=precision,
            forward={_any_gradients(each.operation): each.forward.seconds for each in costs.operations},
            backward={each.operation: each.backward.seconds for each in costs.operations if each.backward},
            scales=_scales(entries, device, precision),
            view=_view_seconds(entries),
        )

    def measured(self, work: Work, shares: Sequence[tuple[float, Operation]]) -> Measured:
        """Time of a node on the device at the shares that were measured; the first is the whole node."""
        by_share: dict[float, list[tuple[float, float]]] = {}
        for share, operation in shares:
            found = self._seconds(work, share, operation)
            if found is not None:
                by_share.setdefault(share, []).append(found)
        name = self.device.name
        if 1.0 not in by_share:
            if work.kind == "view":
                return Measured(name, False, ((1.0, self.view[0], self.view[1] if work.backward_flops else 0.0),))
            return Measured(name, False, scale=self.scale(shares[0][1].operator, work.kind))
        points = sorted((share, *np.mean(each, axis=0).tolist()) for share, each in by_share.items())
        return Measured(name, True, (*self._below(work, points[0]), *map(tuple, points)))

    def _seconds(self, work: Work, share: float, operation: Operation) -> tuple[float, float] | None:
        """Of forward and backward; where only forward was measured, backward is judged by the roofline."""
        forward = self.forward.get(_any_gradients(operation))
        if forward is None:
            return None
        backward = self.backward.get(operation)
        if backward is None:
            _, judged = node_seconds([work], self.device, self.precision, share)
            backward = float(judged[0]) * self.scale(operation.operator, work.kind)[1]
        return forward, backward

    def scale(self, operator: str, kind: str) -> tuple[float, float]:
        """How much longer than the roofline says forward and backward take."""
        return self.scales.get(operator) or self.scales.get(f"class {kind}") or self.scales.get("", (1.0, 1.0))

    def _below(self, work: Work, least: tuple[float, ...]) -> Iterator[tuple[float, float, float]]:
        """A point at a much smaller share than any that was measured, as the roofline goes on from there."""
        small = least[0] / _MOST_WAYS
        shares = np.array([small, least[0]])
        ratios = [
            float(each[0] / each[1]) if each[1] else 1.0
            for each in node_seconds([work, work], self.device, self.precision, shares)
        ]
        yield small, least[1] * ratios[0], least[2] * ratios[1]


def _any_gradients(operation: Operation) -> Operation:
    return replace(operation, gradients=())


def _view_seconds(entries: Sequence[OperationCost]) -> tuple[float, float]:
    views = [each for each in entries if each.kind == "view"]
    forward = [each.forward.seconds for each in views]
    backward = [each.backward.seconds for each in views if each.backward]
    return float(np.mean(forward or [0.0])), float(np.mean(backward or [0.0]))


def _scales(entries: Sequence[OperationCost], device: Device, precision: str) -> dict[str, tuple[float, float]]:
    """Measured over roofline, by operator, class ("class …") and for all (""): sums, so that long ones count most."""
    sums: dict[str, np.ndarray] = {}
    for each in entries:
        if each.kind == "view":
            continue
        work = Work(each.kind, each.flops[0], each.flops[1], each.moved_bytes[0], each.moved_bytes[1], 0)
        forward, backward = (float(found[0]) for found in node_seconds([work], device, precision))
        own = [each.forward.seconds, forward, 0.0, 0.0]
        if each.backward is not None:
            own[2:] = [each.backward.seconds, backward]
        for name in (each.operation.operator, f"class {each.kind}", ""):
            sums[name] = sums.get(name, np.zeros(4)) + own
    return {name: (_ratio(*each[:2]), _ratio(*each[2:])) for name, each in sums.items()}


def _ratio(measured: float, expected: float) -> float:
    return measured / expected if measured and expected else 1.0
