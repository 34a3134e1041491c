"""Memory of a stage on one of its devices: parameters and optimizer state, saved activations, and
the temporary tensors of one task (a forward or a backward of one micro-batch).

Also the number of samples in flight at a stage, whose forward has run and whose backward has not,
under kFkB schedules (Jeon et al., "GraphPipe", 2024, section 6 and appendix A.1).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.attention_kernels import Capability, min_cuda_capability
from autopipe.ir.equality import node_labels
from autopipe.ir.graph import Graph
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.program import BUCKET_BYTES
from autopipe.passes.analysis.gradients import (
    AttentionTensor,
    Workspace,
    attention_tensors,
    differentiable_values,
    max_received_to_sent_ratio,
    saved_tensors,
    sent_bytes,
    weight_operands,
    workspace_of,
)
from autopipe.passes.analysis.operators import element_bytes, low_precision_copies
from autopipe.passes.analysis.recompute import make_segmenter
from autopipe.passes.analysis.training import matrix_parameters
from autopipe.passes.cost.stage_work import (
    NodeSharing,
    StageNode,
    StageWork,
    first_shard_holders,
    stage_work,
)

OPTIMIZER_STATE_BYTES = 4
"""Bytes per element of optimizer state, which is stored in fp32."""
_ALONE: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class ParameterState:
    """Parameters, gradients and optimizer state on one device, which stay allocated during all
    steps: their bytes and their numbers of tensors.
    """

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    tensors: int = 0
    """Number of gradient tensors."""
    updated_bytes: int = 0
    """Bytes of the gradients that the device's update reads. With a sharded optimizer this is the
    device's shard of the gradients.
    """
    updates: int = 0
    """Number of tensors that the optimizer updates. With a sharded optimizer, the shard of each
    bucket counts as one.
    """
    low_precision_bytes: int = 0
    """Bytes of the 16-bit copies of parameters that stay allocated during a step."""
    cast_bytes: int = 0
    """Bytes of the 16-bit copies of parameters that each forward creates again."""

    @property
    def total(self) -> int:
        """Bytes of the parameters, their 16-bit copies, the gradients and the optimizer state."""
        return (
            self.parameter_bytes
            + self.low_precision_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
        )


def parameter_state(
    problem: Problem,
    parts: Iterable[tuple[str, int]],
    copies: Mapping[str, int] = _ALONE,
    recast: Container[str] | None = None,
) -> ParameterState:
    """Return the state of the parameters in `parts` on one device.

    parts: pairs (name, number of shards into which a group of devices divides the parameter).
    copies: number of devices that hold an equal shard, by name; 1 for other names. A sharded
    optimizer divides the optimizer state among these devices.
    recast: parameters whose 16-bit copies each forward creates again, because their stages
    recompute. If None, these are all parameters if all stages recompute, and none otherwise.
    """
    own = low = cast = gradients = optimizer = tensors = updated = updates = in_shares = 0
    figures = _parameter_facts(problem.graph, problem.precision)
    train = problem.train
    shard = problem.optimizer.shard
    for name, count in parts:
        whole, elements, is_trained, is_matrix, copy = figures[name]
        # Training keeps the parameter itself for the update. Inference needs only the 16-bit copy
        # if there is one.
        size = (whole if train or not copy else copy) // count
        own += size
        if not train:
            continue
        if problem.recomputes_all if recast is None else name in recast:
            cast += copy // count
        else:
            low += copy // count
        if is_trained:
            gradients += size
            tensors += 1
            holders = copies.get(name, 1) if shard else 1
            optimizer += (
                -(-elements // (count * holders))
                * problem.states_of(is_matrix)
                * OPTIMIZER_STATE_BYTES
            )
            updated += -(-size // holders)
            updates += holders == 1
            in_shares += size * (holders > 1)
    return ParameterState(
        own,
        gradients,
        optimizer,
        tensors,
        updated,
        updates + -(-in_shares // BUCKET_BYTES),
        low,
        cast,
    )


@memoize(MAX_CACHED_GRAPHS)
def _parameter_facts(graph: Graph, precision: str) -> dict[str, tuple[int, int, bool, bool, int]]:
    """Return, for each parameter by name, (bytes, number of elements, True if it is trained, True
    if Muon would update it as a matrix, bytes of its 16-bit copy or 0 if it has none).
    """
    found = {}
    own = matrix_parameters(graph)
    copies = low_precision_copies(graph, precision)
    for each in graph.parameters:
        value = each.value
        is_trained = each.trainable and each.value.dtype.is_floating
        copy = 2 * value.elements * (value.name in copies)
        found[value.name] = value.bytes, value.elements, is_trained, value.name in own, copy
    return found


@memoize(2)
def static_memory(problem: Problem, placement: Placement) -> tuple[int, ...]:
    """Return, for each device of the cluster, the bytes of parameters, gradients and optimizer
    state.

    A parameter that several stages of a device hold counts once, with its largest shard.
    """
    works = stage_work(problem, placement)
    copies = {name: len(devices) for name, devices in first_shard_holders(works).items()}
    again = recast_parameters(works)
    on_device: list[tuple[int, ...]] = [()] * problem.cluster.size
    for index, work in enumerate(works):
        for device in work.stage.devices:
            on_device[device] += (index,)
    totals = {}
    for stages in set(on_device):
        held: dict[str, int] = {}
        for name, parts in (each for index in stages for each in works[index].parameter_parts):
            held[name] = min(parts, held.get(name, parts))
        totals[stages] = parameter_state(problem, held.items(), copies, again).total
    return tuple(totals[stages] for stages in on_device)


def recast_parameters(works: Iterable[StageWork]) -> frozenset[str]:
    """Return the names of the parameters whose 16-bit copies each forward creates again: those of
    training stages that recompute and do not keep the copies. Empty in inference.
    """
    again = (
        work
        for work in works
        if work.stage.recompute and not work.stage.holds_copies and work.problem.train
    )
    return frozenset(name for work in again for name, _ in work.parameter_parts)


def saved_bytes(problem: Problem, nodes: Iterable[StageNode]) -> dict[tuple[str, int], int]:
    """Return the bytes on one device of each tensor that `nodes` save for the backward of one
    micro-batch, by `SavedTensor.key`. A tensor that nodes save in shards of different sizes counts
    with the largest.
    """
    kept = saved_tensors(problem.graph, problem.precision, min_cuda_capability(problem.cluster))
    found: dict[tuple[str, int], int] = {}
    for each in nodes:
        for value in kept[each.index]:
            local = value.local_bytes(each.sharing.degrees)
            found[value.key] = max(local, found.get(value.key, 0))
    return found


def weight_gradient_bytes(work: StageWork) -> int:
    """Return the bytes on one device that the weight-gradient task of one micro-batch reads. This
    task is the second half of a split backward. It reads the tensors that its operators saved in
    forward, and the gradients of their results.
    """
    graph = work.problem.graph
    waiting = weight_operands(work.problem.graph)
    widths = element_bytes(graph, work.problem.precision)
    nodes = [each for each in work.nodes if waiting[each.index]]
    gradients = 0
    for each in nodes:
        result = each.node.outputs[0]
        layout = each.sharing.results[0]
        gradients += (
            graph.type_of(result).elements
            * widths[result]
            // (layout.shard_count if layout is not None else 1)
        )
    return sum(saved_bytes(work.problem, nodes).values()) + gradients


def recomputation_bytes(work: StageWork, held: int) -> tuple[int, int]:
    """Return (saved, peak) bytes on one device of a stage that recomputes in segments. A segment is
    a range of consecutive nodes whose forward is repeated together right before their backward.

    saved: bytes per micro-batch of the values that pass from one segment to a later one.
    peak: maximum additional bytes while the backward of a segment runs: the recomputed activations
    that the rest of this backward needs, the gradients of the current node, the gradients of the
    segment's results, and the segment's 16-bit copies of parameters.

    The segments are chosen for `held` micro-batches in flight, whose forward has run and whose
    backward has not.
    """
    graph = work.problem.graph
    precision = work.problem.precision
    figures = _parameter_facts(graph, precision)
    parts = dict(work.parameter_parts)
    kept = saved_tensors(graph, precision, min_cuda_capability(work.problem.cluster))
    widths = element_bytes(graph, precision)
    segments = make_segmenter(graph)(tuple(each.index for each in work.nodes), held)
    nodes = {each.index: each for each in work.nodes}
    gradient_bytes = _gradient_bytes_function(
        graph, precision, min_cuda_capability(work.problem.cluster)
    )
    most = passing = 0
    for indices in segments.nodes:
        written: dict[str, int] = {}
        found: dict[tuple[str, int], int] = {}
        read = {name for index in indices for name in nodes[index].node.inputs if name in parts}
        brought_back = (
            0 if work.stage.holds_copies else sum(figures[name][4] // parts[name] for name in read)
        )
        largest = 0
        for each in (nodes[index] for index in indices):
            written |= each.written_bytes(widths)
            for value in kept[each.index]:
                before = found.get(value.key, 0)
                local = value.local_bytes(each.sharing.degrees)
                if local > before:
                    found[value.key] = local
                    brought_back += local - before
            largest = max(largest, brought_back + gradient_bytes(each))
        given = sum(
            size for name, size in written.items() if name in segments.passing or name in work.given
        )
        most = max(most, given + largest)
        passing += sum(size for name, size in written.items() if name in segments.passing)
    return passing, most


def message_bytes(work: StageWork, crossing: Mapping[str, int]) -> tuple[int, int]:
    """Return (received, sent): the bytes of the messages of one micro-batch's forward on one
    device.

    `crossing` maps each value that stages receive to the number of slices in which it is sent. A
    device sends one of these slices, or its own shard if that is smaller.
    """
    sizes = sent_bytes(work.problem.graph, work.problem.precision)
    received = sum(sizes[name] // work.parts[name] for name in work.received)
    sent = sum(
        sizes[name] // max(work.parts[name], crossing[name])
        for name in work.given.keys() & crossing.keys()
    )
    return received, sent


def received_value_bytes(work: StageWork) -> int:
    """Return the bytes on one device of the values that the stage receives for one micro-batch, in
    their types in the graph. Their messages can have narrower types.
    """
    return sum(work.problem.graph.type_of(name).bytes // work.parts[name] for name in work.received)


def gradient_workspace(work: StageWork) -> int:
    """Return an estimate of the peak bytes of temporary memory in a backward on one device: the
    maximum over nodes of the gradients of the node's operands and results and of its temporary
    tensors.
    """
    problem = work.problem
    gradient_bytes = _gradient_bytes_function(
        problem.graph, problem.precision, min_cuda_capability(problem.cluster)
    )
    return max(map(gradient_bytes, work.nodes), default=0)


@memoize(MAX_CACHED_GRAPHS)
def _gradient_bytes_function(
    graph: Graph, precision: str, capability: Capability | None
) -> Callable[[StageNode], int]:
    """Return a function from a node of a stage to the bytes that the backward of the node allocates
    on one device; 0 for a view. `capability` is the compute capability of the GPUs, None for CPUs.

    The bytes are computed once for equal nodes that the devices divide equally and whose operands
    and results have equal properties.
    """
    labels = node_labels(graph)
    widths = element_bytes(graph, precision)
    gradient = differentiable_values(graph)
    beside = attention_tensors(graph, precision, capability)
    numbers: dict[Hashable, int] = {}
    class_of = []
    for index, node in enumerate(graph.nodes):
        values = tuple(
            (widths.get(name), graph.producer(name) is not None, name in gradient)
            for name in (*node.inputs, *node.outputs)
        )
        more = beside.get(index)
        further = more and (more.tensor.bytes, more.tensor.dimensions, more.scores, more.kept)
        key = labels[index], values, further
        class_of.append(numbers.setdefault(key, len(numbers)))
    known: dict[tuple[int, int], tuple[NodeSharing, int]] = {}

    def gradient_bytes(each: StageNode) -> int:
        """Return the bytes that the backward of the node allocates."""
        key = class_of[each.index], id(each.sharing)
        if key not in known:
            found = _gradient_bytes(graph, precision, each, widths, beside.get(each.index))
            # The entry keeps `sharing` alive, so that its id stays valid.
            known[key] = each.sharing, found
        return known[key][1]

    return gradient_bytes


def _gradient_bytes(
    graph: Graph,
    precision: str,
    each: StageNode,
    widths: Mapping[str, int],
    beside: AttentionTensor | None,
) -> int:
    """Return the bytes that the backward of a node allocates on one device; 0 for a view. `widths`
    contains the bytes per element of each value, and `beside` is the additional tensor of an
    attention.

    These are the gradients of the node's results, the gradients of those operands that nodes
    compute, and temporary tensors. An attention without a fused kernel has two temporary tensors of
    the size of its scores, or four if it recomputes its probabilities. A cross-entropy that
    computes its logits itself has a block of logits and the gradient of its weight.
    """
    if each.use.row.kind == "view":
        return 0
    read = each.read_bytes(widths)
    operands = sum(size for name, size in read.items() if graph.producer(name) is not None)
    scores = (
        beside.tensor.local_bytes(each.sharing.degrees)
        if beside is not None and beside.scores
        else 0
    )
    scores *= 2 if beside is None or beside.kept else 4
    scratch = _node_scratch(graph, precision, each)
    return (
        sum(each.written_bytes(widths).values())
        + operands
        + scores
        + scratch.samples
        + scratch.weight
    )


def _node_scratch(graph: Graph, precision: str, each: StageNode) -> Workspace:
    """Return the bytes of a node's temporary tensors on one device of its stage."""
    return workspace_of(graph, precision, each.index, each.use, each.sharing.degrees)


def peak_value_bytes(work: StageWork) -> int:
    """Return the peak bytes on one device of the values of one micro-batch during a forward in
    inference, which frees each value after its last use.
    """
    graph = work.problem.graph
    widths = element_bytes(graph, work.problem.precision)
    roots: dict[str, str] = {}
    last: dict[str, int] = {}
    for position, each in enumerate(work.nodes):
        for name in (*each.node.inputs, *each.node.outputs):
            if name:
                last[roots.get(name, name)] = position
        if each.use.row.kind == "view":
            source = roots.get(each.node.inputs[0], each.node.inputs[0])
            roots |= {name: source for name in each.node.outputs if name}
            last[source] = position
    last |= {roots.get(name, name): len(work.nodes) for name in work.given}
    ends: defaultdict[int, list[str]] = defaultdict(list)
    for name, position in last.items():
        ends[position].append(name)
    sizes = {name: graph.type_of(name).bytes // work.parts[name] for name in work.received}
    used = most = sum(sizes.values())
    for position, each in enumerate(work.nodes):
        if each.use.row.kind != "view":
            written = each.written_bytes(widths)
            sizes |= written
            used += sum(written.values())
            scratch = _node_scratch(graph, work.problem.precision, each)
            most = max(most, used + scratch.samples)
        used -= sum(sizes.pop(name, 0) for name in ends[position])
    return most


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes on one device of each of many possible stages, among which a search chooses.

    All fields are arrays of bytes, of equal shape, with one entry per possible stage.
    """

    state: NDArray[np.float64]
    """Parameters, gradients and optimizer state, without the 16-bit copies of parameters."""
    low_precision: NDArray[np.float64]
    """16-bit copies of parameters. A stage that recomputes does not keep them."""
    workspace: NDArray[np.float64]
    """Temporary tensors of one task."""
    received: NDArray[np.float64]
    """Messages that the stage receives for the forward of one micro-batch."""
    sent: NDArray[np.float64]
    """Messages that the stage sends in the forward of one micro-batch."""
    saved: NDArray[np.float64]
    """Tensors that one micro-batch saves for backward without recomputation."""

    def needed(
        self, problem: Problem, recompute: bool
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (constant, per micro-batch): the bytes of each stage that do not depend on the
        number of micro-batches in flight, and the bytes per micro-batch in flight.

        In inference, the second array is 0. In training, buffers for the gradients of the messages
        are included. With recomputation, a stage saves the values that it receives, which can have
        `max_received_to_sent_ratio` times the bytes of their messages. During a backward it also
        holds the recomputed tensors of one micro-batch.
        """
        constant = self.state + self.workspace
        if not problem.train:
            return constant + self.low_precision + self.received + self.sent, np.zeros_like(
                constant
            )
        constant = constant + 2 * (self.received + self.sent)
        if recompute:
            return constant + self.saved, self.received * max_received_to_sent_ratio(
                problem.precision
            )
        return constant + self.low_precision, self.saved


def fitting_micro_batches(
    free_bytes: NDArray[np.float64], bytes_each: NDArray[np.float64], most: int
) -> NDArray[np.float64]:
    """Return, for each stage, how many micro-batches in flight fit into memory, at most `most`.

    The stage has `free_bytes` bytes of free memory, and a micro-batch needs `bytes_each` bytes. The
    number is 0 if `free_bytes` is negative, and otherwise `most` if micro-batches need no bytes.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        counts = np.where(bytes_each > 0, np.floor(free_bytes / bytes_each), np.inf)
    return np.where(free_bytes < 0, 0.0, np.minimum(counts, most))


def graphpipe_table_2(k: int, size: int, next_k: int, next_size: int, next_in_flight: int) -> int:
    """Return the samples in flight at a stage by Table 2 of GraphPipe, for one successor. A sample
    is in flight if its forward has run at the stage and its backward has not.

    In its steady state, the stage runs `k` forwards, then `k` backwards, of micro-batches of `size`
    samples. Its successor does so with `next_k` micro-batches of `next_size` samples, and has
    `next_in_flight` samples in flight.
    """
    most = max(size, next_size)
    own = k * size
    following = next_k * next_size
    if own == following:
        more = following if most == following else 2 * most
    elif own < following:
        if own < next_size:
            more = next_size
        else:
            more = most if most == own else 2 * most
    elif size > following:
        more = own - following + size
    elif most == following:
        more = own
    else:
        more = own - following + 2 * most
    return next_in_flight + more


def in_flight_samples(k: int, size: int, next_k: int, next_size: int, next_in_flight: int) -> int:
    """Return the samples in flight at a stage of a kFkB schedule, in whole micro-batches. The
    forward of these samples has run at the stage, and their backward has not. The number is

        max(table_2, next_in_flight + k * size - gcd(k * size, next_k * next_size))

    rounded up to a multiple of `size`. The parameters are those of `graphpipe_table_2`.

    The second term prevents a deadlock: the successor runs `next_k` backwards only after `next_k`
    forwards. If neither of k * size and next_k * next_size divides the other, the number of Table 2
    can be too small for these forwards, and both stages would wait for each other.
    """
    together = math.gcd(k * size, next_k * next_size)
    least = next_in_flight + k * size - together
    most = max(least, graphpipe_table_2(k, size, next_k, next_size, next_in_flight))
    return -(-most // size) * size


def in_flight_samples_by_stage(
    ks: Sequence[int], sizes: Sequence[int], edges: Iterable[tuple[int, int]]
) -> tuple[int, ...]:
    """Return the samples in flight at each stage of a kFkB schedule, whose forward has run and
    whose backward has not. The number is the maximum of `in_flight_samples` over the stage's
    successors, but at least k * size.

    `ks` contains each stage's k: it runs k forwards, then k backwards. `sizes` contains the
    micro-batch size of each stage, in samples. `edges` are pairs (stage, successor) with stage <
    successor.
    """
    found = [k * size for k, size in zip(ks, sizes, strict=True)]
    for stage, following in sorted(edges, reverse=True):
        asked = in_flight_samples(
            ks[stage], sizes[stage], ks[following], sizes[following], found[following]
        )
        found[stage] = max(found[stage], asked)
    return tuple(found)
