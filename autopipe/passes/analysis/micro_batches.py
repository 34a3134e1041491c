"""Stages with different micro-batch sizes: the graph of each stage, the parts of values that stages
send to each other, and the check that smaller micro-batches do not change the results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from autopipe.ir.batch import BatchAxes, BatchDimension, batch_axes_of, resize_batch
from autopipe.ir.errors import CodegenError, InfeasibleError
from autopipe.ir.graph import Graph, Node
from autopipe.ir.layout import Layout, TensorSlice, full_slice, holders_by_shard
from autopipe.ir.placement import Placement, crossing_values
from autopipe.ir.schedule import (
    EVERY_MICRO_BATCH,
    MicroBatchSlice,
    micro_batch_ratios,
    overlapping_intervals,
)
from autopipe.ir.space import AxisKind
from autopipe.ir.words import plural
from autopipe.passes.analysis.batch_forms import LossKind, loss_form
from autopipe.passes.analysis.stage_nodes import live_nodes
from autopipe.passes.frontend.read import mixing_nodes


@dataclass(frozen=True, slots=True)
class SharedPart:
    """The part of a value that a micro-batch of the sending stage and a micro-batch of the
    receiving stage have in common.

    source_slice, target_slice: the micro-batches of the sender and the receiver that have such a
    part.
    sent: the part, as a slice of the sender's value.
    received: the part, as a slice of the receiver's value.
    """

    source_slice: MicroBatchSlice
    target_slice: MicroBatchSlice
    sent: TensorSlice
    received: TensorSlice


def shared_parts(
    graph: Graph,
    batch: BatchAxes,
    name: str,
    source: tuple[int, tuple[int, ...]],
    target: tuple[int, tuple[int, ...]],
) -> tuple[SharedPart, ...]:
    """Return the parts of the value `name` that one stage sends to another, for all pairs of
    micro-batches with common samples.

    `source` and `target` are pairs (samples per micro-batch, shape of the value) of the sending and
    the receiving stage. With equal sizes, there is one part: the full value. With different sizes,
    a value without samples is sent in full to each micro-batch of the receiver, once. Raises
    InfeasibleError as `check_batch_dimension` does.
    """
    (source_size, _) = source
    (target_size, _) = target
    if source_size == target_size:
        return (
            SharedPart(
                EVERY_MICRO_BATCH, EVERY_MICRO_BATCH, full_slice(source[1]), full_slice(target[1])
            ),
        )
    check_batch_dimension(graph, batch, name, source_size, target_size)
    period = math.lcm(source_size, target_size)
    sends = period // source_size
    receipts = period // target_size
    place = batch.of(name)
    found: list[SharedPart] = []
    for j in range(receipts):
        for i in overlapping_intervals(j, receipts, sends):
            turns = MicroBatchSlice(i, sends), MicroBatchSlice(j, receipts)
            if place is None:
                found.append(SharedPart(*turns, full_slice(source[1]), full_slice(target[1])))
                break
            start = max(i * source_size, j * target_size)
            stop = min((i + 1) * source_size, (j + 1) * target_size)
            sides = (
                _sample_slices(place, *each, start, stop) for each in ((i, *source), (j, *target))
            )
            found += (SharedPart(*turns, *boxes) for boxes in zip(*sides, strict=True))
    return tuple(found)


def _sample_slices(
    place: BatchDimension, index: int, size: int, shape: tuple[int, ...], start: int, stop: int
) -> Iterator[TensorSlice]:
    """Yield the slices of a value that contain the samples `start` to `stop` - 1 of the batch. The
    value has the samples of micro-batch `index`, which has `size` samples.

    There are several slices if another axis precedes the batch axis in a merged dimension.
    """
    for outer in range(place.outer):
        first = (outer - index) * size
        starts = [0] * len(shape)
        stops = list(shape)
        starts[place.dimension], stops[place.dimension] = (
            (first + each) * place.inner for each in (start, stop)
        )
        yield TensorSlice(tuple(starts), tuple(stops))


def part_transfers(
    hold: Layout, need: Layout, senders: Sequence[int], receivers: Sequence[int], shared: SharedPart
) -> Iterator[tuple[int, int, TensorSlice, TensorSlice]]:
    """Yield (sender, receiver, slice of the sender's local tensor, slice of the receiver's local
    tensor) for each message that transfers the part `shared` of a value from one group of devices
    to another.

    hold, need: layouts of the value in the groups `senders` and `receivers`.

    If several senders hold a shard, receivers take it from each of them in turn, so that no sender
    serves all receivers. A receiver that holds the shard itself takes it from itself.
    """
    held = [
        (box, [senders[place] for place in places])
        for box, places in holders_by_shard(hold, len(senders))
    ]

    @cache
    def parts(own: TensorSlice) -> list[tuple[list[int], TensorSlice, TensorSlice]]:
        """Return (devices that hold it, slice of their local tensor, slice of the receiver's local
        tensor) for each shard of the senders that overlaps with `own`, the slice of the value that
        a receiver needs.
        """
        wanted = own.intersect(shared.received)
        if wanted is None:
            return []
        wanted = wanted.moved_between(shared.received, shared.sent)
        cuts = ((holders, box, box.intersect(wanted)) for box, holders in held)
        return [
            (
                holders,
                common.relative_to(box),
                common.moved_between(shared.sent, shared.received).relative_to(own),
            )
            for holders, box, common in cuts
            if common is not None
        ]

    for position, receiver in enumerate(receivers):
        for holders, sent, received in parts(need.shard(position)):
            sender = receiver if receiver in holders else holders[position % len(holders)]
            yield sender, receiver, sent, received


def check_batch_dimension(
    graph: Graph, batch: BatchAxes, name: str, source: int, target: int
) -> None:
    """Raise InfeasibleError if the value `name` cannot be sent from micro-batches of `source`
    samples to micro-batches of `target` samples.

    Such a value depends on samples but has no single batch dimension, and the sizes differ. For
    example, the mean over the samples of one micro-batch does not give the mean over a micro-batch
    of another size.
    """
    places = batch.values.get(name, ())
    if source == target or len(places) == 1:
        return
    nodes = live_nodes(graph, (name,)) if not places else ()
    if places or any(batch.values.get(each) for node in nodes for each in graph.nodes[node].inputs):
        raise InfeasibleError(
            f"{name!r} is sent from a stage with micro-batches of {source} "
            f"{plural(source, 'sample')} to a stage with micro-batches of {target}, but the "
            "value lacks a unique batch dimension",
            hint=(
                "use equal micro-batch sizes for the stages that compute and read the value, or "
                "merge the stages"
            ),
        )


def micro_batch_size(graph: Graph, placement: Placement) -> int:
    """Return the number of samples of one micro-batch of the graph. If no input has a batch axis,
    return the maximum micro-batch size of the stages.
    """
    for name, axis in graph.batch_axes:
        return graph.type_of(name).shape[axis]
    return max(stage.micro_batch_size for stage in placement.stages)


def stage_micro_batches(graph: Graph, placement: Placement) -> tuple[int, ...]:
    """Return, for each stage, the number of the stage's micro-batches that have together the
    samples of one micro-batch of the graph. Raises CodegenError if a stage's micro-batch size does
    not divide that of the graph.
    """
    try:
        ratios = micro_batch_ratios(placement, micro_batch_size(graph, placement))
    except InfeasibleError as error:
        raise CodegenError(error.message, hint=error.hint) from error
    return ratios or (1,) * len(placement.stages)


def stage_graphs(graph: Graph, placement: Placement) -> tuple[Graph, ...]:
    """Return, for each stage, the graph with the stage's micro-batch size as its batch size.

    Nodes, values and parameters keep their names and indices. Raises ModelError if the graph cannot
    be changed to a smaller batch.
    """
    largest = micro_batch_size(graph, placement)
    sizes = (stage.micro_batch_size for stage in placement.stages)
    return tuple(graph if size == largest else resize_batch(graph, size) for size in sizes)


_INDEPENDENT_KINDS = (AxisKind.PARALLEL, AxisKind.MEAN, AxisKind.UNSPLITTABLE)
"""Kinds of batch axes of nodes for which smaller, equal micro-batches give the results of the full
batch: samples that are computed independently, and means, because the mean of the means of
micro-batches is the mean over all samples.
"""


def readers_of_reduced_samples(graph: Graph) -> tuple[Node, ...]:
    """Return the nodes that read a value without a batch dimension that is computed from samples,
    such as the mean of a batch.
    """
    batch = batch_axes_of(graph)
    computed = {each.name for each in graph.inputs}
    found = []
    for node in graph.nodes:
        if computed.isdisjoint(node.inputs):
            continue
        computed.update(filter(None, node.outputs))
        if any(name in computed and name not in batch.values for name in node.inputs):
            found.append(node)
    return tuple(found)


def check_micro_batch_sizes(graph: Graph, placement: Placement, loss: str | None = None) -> None:
    """Raise InfeasibleError if the micro-batch sizes of stages change the results of the step.

    Results change if a stage with smaller micro-batches computes batch statistics, a sum over
    samples, or another operator that mixes samples; a mean over samples is permitted. If `loss` is
    given and is not a mean over samples, results also change if such a stage computes a function of
    a sum or mean over samples. They also change if a value without a single batch dimension is sent
    between stages with different sizes.
    """
    ratios = stage_micro_batches(graph, placement)
    if set(ratios) == {1}:
        return
    batch = batch_axes_of(graph)
    mixing = {node.name for node in mixing_nodes(graph)}
    pairs = zip(graph.nodes, batch.nodes, strict=True)
    mixing |= {
        node.name
        for node, axes in pairs
        if any(each.kind not in _INDEPENDENT_KINDS for each in axes)
    }
    if loss is not None and loss_form(graph, loss, None, None).kind is not LossKind.MEAN:
        mixing |= {node.name for node in readers_of_reduced_samples(graph)}
    for index, (stage, times) in enumerate(zip(placement.stages, ratios, strict=True)):
        mixed = next(
            (graph.nodes[node] for node in stage.nodes if graph.nodes[node].name in mixing), None
        )
        if times > 1 and mixed is not None:
            raise InfeasibleError(
                f"stage {index} would compute different results on micro-batches of "
                f"{stage.micro_batch_size} {plural(stage.micro_batch_size, 'sample')} "
                f"than on the step's micro-batches of {stage.micro_batch_size * times}: {mixed.op} "
                f"{mixed.name!r} mixes samples",
                hint="use the largest micro-batch size for this stage, or equal micro-batch "
                "sizes for all stages",
            )
    sizes = [stage.micro_batch_size for stage in placement.stages]
    for name, source, target in crossing_values(graph, placement):
        check_batch_dimension(graph, batch, name, sizes[source], sizes[target])
