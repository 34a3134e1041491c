"""Costs of each stage of a placement: seconds of a micro-batch and of a step's end, bytes on a
device.

Stages that compute, keep and send the same are costed once. A split backward leaves the gradients
of weights, half of a product's backward, to its second half (Qi et al., "Zero Bubble Pipeline
Parallelism", 2024, section 2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.attention_kernels import Capability, capability_of
from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem, Work
from autopipe.ir.schedule import Phase
from autopipe.ir.timeline import StagePrediction, TaskSeconds
from autopipe.passes.analysis.gradients import (
    differentiable_values,
    kept_values,
    viewed,
    views,
    waiting_operands,
)
from autopipe.passes.analysis.operators import PRODUCT_KINDS, element_bytes, uses_of
from autopipe.passes.cost.host import host_seconds
from autopipe.passes.cost.memory import (
    State,
    argument_bytes,
    gradient_workspace,
    live_bytes,
    message_bytes,
    read_again,
    recomputed_bytes,
    saved_bytes,
    state_of,
    waiting_bytes,
)
from autopipe.passes.cost.roofline import (
    accumulate_seconds,
    cast_per_byte,
    factors,
    node_seconds,
    posting_seconds,
    task_seconds,
    update_seconds,
)
from autopipe.passes.cost.stage_work import (
    StageWork,
    exchange_of_gradients,
    exchange_seconds,
    holders_of,
    reach,
    stage_work,
)


@remembered(GRAPHS)
def signatures_in(
    graph: Graph, work: tuple[Work, ...], precision: str, capability: Capability | None
) -> tuple[list[int], list[tuple[str, ...]], dict[str, tuple[int, str]]]:
    """Numbers of a costed graph's nodes and values, equal for those of equal effect on any stage's
    cost.

    For each node one of its work, what it keeps but for names, and how many values it reads and
    writes; then what it reads ("" where it reads nothing), writes, and keeps; for each value a
    number, and what it is a view of.
    """
    kept = kept_values(graph, precision, capability)
    waiting = waiting_operands(graph)
    widths = element_bytes(graph, precision)
    gradient = differentiable_values(graph)
    consumers = graph.consumers()
    numbers: dict[Hashable, int] = {}

    def number(content: Hashable) -> int:
        return numbers.setdefault(content, len(numbers))

    nodes = list[int]()
    named = list[tuple[str, ...]]()
    values = dict[str, tuple[int, str]]()
    for node, own, keeps, waits in zip(graph.nodes, work, kept, waiting, strict=True):
        figures = (
            own.forward_flops,
            own.backward_flops,
            own.forward_bytes,
            own.backward_bytes,
            own.launches,
            own.operators,
            own.backward_operators,
            own.product_rate,
            own.measured,
        )
        held = tuple((each.key[1], each.bytes, each.dimensions, each.windows) for each in keeps)
        nodes.append(number((figures, held, waits, len(node.inputs), len(node.outputs))))
        named.append((*node.inputs, *node.outputs, *(each.key[0] for each in keeps)))
    for name in dict.fromkeys(name for names in named for name in names if name):
        parameter = graph.parameter(name)
        root = viewed(graph, name)
        told = widths.get(name), name in gradient, graph.producer(name) is not None
        content = *told, parameter is not None and parameter.trainable, name in consumers
        values[name] = number(content), root
    return nodes, named, values


def content_of(work: StageWork, crossing: Mapping[str, int]) -> Hashable:
    """A stage written down without names: values by the order in which they come.

    Equal for stages that compute, keep, exchange and send the same on devices that are as fast.
    What a stage holds of parameters for others, and which other devices hold the same, is told
    apart from it. `crossing` are values that some stage receives (`crossing_parts`).
    """
    problem = work.problem
    nodes, named, values = signatures_in(
        problem.graph, problem.work, problem.precision, capability_of(problem.cluster)
    )
    numbers = {"": 0}
    told = {""}
    found: list[Hashable] = []

    def add(name: str) -> None:
        if name in told:
            found.append(numbers[name])
            return
        told.add(name)
        own, root = values[name]
        places = (numbers.setdefault(each, len(numbers)) for each in (name, root))
        found.append((*places, own, work.parts.get(name), crossing.get(name)))

    for name in work.given:
        add(name)
    found.append(len(work.given))
    for each in work.nodes:
        found += id(each.sharing), nodes[each.index]
        for name in named[each.index]:
            add(name)
    return (
        id(problem),
        work.stage.recompute,
        work.stage.holds_copies,
        reach(problem.cluster, work.stage.devices),
        tuple(found),
    )


def crossing_parts(works: Sequence[StageWork]) -> dict[str, int]:
    """The values that stages receive, each with how many slices of a copy are sent apart: 1 where
    some stage does not gather it.
    """
    found: dict[str, int] = {}
    for work in works:
        for name in work.received:
            parts = work.parts[name] if name in work.stage.gathers else 1
            found[name] = min(parts, found.get(name, parts))
    return found


@remembered(GRAPHS)
def weight_shares(graph: Graph) -> NDArray[np.float64]:
    """For each node the part of its backward that is left to the second half."""
    uses = uses_of(graph)
    gradient = differentiable_values(graph)
    shares = np.zeros(len(graph.nodes))
    for index, waiting in enumerate(waiting_operands(graph)):
        if waiting and uses[index].row.kind not in PRODUCT_KINDS:
            shares[index] = 1.0
        elif waiting:
            shares[index] = len(waiting) / sum(
                name in gradient for name in factors(graph.nodes[index], uses[index])
            )
    return shares


def waiting_state(work: StageWork) -> State:
    """The parameters of a stage that have their gradients from the second half alone."""
    graph = work.problem.graph
    every = waiting_operands(graph)
    roots = views(graph)
    waiting: set[str] = set()
    flowing: set[str] = set()
    for each in work.nodes:
        if each.use.row.kind != "view":
            for place, name in enumerate(each.node.inputs):
                (waiting if place in every[each.index] else flowing).add(roots.get(name, name))
    names = waiting - flowing
    return state_of(
        work.problem, ((name, count) for name, count in work.parameter_parts if name in names)
    )


@dataclass(frozen=True, slots=True)
class StageCost(StagePrediction):
    """One stage on one of its devices, which all do the same.

    Adding up gradients counts on average: the first micro-batch has nothing to add to. What an
    earlier stage of the device holds of parameters, gradients and optimizer state, too, does not
    count.
    """

    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    buffer_bytes: int = 0
    """Buffers of what is received and sent for one micro-batch, and in training of its gradients.
    """

    def memory_bytes(self, in_flight: int) -> int:
        """Most bytes in use with `in_flight` micro-batches between forward and backward."""
        return self.static_bytes + self.kept_bytes * in_flight + self.transient_bytes


def step_seconds(cost: StageCost, micro_batches: int, overlap: bool = False) -> float:
    """Seconds of a stage in a step of `micro_batches` of its own, one thing after the other.

    `overlap` hides gradients behind the last backward.
    """
    gradients = max(0.0, cost.gradient_s - cost.backward_s) if overlap else cost.gradient_s
    return micro_batches * (cost.forward_s + cost.backward_s) + gradients + cost.update_s


@remembered(2)
def stage_costs(problem: Problem, placement: Placement) -> tuple[StageCost, ...]:
    """The cost of each stage of `placement`, in order, on micro-batches of its own size.

    Raises ConfigurationError or ModelError where the graph's batch cannot be cut into those.
    """
    works = stage_work(problem, placement)
    holders = holders_of(works)
    copies = {name: len(devices) for name, devices in holders.items()}
    crossing = crossing_parts(works)
    again = read_again(works)
    costed: dict[Hashable, StageCost] = {}
    found = []
    for work, owned in zip(works, _owned(works), strict=True):
        state = state_of(problem, owned.items(), copies, again)
        key = (content_of(work, crossing), state) if len(works) > 1 else state
        if key not in costed:
            costed[key] = _stage_cost(work, state, crossing, placement.length)
        found.append(replace(costed[key], gradient_s=_gradient_seconds(problem, owned, holders)))
    return tuple(found)


def _owned(works: Sequence[StageWork]) -> list[dict[str, int]]:
    """For each stage the parameters, with their parts, that some of its devices hold for no earlier
    stage.
    """
    found = []
    held: defaultdict[str, frozenset[int]] = defaultdict(frozenset)
    for work in works:
        devices = frozenset(work.stage.devices)
        found.append(
            {name: parts for name, parts in work.parameter_parts if not held[name] >= devices}
        )
        for name in found[-1]:
            held[name] |= devices
    return found


def _gradient_seconds(
    problem: Problem, owned: Mapping[str, int], holders: Mapping[str, tuple[int, ...]]
) -> float:
    """Seconds, once a step, in which the gradients of a stage's parameters are summed, each by all
    that hold it.

    These are of any stages; of one held in parts, those with one part. Where each updates a share,
    parameters are gathered again, too.
    """
    groups: defaultdict[tuple[int, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, count in owned.items():
        if len(holders[name]) > 1:
            groups[holders[name]].append((name, count))
    states = ((group, state_of(problem, names)) for group, names in groups.items())
    return sum(
        (
            exchange_of_gradients(problem, group, state.tensors).seconds(state.gradient_bytes)
            for group, state in states
            if state.gradient_bytes
        ),
        0.0,
    )


def _stage_cost(work: StageWork, state: State, crossing: Mapping[str, int], held: int) -> StageCost:
    """All but the sum of gradients, which depends on where else the same parameters are.

    `held` micro-batches are in flight where the stage recomputes.
    """
    problem = work.problem
    graph = work.problem.graph
    train = work.problem.train
    devices = problem.cluster.kinds_among(work.stage.devices)
    recompute = work.stage.recompute and work.problem.train
    forward, backward, weight_gradient = _compute_seconds(work)
    exchange = exchange_seconds(work)
    added = state_of(problem, work.parameter_parts, read_again=read_again([work]))
    waiting = waiting_state(work)
    forward += max(map(cast_per_byte, devices)) * added.cast_bytes
    repeats = 1 - 1 / problem.micro_batches
    backward += repeats * max(
        accumulate_seconds(each, added.gradient_bytes, added.tensors) for each in devices
    )
    weight_gradient += repeats * max(
        accumulate_seconds(each, waiting.gradient_bytes, waiting.tensors) for each in devices
    )
    received, sent = message_bytes(work, crossing)
    messages = len(work.received) + len(work.given.keys() & crossing)
    post = max(posting_seconds(device, messages, received + sent) for device in devices)
    deferred = sum(bool(waiting_operands(graph)[each.index]) for each in work.nodes)
    if not train:
        kept = 0
        transient = live_bytes(work)
    elif recompute:
        passing, transient = recomputed_bytes(work, held)
        kept = argument_bytes(work) + passing
    else:
        kept = sum(saved_bytes(problem, work.nodes).values())
        transient = gradient_workspace(work)
    whole_backward = (
        backward + exchange[1] + post + recompute * (forward + exchange[0]) if train else 0.0
    )
    weight_gradient = weight_gradient if train else 0.0
    buffers = (received + sent) * (2 if train else 1)
    states = problem.optimizer.states
    cost = StageCost(
        forward_s=forward + exchange[0] + post,
        backward_s=whole_backward,
        input_gradient_s=whole_backward - weight_gradient,
        weight_gradient_s=weight_gradient,
        split_s=max(
            (each.tasks.waiting_s * deferred for each in devices if each.tasks), default=0.0
        )
        if train
        else 0.0,
        update_s=max(
            update_seconds(each, state.updated_bytes, states, state.updates)
            + cast_per_byte(each) * state.low_precision_bytes
            for each in devices
        ),
        parameter_bytes=state.parameter_bytes,
        static_bytes=state.total + buffers,
        kept_bytes=kept,
        weight_kept_bytes=waiting_bytes(work) if train else 0,
        transient_bytes=transient,
        gradient_bytes=state.gradient_bytes,
        optimizer_bytes=state.optimizer_bytes,
        buffer_bytes=buffers,
    )
    if not any(device.host_launch_s for device in devices):
        return cost
    on_device = TaskSeconds(
        forward + exchange[0], whole_backward - post if train else 0.0, weight_gradient
    )
    return _with_host(cost, _host_seconds(work, recompute), on_device)


def _with_host(cost: StageCost, on_host: TaskSeconds, on_device: TaskSeconds) -> StageCost:
    """Return the cost of a stage whose tasks take no less than its host needs to start their
    operators.
    """
    cost = replace(cost, on_host=on_host, on_device=on_device)
    return replace(
        cost,
        forward_s=cost.forward_s + cost.host_wait_s(Phase.FORWARD),
        backward_s=cost.backward_s + cost.host_wait_s(Phase.BACKWARD),
        input_gradient_s=cost.input_gradient_s + cost.host_wait_s(Phase.INPUT_GRADIENT),
        weight_gradient_s=cost.weight_gradient_s + cost.host_wait_s(Phase.WEIGHT_GRADIENT),
    )


def _host_seconds(work: StageWork, recompute: bool) -> TaskSeconds:
    """Return the seconds in which the slowest host of the stage's devices starts each task's
    operators.
    """
    problem = work.problem
    indices = [each.index for each in work.nodes]
    nodes = [problem.work[index] for index in indices]
    launch_s = max(
        device.host_launch_s for device in problem.cluster.kinds_among(work.stage.devices)
    )
    forward, backward = host_seconds(nodes, launch_s)
    if not problem.train:
        return TaskSeconds(float(forward.sum()))
    again = float(forward.sum()) if recompute else 0.0
    weight_gradient = float((backward * weight_shares(problem.graph)[indices]).sum())
    return TaskSeconds(float(forward.sum()), float(backward.sum()) + again, weight_gradient)


def _compute_seconds(work: StageWork) -> tuple[float, float, float]:
    """Seconds of the nodes' forward, backward, and of that the part of the second half, on the
    slowest device.
    """
    problem = work.problem
    nodes = [problem.work[each.index] for each in work.nodes]
    shares = np.array([each.sharing.share for each in work.nodes])
    devices = problem.cluster.kinds_among(work.stage.devices)
    seconds = [node_seconds(nodes, device, problem.precision, shares) for device in devices]
    starts = [task_seconds(device) for device in devices]
    forward, backward = (
        max(
            float(each[phase].sum()) + start[phase]
            for each, start in zip(seconds, starts, strict=True)
        )
        for phase in (0, 1)
    )
    halves = weight_shares(problem.graph)[[each.index for each in work.nodes]]
    return forward, backward, max(float((each * halves).sum()) for _, each in seconds)
