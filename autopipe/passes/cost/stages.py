"""Costs of the stages of a placement: seconds per micro-batch and at the end of a step, and bytes
per device.

The costs of stages with equal computation, saved tensors and messages are computed once. A split
backward consists of two tasks: the second one, the weight-gradient task, computes the gradients of
weights, which are half of the backward of a matmul (Qi et al., "Zero Bubble Pipeline Parallelism",
2024, section 2).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.attention_kernels import Capability, min_cuda_capability
from autopipe.ir.cluster import Device
from autopipe.ir.equality import subgraph_key
from autopipe.ir.graph import Graph
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.placement import Placement
from autopipe.ir.problem import NodeCost, Problem
from autopipe.ir.schedule import Phase
from autopipe.ir.timeline import StagePrediction, TaskSeconds
from autopipe.passes.analysis.gradients import (
    differentiable_values,
    saved_tensors,
    view_bases,
    weight_operands,
)
from autopipe.passes.analysis.operators import PRODUCT_KINDS, element_bytes, op_instances
from autopipe.passes.cost.host import host_seconds
from autopipe.passes.cost.memory import (
    ParameterState,
    gradient_workspace,
    message_bytes,
    parameter_state,
    peak_value_bytes,
    recast_parameters,
    received_value_bytes,
    recomputation_bytes,
    saved_bytes,
    weight_gradient_bytes,
)
from autopipe.passes.cost.roofline import (
    cast_seconds_per_byte,
    mean_accumulate_seconds,
    node_seconds,
    posting_seconds,
    saved_factors,
    task_overhead_seconds,
    update_seconds,
)
from autopipe.passes.cost.stage_work import (
    StageWork,
    device_group_key,
    first_shard_holders,
    gradient_reduction_cost,
    stage_collective_seconds,
    stage_work,
)


@memoize(MAX_CACHED_GRAPHS)
def cost_signatures(
    graph: Graph, work: tuple[NodeCost, ...], precision: str, capability: Capability | None
) -> tuple[list[int], list[tuple[str, ...]], dict[str, int]]:
    """Return (node numbers, node names, values). Nodes with equal numbers, and values with equal
    numbers, affect the cost of a stage equally.

    node numbers: one number per node. Nodes with equal numbers have equal work, as many operands
    and as many results. Their saved tensors differ only in names.
    node names: per node, the names of the values that the node reads ("" for an absent operand),
    writes and saves. The name of a view is followed by that of the value whose memory it shares.
    values: for each value, a number. Values with equal numbers have equal properties.
    """
    kept = saved_tensors(graph, precision, capability)
    waiting = weight_operands(graph)
    widths = element_bytes(graph, precision)
    gradient = differentiable_values(graph)
    consumers = graph.consumers()
    numbers: dict[Hashable, int] = {}

    def number(content: Hashable) -> int:
        """Return a number for `content`; equal contents have equal numbers."""
        return numbers.setdefault(content, len(numbers))

    nodes = list[int]()
    named = list[tuple[str, ...]]()
    bases = view_bases(graph)
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
        read_written_and_saved = (*node.inputs, *node.outputs, *(each.key[0] for each in keeps))
        named.append(
            tuple(
                each
                for name in read_written_and_saved
                for each in ((name, bases[name]) if name in bases else (name,))
            )
        )
        counts = len(node.inputs), len(node.outputs), len(named[-1])
        nodes.append(number((figures, held, waits, *counts)))
    values = dict[str, int]()
    for name in dict.fromkeys(name for names in named for name in names if name):
        parameter = graph.parameter(name)
        values[name] = number(
            (
                widths.get(name),
                name in gradient,
                graph.producer(name) is not None,
                parameter is not None and parameter.trainable,
                name in consumers,
                name in bases,
            )
        )
    return nodes, named, values


def stage_cost_key(work: StageWork, crossing: Mapping[str, int]) -> Hashable:
    """Return a key of a stage. Stages with equal keys have equal computation, saved tensors,
    collectives and messages, on devices of equal types and links.

    The stages are equal subgraphs (`subgraph_key`) with equal work of nodes and equal layouts. The
    key does not tell which parameters other stages also hold, nor which devices hold equal shards.
    `crossing` is the result of `message_slice_counts`.
    """
    problem = work.problem
    nodes, named, values = cost_signatures(
        problem.graph, problem.work, problem.precision, min_cuda_capability(problem.cluster)
    )
    given = [(len(work.given), tuple(work.given))]
    computed = (((id(each.sharing), nodes[each.index]), named[each.index]) for each in work.nodes)
    return (
        id(problem),
        work.stage.recompute,
        work.stage.holds_copies,
        device_group_key(problem.cluster, work.stage.devices),
        subgraph_key(
            itertools.chain(given, computed),
            lambda name: (values[name], work.parts.get(name), crossing.get(name)),
        ),
    )


def message_slice_counts(works: Sequence[StageWork]) -> dict[str, int]:
    """Return, for each value that a stage receives, the minimum over the receiving stages of the
    number of slices in which the value is sent.

    The devices of a stage that all-gathers the value on arrival (`Stage.gathers`) receive different
    slices. For any other stage the number is 1.
    """
    found: dict[str, int] = {}
    for work in works:
        for name in work.received:
            parts = work.parts[name] if name in work.stage.gathers else 1
            found[name] = min(parts, found.get(name, parts))
    return found


@memoize(MAX_CACHED_GRAPHS)
def weight_gradient_fractions(graph: Graph) -> NDArray[np.float64]:
    """Return, for each node, the fraction of its backward that the weight-gradient task of a split
    backward computes.
    """
    uses = op_instances(graph)
    gradient = differentiable_values(graph)
    shares = np.zeros(len(graph.nodes))
    for index, waiting in enumerate(weight_operands(graph)):
        if waiting and uses[index].row.kind not in PRODUCT_KINDS:
            shares[index] = 1.0
        elif waiting:
            shares[index] = len(waiting) / sum(
                name in gradient for name in saved_factors(graph.nodes[index], uses[index])
            )
    return shares


def weight_gradient_state(work: StageWork) -> ParameterState:
    """Return the bytes and tensor counts of those parameters of the stage whose gradients only the
    weight-gradient task of a split backward computes.
    """
    graph = work.problem.graph
    every = weight_operands(graph)
    roots = view_bases(graph)
    waiting: set[str] = set()
    flowing: set[str] = set()
    for each in work.nodes:
        if each.use.row.kind != "view":
            for place, name in enumerate(each.node.inputs):
                (waiting if place in every[each.index] else flowing).add(roots.get(name, name))
    names = waiting - flowing
    return parameter_state(
        work.problem, ((name, count) for name, count in work.parameter_parts if name in names)
    )


@dataclass(frozen=True, slots=True)
class StageCost(StagePrediction):
    """The cost of a stage on one of its devices. All devices of a stage have equal costs.

    The first micro-batch of a step does not accumulate gradients. Seconds per micro-batch contain
    the mean time of this accumulation over all micro-batches. Parameters that all devices of the
    stage also hold for earlier stages do not count in the bytes of parameters, gradients and
    optimizer state.
    """

    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    buffer_bytes: int = 0
    """Bytes of the buffers for the messages of one micro-batch, including the buffers of their
    gradients in training.
    """

    def memory_bytes(self, in_flight: int) -> int:
        """Return the peak bytes with `in_flight` micro-batches whose forward has run and whose
        backward has not.
        """
        return self.static_bytes + self.kept_bytes * in_flight + self.transient_bytes


def step_seconds(cost: StageCost, micro_batches: int, overlap: bool = False) -> float:
    """Return the seconds that a stage is busy in a step of `micro_batches` micro-batches.

    With `overlap`, the gradient reduction runs during the last backward, and only the part of it
    that takes longer than this backward is added.
    """
    gradients = max(0.0, cost.gradient_s - cost.backward_s) if overlap else cost.gradient_s
    return micro_batches * (cost.forward_s + cost.backward_s) + gradients + cost.update_s


@memoize(2)
def stage_costs(problem: Problem, placement: Placement) -> tuple[StageCost, ...]:
    """Return the cost of each stage of `placement` for the stage's micro-batch size.

    Raises ConfigurationError or ModelError if the batch cannot be divided into micro-batches of
    this size.
    """
    works = stage_work(problem, placement)
    holders = first_shard_holders(works)
    copies = {name: len(devices) for name, devices in holders.items()}
    crossing = message_slice_counts(works)
    again = recast_parameters(works)
    costed: dict[Hashable, StageCost] = {}
    found = []
    for work, owned in zip(works, _newly_held_parameters(works), strict=True):
        state = parameter_state(problem, owned.items(), copies, again)
        key = (stage_cost_key(work, crossing), state) if len(works) > 1 else state
        if key not in costed:
            costed[key] = _stage_cost(work, state, crossing, placement.length)
        found.append(replace(costed[key], gradient_s=_gradient_seconds(problem, owned, holders)))
    return tuple(found)


def _newly_held_parameters(works: Sequence[StageWork]) -> list[dict[str, int]]:
    """Return, for each stage, the number of shards of its parameters by name. A parameter that all
    devices of the stage already hold for earlier stages is omitted.
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
    """Return the seconds per step of the gradient reductions of a stage's parameters.

    All devices that hold an equal shard of a parameter, in any stage, reduce its gradient together.
    `owned` contains the numbers of shards of the stage's parameters, and `holders` the devices that
    hold the first shard of each parameter. With a sharded optimizer, the seconds include the
    all-gather of the updated parameters.
    """
    groups: defaultdict[tuple[int, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, count in owned.items():
        if len(holders[name]) > 1:
            groups[holders[name]].append((name, count))
    states = ((group, parameter_state(problem, names)) for group, names in groups.items())
    return sum(
        (
            gradient_reduction_cost(problem, group, state.tensors).seconds(state.gradient_bytes)
            for group, state in states
            if state.gradient_bytes
        ),
        0.0,
    )


def _stage_cost(
    work: StageWork, state: ParameterState, crossing: Mapping[str, int], held: int
) -> StageCost:
    """Return the cost of a stage without its gradient reductions, which depend on other stages.

    state: parameters, gradients and optimizer state that count for this stage.
    crossing: the result of `message_slice_counts`.
    held: number of micro-batches whose forward has run and whose backward has not. If the stage
    recomputes, its segments (consecutive nodes that are recomputed together) are chosen for this
    number.
    """
    problem = work.problem
    graph = work.problem.graph
    train = work.problem.train
    devices = problem.cluster.device_types_among(work.stage.devices)
    recompute = work.stage.recompute and work.problem.train
    forward, backward, weight_gradient = _compute_seconds(work)
    exchange = stage_collective_seconds(work)
    added = parameter_state(problem, work.parameter_parts, recast=recast_parameters([work]))
    waiting = weight_gradient_state(work)
    forward += max(map(cast_seconds_per_byte, devices)) * added.cast_bytes
    backward += _accumulate_seconds(problem, devices, added)
    weight_gradient += _accumulate_seconds(problem, devices, waiting)
    received, sent = message_bytes(work, crossing)
    messages = len(work.received) + len(work.given.keys() & crossing)
    post = max(posting_seconds(device, messages, received + sent) for device in devices)
    deferred = sum(bool(weight_operands(graph)[each.index]) for each in work.nodes)
    if not train:
        kept = 0
        transient = peak_value_bytes(work)
    elif recompute:
        passing, transient = recomputation_bytes(work, held)
        kept = received_value_bytes(work) + passing
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
            + cast_seconds_per_byte(each) * state.low_precision_bytes
            for each in devices
        ),
        parameter_bytes=state.parameter_bytes,
        static_bytes=state.total + buffers,
        kept_bytes=kept,
        weight_kept_bytes=weight_gradient_bytes(work) if train else 0,
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
    return _with_host_time(cost, _host_seconds(work, recompute), on_device)


def _accumulate_seconds(
    problem: Problem, devices: Sequence[Device], state: ParameterState
) -> float:
    """Return the mean seconds per micro-batch to accumulate gradients, with the bytes and tensor
    counts in `state`, on the slowest of the device types `devices`.
    """
    return max(
        mean_accumulate_seconds(
            each, float(state.gradient_bytes), problem.micro_batches, state.tensors
        )
        for each in devices
    )


def _with_host_time(cost: StageCost, on_host: TaskSeconds, on_device: TaskSeconds) -> StageCost:
    """Return the cost in which no task is shorter than the time that the host needs to start the
    task's operators. `on_host` and `on_device` are the seconds of each task.
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
    """Return the seconds in which the slowest host of the stage's devices starts the operators of
    each task. With `recompute`, a backward includes a second forward.
    """
    problem = work.problem
    indices = [each.index for each in work.nodes]
    nodes = [problem.work[index] for index in indices]
    launch_s = max(
        device.host_launch_s for device in problem.cluster.device_types_among(work.stage.devices)
    )
    forward, backward = host_seconds(nodes, launch_s)
    if not problem.train:
        return TaskSeconds(float(forward.sum()))
    again = float(forward.sum()) if recompute else 0.0
    weight_gradient = float((backward * weight_gradient_fractions(problem.graph)[indices]).sum())
    return TaskSeconds(float(forward.sum()), float(backward.sum()) + again, weight_gradient)


def _compute_seconds(work: StageWork) -> tuple[float, float, float]:
    """Return (forward, backward, weight gradient): the seconds of a stage's nodes for one
    micro-batch on the slowest of its device types, without collectives and messages.

    `weight gradient` is the part of backward that the weight-gradient task of a split backward
    computes.
    """
    problem = work.problem
    nodes = [problem.work[each.index] for each in work.nodes]
    shares = np.array([each.sharing.share for each in work.nodes])
    devices = problem.cluster.device_types_among(work.stage.devices)
    seconds = [node_seconds(nodes, device, problem.precision, shares) for device in devices]
    starts = [task_overhead_seconds(device) for device in devices]
    forward, backward = (
        max(
            float(each[phase].sum()) + start[phase]
            for each, start in zip(seconds, starts, strict=True)
        )
        for phase in (0, 1)
    )
    halves = weight_gradient_fractions(problem.graph)[[each.index for each in work.nodes]]
    return forward, backward, max(float((each * halves).sum()) for _, each in seconds)
