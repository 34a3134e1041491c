"""Memory on a device of a stage: state, saved activations, the working memory of one task; and how
many samples a stage keeps under kFkB schedules (Jeon et al., "GraphPipe", 2024, section 6 and
appendix A.1).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopipe.ir.attention_kernels import capability_of
from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.program import BUCKET_BYTES
from autopipe.passes.analysis.gradients import (
    Scratch,
    attention_tensors,
    kept_values,
    scratch_of,
    sent_bytes,
    waiting_operands,
)
from autopipe.passes.analysis.operators import element_bytes, low_precision_copies
from autopipe.passes.analysis.recompute import cutter
from autopipe.passes.analysis.training import matrices
from autopipe.passes.cost.stage_work import StageNode, StageWork, holders_of, stage_work

OPTIMIZER_STATE_BYTES = 4
"""Optimizers keep fp32 numbers."""
_ALONE: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class State:
    """Bytes on one device that a step neither makes nor frees."""

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    tensors: int = 0
    updated_bytes: int = 0
    """Bytes of the gradients by which the device updates parameters: a share of them where shares
    are kept.
    """
    updates: int = 0
    """Number of the tensors that the optimizer updates: parameters, and shares of buckets of them.
    """
    low_precision_bytes: int = 0
    """Bytes of the parameters' copies in 16 bits."""
    cast_bytes: int = 0
    """Bytes of such copies that every forward makes for itself instead."""

    @property
    def total(self) -> int:
        return (
            self.parameter_bytes
            + self.low_precision_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
        )


def state_of(
    problem: Problem,
    parts: Iterable[tuple[str, int]],
    copies: Mapping[str, int] = _ALONE,
    read_again: Container[str] | None = None,
) -> State:
    """The state of parameters, given as (name, in how many parts a group holds it).

    `copies` says by name how many devices hold the same part, 1 where it says nothing: what the
    optimizer keeps of it may be shared out among them (`Optimizer.shard`). `read_again` are the
    parameters of stages that recompute, which hold none in 16 bits; all where every stage does,
    where it is not given.
    """
    own = low = cast = gradients = optimizer = tensors = updated = updates = in_shares = 0
    figures = _figures(problem.graph, problem.precision)
    train = problem.train
    shard = problem.optimizer.shard
    for name, count in parts:
        whole, elements, is_trained, is_matrix, copy = figures[name]
        size = (
            whole if train or not copy else copy
        ) // count  # Inference loads what is copied in 16 bits.
        own += size
        if not train:
            continue
        if problem.recomputes_all if read_again is None else name in read_again:
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
    return State(
        own,
        gradients,
        optimizer,
        tensors,
        updated,
        updates + -(-in_shares // BUCKET_BYTES),
        low,
        cast,
    )


@remembered(GRAPHS)
def _figures(graph: Graph, precision: str) -> dict[str, tuple[int, int, bool, bool, int]]:
    """For each parameter its bytes, its elements, whether it is trained, whether it is a matrix,
    and the bytes of its copy in 16 bits.
    """
    found = {}
    own = matrices(graph)
    copies = low_precision_copies(graph, precision)
    for each in graph.parameters:
        value = each.value
        is_trained = each.trainable and each.value.dtype.is_floating
        copy = 2 * value.elements * (value.name in copies)
        found[value.name] = value.bytes, value.elements, is_trained, value.name in own, copy
    return found


@remembered(2)
def static_memory(problem: Problem, placement: Placement) -> tuple[int, ...]:
    """Bytes of parameters, gradients and optimizer state on each device, once each however many
    stages hold them.
    """
    works = stage_work(problem, placement)
    copies = {name: len(devices) for name, devices in holders_of(works).items()}
    again = read_again(works)
    on_device: list[tuple[int, ...]] = [()] * problem.cluster.size
    for index, work in enumerate(works):
        for device in work.stage.devices:
            on_device[device] += (index,)
    totals = {}
    for stages in set(on_device):
        held: dict[str, int] = {}
        for name, parts in (each for index in stages for each in works[index].parameter_parts):
            held[name] = min(parts, held.get(name, parts))
        totals[stages] = state_of(problem, held.items(), copies, again).total
    return tuple(totals[stages] for stages in on_device)


def read_again(works: Iterable[StageWork]) -> frozenset[str]:
    """The parameters of stages that recompute and hold no copies of them in 16 bits."""
    again = (
        work
        for work in works
        if work.stage.recompute and not work.stage.holds_copies and work.problem.train
    )
    return frozenset(name for work in again for name, _ in work.parameter_parts)


def saved_bytes(problem: Problem, nodes: Iterable[StageNode]) -> dict[tuple[str, int], int]:
    """Bytes on one device of each value that backward keeps of some nodes for one micro-batch, by
    its key.
    """
    kept = kept_values(problem.graph, problem.precision, capability_of(problem.cluster))
    found: dict[tuple[str, int], int] = {}
    for each in nodes:
        for value in kept[each.index]:
            local = value.local_bytes(each.sharing.degrees)
            found[value.key] = max(local, found.get(value.key, 0))
    return found


def waiting_bytes(work: StageWork) -> int:
    """Bytes on one device, for one micro-batch, that wait for the second half of a split backward:
    what its operators keep, and the gradients of their results.
    """
    graph = work.problem.graph
    waiting = waiting_operands(work.problem.graph)
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


def recomputed_bytes(work: StageWork, held: int) -> tuple[int, int]:
    """Bytes on one device of a stage that recomputes: of the values between its segments for each
    micro-batch, and the most that there is besides while a segment's backward runs; `held`
    micro-batches are in flight. The second counts activations brought back for the nodes still to
    come, gradients of the node at work, and those of the segment's results, which stay until it is
    done, and the segment's copies of parameters in 16 bits.
    """
    graph = work.problem.graph
    precision = work.problem.precision
    figures = _figures(graph, precision)
    parts = dict(work.parameter_parts)
    kept = kept_values(graph, precision, capability_of(work.problem.cluster))
    widths = element_bytes(graph, precision)
    segments = cutter(graph)(tuple(each.index for each in work.nodes), held)
    nodes = {each.index: each for each in work.nodes}
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
            largest = max(largest, brought_back + _gradient_bytes(work.problem, each, widths))
        given = sum(
            size for name, size in written.items() if name in segments.passing or name in work.given
        )
        most = max(most, given + largest)
        passing += sum(size for name, size in written.items() if name in segments.passing)
    return passing, most


def message_bytes(work: StageWork, crossing: Mapping[str, int]) -> tuple[int, int]:
    """Bytes on one device of the messages that it receives from other stages for one micro-batch,
    and of those it sends: of values among `crossing`, in at least as many parts as it says.
    """
    sizes = sent_bytes(work.problem.graph, work.problem.precision)
    received = sum(sizes[name] // work.parts[name] for name in work.received)
    sent = sum(
        sizes[name] // max(work.parts[name], crossing[name])
        for name in work.given.keys() & crossing.keys()
    )
    return received, sent


def argument_bytes(work: StageWork) -> int:
    """Bytes on one device of the values that it receives for one micro-batch, in the types that it
    computes with.
    """
    return sum(work.problem.graph.type_of(name).bytes // work.parts[name] for name in work.received)


def gradient_workspace(work: StageWork) -> int:
    """Bytes of gradients alive at once in backward: at most about those of the largest node's
    operands and results.
    """
    graph = work.problem.graph
    widths = element_bytes(graph, work.problem.precision)
    return max((_gradient_bytes(work.problem, each, widths) for each in work.nodes), default=0)


def _gradient_bytes(problem: Problem, each: StageNode, widths: Mapping[str, int]) -> int:
    """Bytes of the gradients of a node's results and operands, parameters not among them, and of
    what it makes besides: the probabilities and the scores of an attention that writes them, two
    more of one that computes them again, a block of a loss's scores.
    """
    graph = problem.graph
    if each.use.row.kind == "view":
        return 0
    read = each.read_bytes(widths)
    operands = sum(size for name, size in read.items() if graph.producer(name) is not None)
    beside = attention_tensors(graph, problem.precision, capability_of(problem.cluster)).get(
        each.index
    )
    scores = (
        beside.tensor.local_bytes(each.sharing.degrees)
        if beside is not None and beside.scores
        else 0
    )
    scores *= 2 if beside is None or beside.kept else 4
    scratch = _scratch(problem, each)
    return (
        sum(each.written_bytes(widths).values())
        + operands
        + scores
        + scratch.samples
        + scratch.weight
    )


def _scratch(problem: Problem, each: StageNode) -> Scratch:
    return scratch_of(problem.graph, problem.precision, each.index, each.use, each.sharing.degrees)


def live_bytes(work: StageWork) -> int:
    """The most bytes of values that one forward holds at once, each freed after its last use."""
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
            most = max(most, used + _scratch(work.problem, each).samples)
        used -= sum(sizes.pop(name, 0) for name in ends[position])
    return most


def table_2(k: int, size: int, next_k: int, next_size: int, next_in_flight: int) -> int:
    """Samples in flight at a stage with `k` and micro-batches of `size`, before one successor: the
    paper's Table 2.
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
    """As Table 2 has it, in whole micro-batches of the stage, and never fewer than the successor
    has to see to go on.

    Where a table's figure is no whole number of micro-batches the next larger one keeps the
    pipeline busy. The successor runs `next_k` micro-batches backward only after as many forward;
    where neither k * size divides the other, the table can have too few for that, and both stages
    would wait for each other.
    """
    together = math.gcd(k * size, next_k * next_size)
    least = next_in_flight + k * size - together
    most = max(least, table_2(k, size, next_k, next_size, next_in_flight))
    return -(-most // size) * size


def stages_in_flight(
    ks: Sequence[int], sizes: Sequence[int], edges: Iterable[tuple[int, int]]
) -> tuple[int, ...]:
    """Samples in flight at each stage of a graph whose edges lead to larger indices: the most that
    a successor asks.
    """
    found = [k * size for k, size in zip(ks, sizes, strict=True)]
    for stage, following in sorted(edges, reverse=True):
        asked = in_flight_samples(
            ks[stage], sizes[stage], ks[following], sizes[following], found[following]
        )
        found[stage] = max(found[stage], asked)
    return tuple(found)
