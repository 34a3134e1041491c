"""Costs of each stage of a placement: seconds of a micro-batch and of a step's end, bytes on a device.

Stages that compute, keep and send the same are costed once. A split backward leaves the gradients of weights, half of
a product's backward, to its second half (Qi et al., "Zero Bubble Pipeline Parallelism", 2024, section 2).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem, Work
from autopipe.passes.analysis.gradients import (
    SavedTensor,
    all_waiting_operands,
    differentiable_values,
    kept_values,
    viewed,
    views,
)
from autopipe.passes.analysis.operators import PRODUCT_KINDS, element_bytes, uses_of
from autopipe.passes.cost.memory import (
    State,
    gradient_workspace,
    kept_bytes,
    live_bytes,
    received_bytes,
    recomputed_bytes,
    sent_bytes,
    state_of,
)
from autopipe.passes.cost.roofline import (
    accumulate_seconds,
    factors,
    node_seconds,
    posting_seconds,
    task_seconds,
    update_seconds,
    waiting_seconds,
)
from autopipe.passes.cost.stage_work import (
    StageWork,
    exchange_of_gradients,
    exchange_seconds,
    holders_of,
    reach,
    stage_work,
)


@dataclass(frozen=True, slots=True, eq=False)
class StageSignatures:
    """Signatures of a costed graph's nodes and values: numbers equal for those of equal effect on any stage's cost."""

    nodes: tuple[int, ...]
    """A number for each node: its work, what it keeps but for names, how many values it reads and writes."""
    named: tuple[tuple[str, ...], ...]
    """For each node what it reads ("" where absent), writes, and keeps."""
    values: dict[str, tuple[int, str]]
    """For each value a number, and what it is a view of."""


@remembered(GRAPHS)
def signatures_in(graph: Graph, work: tuple[Work, ...], precision: str) -> StageSignatures:
    """The nodes and values of a graph with such work."""
    uses, waiting = uses_of(graph), all_waiting_operands(graph)
    kept, widths = kept_values(graph, uses, precision), element_bytes(graph, uses, precision)
    gradient, consumers = differentiable_values(graph), graph.consumers()
    numbers: dict[Hashable, int] = {}

    def number(content: Hashable) -> int:
        return numbers.setdefault(content, len(numbers))

    nodes, named, values = [], [], {}
    for node, own, keeps, waits in zip(graph.nodes, work, kept, waiting, strict=True):
        figures = own.forward_flops, own.backward_flops, own.forward_bytes, own.backward_bytes, own.measured
        held = tuple((each.key[1], each.bytes, each.dimensions, each.windows) for each in keeps)
        nodes.append(number((figures, held, waits, len(node.inputs), len(node.outputs))))
        named.append((*node.inputs, *node.outputs, *(each.key[0] for each in keeps)))
    for name in dict.fromkeys(name for names in named for name in names if name):
        parameter, root = graph.parameter(name), viewed(graph, name)
        told = widths.get(name), name in gradient, graph.producer(name) is not None
        content = *told, parameter is not None and parameter.trainable, name in consumers
        values[name] = number(content), root
    return StageSignatures(tuple(nodes), tuple(named), values)


def content_of(work: StageWork, crossing: Set[str]) -> Hashable:
    """A stage written down without names: values by the order in which they come.

    Equal for stages that compute, keep, exchange and send the same on devices that are as fast. What a stage holds of
    parameters for others, and which other devices hold the same, is told apart from it. `crossing` are the values that
    some stage receives.
    """
    problem = work.problem
    alike = signatures_in(problem.graph, problem.work, problem.precision)
    numbers = {"": 0}
    told = {""}
    found: list[Hashable] = []

    def add(name: str) -> None:
        if name in told:
            found.append(numbers[name])
            return
        told.add(name)
        own, root = alike.values[name]
        parts = work.parameters.get(name), work.received.get(name), work.given.get(name)
        places = (numbers.setdefault(each, len(numbers)) for each in (name, root))
        found.append((*places, own, parts, name in crossing))

    for name in work.given:
        add(name)
    found.append(len(work.given))
    for each in work.nodes:
        found += id(each.sharing), alike.nodes[each.index]
        for name in alike.named[each.index]:
            add(name)
    return id(problem), work.stage.recompute, reach(problem.cluster, work.stage.devices), tuple(found)


@remembered(GRAPHS)
def weight_shares(graph: Graph) -> NDArray[np.float64]:
    """For each node the part of its backward that is left to the second half."""
    uses, gradient = uses_of(graph), differentiable_values(graph)
    shares = np.zeros(len(graph.nodes))
    for index, waiting in enumerate(all_waiting_operands(graph)):
        if waiting and uses[index].row.kind not in PRODUCT_KINDS:
            shares[index] = 1.0
        elif waiting:
            shares[index] = len(waiting) / sum(name in gradient for name in factors(graph.nodes[index], uses[index]))
    return shares


def waiting_state(problem: Problem, work: StageWork) -> State:
    """The parameters of a stage that have their gradients from the second half alone."""
    graph = problem.graph
    every, roots = all_waiting_operands(graph), views(graph)
    waiting: set[str] = set()
    flowing: set[str] = set()
    for each in work.nodes:
        if each.use.row.kind == "view":
            continue
        places = every[each.index]
        for place, name in enumerate(each.node.inputs):
            (waiting if place in places else flowing).add(roots.get(name, name))
    names = waiting - flowing
    return state_of(problem, ((name, count) for name, count in work.parameters.items() if name in names))


def weight_kept_bytes(
    graph: Graph, work: StageWork, kept: tuple[tuple[SavedTensor, ...], ...], widths: dict[str, int]
) -> int:
    """Bytes on one device that wait for the second half: what those operators keep, and the gradients of results."""
    operands: dict[tuple[str, int], int] = {}
    gradients = 0
    waiting = all_waiting_operands(graph)
    for each in work.nodes:
        if not waiting[each.index]:
            continue
        for value in kept[each.index]:
            local = value.local_bytes(each.sharing.degrees)
            operands[value.key] = max(local, operands.get(value.key, 0))
        result = each.node.outputs[0]
        layout = each.sharing.results[0]
        gradients += graph.type_of(result).elements * widths[result] // (layout.parts if layout is not None else 1)
    return sum(operands.values()) + gradients


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage on one of its devices, which all do the same."""

    forward_s: float
    """Seconds of one micro-batch's forward, collectives inside the stage included."""
    backward_s: float
    """Seconds of one micro-batch's backward, adding up gradients included (on average: the first has nothing to add
    to); with recomputation the second forward too. 0 without training."""
    weight_gradient_s: float
    """Seconds of a split backward's second half: of the backward, what gives the gradients of costly parameters."""
    split_s: float
    """Seconds of a micro-batch that splitting its backward costs."""
    gradient_s: float
    """Seconds, once a step, to sum gradients over all devices, of any stage, that hold the same parameters; where each
    updates a share, to gather the parameters again, too."""
    update_s: float
    """Seconds of the optimizer's update, of all parameters or the device's share, once a step."""
    parameter_bytes: int
    """Bytes of parameters, like those of gradients and optimizer state without what an earlier stage of the device
    holds, too."""
    gradient_bytes: int
    optimizer_bytes: int
    kept_bytes: int
    """Bytes held from a micro-batch's forward to its backward; with recomputation only what the stage received and what
    passes between its segments."""
    weight_kept_bytes: int
    """Bytes held from the first half of a split backward to the second."""
    transient_bytes: int
    """Bytes that come and go within one task: what recomputation brings back of one segment, gradients on their way;
    without training the largest live set of forward."""
    buffer_bytes: int
    """Buffers of what is received and sent for one micro-batch, and in training of its gradients."""

    @property
    def static_bytes(self) -> int:
        """Bytes there all through a step."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.buffer_bytes

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
    owned = _owned(works)
    holders = holders_of(works)
    copies = {name: len(devices) for name, devices in holders.items()}
    groups = _gradient_groups(problem, owned, holders)
    crossing = frozenset(name for work in works for name in work.received)
    problems = {work.problem.micro_batch_size: work.problem for work in works}
    known = {size: _Tensors.of(own) for size, own in problems.items()}
    states = (state_of(problem, own.items(), copies) for own in owned)
    costed: dict[Hashable, StageCost] = {}
    found = []
    for work, state, gradients in zip(works, states, groups, strict=True):
        key = (content_of(work, crossing), state) if len(works) > 1 else state
        if key not in costed:
            costed[key] = _stage_cost(work, state, known[work.problem.micro_batch_size], crossing, placement.length)
        found.append(replace(costed[key], gradient_s=_gradient_seconds(problem, gradients)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Facts on the tensors of a graph, for all stages that run it."""

    kept: tuple[tuple[SavedTensor, ...], ...]
    """For each node what backward needs of it."""
    widths: dict[str, int]
    """Bytes of an element."""
    differentiable: frozenset[str]

    @staticmethod
    def of(problem: Problem) -> _Tensors:
        graph = problem.graph
        uses = uses_of(graph)
        kept = kept_values(graph, uses, problem.precision)
        return _Tensors(kept, element_bytes(graph, uses, problem.precision), differentiable_values(graph))


def _stage_cost(
    work: StageWork,
    state: State,
    tensors: _Tensors,
    crossing: frozenset[str],
    held: int,
) -> StageCost:
    """All but the sum of gradients, which depends on where else the same parameters are."""
    problem, widths = work.problem, tensors.widths
    graph, recompute = problem.graph, work.stage.recompute and problem.train
    forward, backward, weight_gradient = _compute_seconds(work)
    exchange = exchange_seconds(graph, problem.cluster, work, tensors.differentiable)
    backward += _accumulate_seconds(work, state_of(problem, work.parameters.items()))
    weight_gradient += _accumulate_seconds(work, waiting_state(problem, work))
    received, sent = received_bytes(graph, work), sent_bytes(graph, work, crossing)
    post = _post_seconds(work, crossing, received + sent)
    keeps = transient = 0
    if problem.train:
        if recompute:
            passing, transient = recomputed_bytes(work, tensors.kept, widths, held)
            keeps = received + passing
        else:
            keeps, transient = kept_bytes(work, tensors.kept), gradient_workspace(graph, work, widths)
    else:
        transient = live_bytes(graph, work, widths)
    return StageCost(
        forward_s=forward + exchange.forward_s + post,
        backward_s=(backward + exchange.backward_s + post + recompute * (forward + exchange.forward_s))
        if problem.train
        else 0.0,
        weight_gradient_s=weight_gradient if problem.train else 0.0,
        split_s=_split_seconds(work) if problem.train else 0.0,
        gradient_s=0.0,
        update_s=_update_seconds(work, state),
        parameter_bytes=state.parameter_bytes,
        gradient_bytes=state.gradient_bytes,
        optimizer_bytes=state.optimizer_bytes,
        kept_bytes=keeps,
        weight_kept_bytes=weight_kept_bytes(graph, work, tensors.kept, widths) if problem.train else 0,
        transient_bytes=transient,
        buffer_bytes=(received + sent) * (2 if problem.train else 1),
    )


def _gradient_seconds(problem: Problem, gradients: Mapping[tuple[int, ...], State]) -> float:
    each = (
        exchange_of_gradients(problem, group, state.tensors).seconds(state.gradient_bytes)
        for group, state in gradients.items()
    )
    return sum(each, 0.0)


def _compute_seconds(work: StageWork) -> tuple[float, float, float]:
    """Seconds of the nodes' forward, backward, and of that the part of the second half, on the slowest device."""
    problem = work.problem
    nodes = [problem.work[each.index] for each in work.nodes]
    shares = np.array([each.sharing.share for each in work.nodes])
    devices = {problem.cluster.devices[device] for device in work.stage.devices}
    seconds = [node_seconds(nodes, device, problem.precision, shares) for device in devices]
    starts = [task_seconds(device) for device in devices]
    forward, backward = (
        max(float(each[phase].sum()) + start[phase] for each, start in zip(seconds, starts, strict=True))
        for phase in (0, 1)
    )
    halves = weight_shares(problem.graph)[[each.index for each in work.nodes]]
    return forward, backward, max(float((each * halves).sum()) for _, each in seconds)


def _split_seconds(work: StageWork) -> float:
    """Seconds that a split backward takes longer, on the slowest device."""
    waiting = all_waiting_operands(work.problem.graph)
    count = sum(bool(waiting[each.index]) for each in work.nodes)
    return max(waiting_seconds(work.problem.cluster.devices[device], count) for device in work.stage.devices)


def _post_seconds(work: StageWork, crossing: frozenset[str], size: int) -> float:
    """Seconds of a device's own time that posting a micro-batch's messages takes, where that was measured."""
    messages = len(work.received) + len(work.given.keys() & crossing)
    devices = (work.problem.cluster.devices[device] for device in work.stage.devices)
    return max(posting_seconds(device, messages, size) for device in devices)


def _accumulate_seconds(work: StageWork, state: State) -> float:
    """Seconds a micro-batch of adding up gradients, on the slowest device."""
    devices = (work.problem.cluster.devices[device] for device in work.stage.devices)
    repeats = 1 - 1 / work.problem.micro_batches
    return repeats * max(accumulate_seconds(device, state.gradient_bytes, state.tensors) for device in devices)


def _update_seconds(work: StageWork, state: State) -> float:
    problem = work.problem
    devices = (problem.cluster.devices[device] for device in work.stage.devices)
    size, states, tensors = state.updated_bytes, problem.optimizer.states, state.updates
    return max(update_seconds(device, size, states, tensors) for device in devices)


def _owned(works: Iterable[StageWork]) -> list[dict[str, int]]:
    """For each stage the parameters, with their parts, that some of its devices hold for no earlier stage."""
    found = []
    held: dict[str, frozenset[int]] = {}
    for work in works:
        devices = frozenset(work.stage.devices)
        own = {name: parts for name, parts in work.parameters.items() if not held.get(name, frozenset()) >= devices}
        for name in own:
            held[name] = held[name] | devices if name in held else devices
        found.append(own)
    return found


def _gradient_groups(
    problem: Problem, owned: list[dict[str, int]], holders: Mapping[str, tuple[int, ...]]
) -> list[dict[tuple[int, ...], State]]:
    """For each stage what there is of gradients by the group of devices that sums them.

    The group of a parameter is all devices that hold it, over all stages; of one held in parts, those with one part.
    """
    found = []
    for held in owned:
        groups: dict[tuple[int, ...], list[tuple[str, int]]] = {}
        for name, count in held.items():
            if len(holders[name]) > 1:
                groups.setdefault(holders[name], []).append((name, count))
        states = {group: state_of(problem, names) for group, names in groups.items()}
        found.append({group: state for group, state in states.items() if state.gradient_bytes})
    return found
