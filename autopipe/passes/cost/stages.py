"""Costs of each stage of a placement: seconds of a micro-batch, seconds of a step's end, bytes on a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopipe.ir.memo import remembered
from autopipe.ir.placement import Placement, crossing_values
from autopipe.ir.problem import Problem
from autopipe.passes.cost.assignment import StageWork, stage_work
from autopipe.passes.cost.equal_stages import content_of
from autopipe.passes.cost.exchange import exchange_seconds
from autopipe.passes.cost.halves import waiting_state, weight_kept_bytes, weight_shares
from autopipe.passes.cost.kept import SavedTensor, kept_values
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
from autopipe.passes.cost.precision import element_bytes
from autopipe.passes.cost.replicas import exchange_of_gradients, holders_of
from autopipe.passes.cost.roofline import (
    accumulate_seconds,
    node_seconds,
    posting_seconds,
    task_seconds,
    update_seconds,
    waiting_seconds,
)
from autopipe.passes.cost.uses import uses_of
from autopipe.passes.lower.gradients import differentiable_values
from autopipe.passes.lower.halves import all_waiting_operands


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


def edge_bytes(problem: Problem, placement: Placement) -> dict[tuple[int, int], int]:
    """Bytes of whole values that one forward sends from one stage to another; backward returns as many."""
    found: Counter[tuple[int, int]] = Counter()
    for name, source, target in crossing_values(problem.graph, placement):
        found[source, target] += problem.graph.type_of(name).bytes
    return dict(found)


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
