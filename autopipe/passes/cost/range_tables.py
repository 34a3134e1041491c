"""Time and memory of each contiguous range of a chain's blocks as one stage, for any degree of data
parallelism.

A chain is a topological order of the graph's nodes, divided into blocks of consecutive nodes. A
matrix of this module contains at [i, j] a cost of the stage that consists of blocks i to j - 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from autopipe.ir.attention_kernels import min_cuda_capability
from autopipe.ir.cluster import Device, Link
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.chain import (
    Chain,
    Matrix,
    incoming_sums,
    item_sums,
    outgoing_sums,
    range_maxima,
    range_sums,
    values_between_blocks,
)
from autopipe.passes.analysis.gradients import saved_tensors, sent_bytes, workspace_of
from autopipe.passes.analysis.operators import SampleAxes, element_bytes, sample_axes
from autopipe.passes.cost.communication import CollectiveCost, message_seconds
from autopipe.passes.cost.memory import MemoryParts, ParameterState, parameter_state
from autopipe.passes.cost.roofline import (
    mean_accumulate_seconds,
    node_seconds,
    task_overhead_seconds,
    update_seconds,
)
from autopipe.passes.cost.stage_work import updated_fraction

_Item = TypeVar("_Item")
_Sized = tuple[list[int], float]


@dataclass(frozen=True, slots=True)
class RangeBytes:
    """Bytes of each range for one micro-batch, in two parts.

    sharded: bytes of tensors with a batch dimension, which data-parallel replicas divide.
    replicated: bytes of all other tensors, which each replica holds in full.
    """

    sharded: Matrix
    replicated: Matrix

    @staticmethod
    def of(
        sums: Callable[[int, list[_Item]], Matrix],
        chain: Chain,
        items: Iterable[tuple[bool, _Item]],
    ) -> RangeBytes:
        """Return the bytes of the ranges, summed by `sums` from `items`.

        `sums` is a function of `analysis/chain` from (number of blocks, items) to a matrix, for
        example `item_sums`. An item describes one tensor by its blocks and its bytes, in the form
        that `sums` reads. `items` are pairs (True if the tensor is sharded, its item).
        """
        parts: dict[bool, list[_Item]] = {True: [], False: []}
        for is_sharded, item in items:
            parts[is_sharded].append(item)
        return RangeBytes(sums(chain.blocks, parts[True]), sums(chain.blocks, parts[False]))

    def local(self, degree: int) -> Matrix:
        """Return the bytes on each of `degree` replicas."""
        return self.sharded / degree + self.replicated

    def scaled(self, fraction: float) -> Matrix:
        """Return the bytes if a micro-batch has only the fraction `fraction` of the samples."""
        return self.sharded * fraction + self.replicated


@dataclass(frozen=True, slots=True)
class RangeTables:
    """Costs of all ranges of a chain. Each matrix is indexed by [first block, block after the
    last].
    """

    problem: Problem
    chain: Chain
    samples: SampleAxes
    received: RangeBytes
    """Bytes of the values that the range receives per micro-batch."""
    sent: RangeBytes
    """Bytes of the values that the range sends per micro-batch."""
    arriving: Matrix
    """Number of values that the range receives per micro-batch. Each value is one message."""
    leaving: Matrix
    """Number of values that the range sends per micro-batch."""
    kept: RangeBytes
    """Bytes saved for backward per micro-batch."""
    workspace: RangeBytes
    """Peak bytes of temporary tensors in a forward or backward of one micro-batch."""
    state: Matrix
    """Bytes of parameters and gradients."""
    low_precision: Matrix
    """Bytes of 16-bit copies of parameters, which are not part of `state`. A stage that recomputes
    does not keep them.
    """
    optimizer: Matrix
    """Bytes of optimizer state, without sharding."""
    gradients: Matrix
    """Bytes of gradients."""
    operators: tuple[Matrix, Matrix]
    """Numbers of operators that the host starts in a forward and in a backward."""

    def host_seconds(self, launch_s: float, recompute: bool) -> tuple[Matrix, Matrix]:
        """Return (forward, backward): the seconds in which the host starts the operators of a
        forward and of a backward, at `launch_s` seconds per operator. With `recompute`, backward
        includes a second forward. In inference, backward is 0.
        """
        forward, backward = (each * launch_s for each in self.operators)
        if not self.problem.train:
            return forward, np.zeros_like(forward)
        return forward, backward + forward if recompute else backward

    def host_wait(
        self, device: Device, forward: Matrix, backward: Matrix, recompute: bool
    ) -> Matrix:
        """Return the seconds per micro-batch during which a device waits until its host has started
        operators.

        `forward` and `backward` are the results of `seconds` for the type `device`. With
        `recompute`, backward includes a second forward.
        """
        added = self.accumulate_seconds(device, self.problem.micro_batches) * self.problem.train
        on_device = forward, backward + added + (forward if recompute else 0.0)
        on_host = self.host_seconds(device.host_launch_s, recompute)
        waits: Matrix = np.maximum(0.0, on_host[0] - on_device[0]) + np.maximum(
            0.0, on_host[1] - on_device[1]
        )
        return waits

    def seconds(self, degree: int, device: Device) -> tuple[Matrix, Matrix]:
        """Return (forward, backward): the seconds of one micro-batch whose samples are divided
        among `degree` replicas of type `device`.

        The entries are infinite for ranges with a node whose samples `degree` does not divide.
        """
        samples = self.samples
        shares = np.array([1.0 if axis is None else 1.0 / degree for axis in samples.axes])
        forward, backward = node_seconds(self.problem.work, device, self.problem.precision, shares)
        if not self.problem.train:
            backward = np.zeros_like(forward)
        uneven = np.array(
            [not samples.can_divide(node, degree) for node in range(len(shares))], dtype=float
        )
        forbidden = self.infinite_with(uneven)
        starts = task_overhead_seconds(device)
        return (
            range_sums(self.chain.sums_by_block(forward)) + starts[0] + forbidden,
            range_sums(self.chain.sums_by_block(backward))
            + starts[1] * self.problem.train
            + forbidden,
        )

    def infinite_with(self, nodes: Matrix) -> Matrix:
        """Return a matrix with infinity for each range that contains a marked node, and 0 for all
        other ranges. `nodes` is a vector with 1 for each marked node of the graph, otherwise 0.
        """
        return np.where(range_sums(self.chain.sums_by_block(nodes)) > 0.5, np.inf, 0.0)

    def accumulate_seconds(self, device: Device, micro_batches: int) -> Matrix:
        """Return the mean seconds per micro-batch to add its gradients to those of earlier
        micro-batches of the step, without the time to launch kernels.
        """
        return mean_accumulate_seconds(device, self.gradients, micro_batches, tensors=0)

    def step_end_seconds(self, degree: int, device: Device, reduce: CollectiveCost) -> Matrix:
        """Return the seconds per step of the gradient reduction among `degree` replicas and of the
        optimizer's update. `reduce` is the cost of the reduction as a function of bytes.
        """
        updated = self.gradients * updated_fraction(self.problem, degree)
        states = self.problem.optimizer.states
        return reduce.seconds_each(self.gradients) + update_seconds(
            device, updated, states, tensors=0
        )

    def overhead(
        self,
        degree: int,
        device: Device,
        before: Link | None,
        after: Link | None,
        reduce: CollectiveCost,
    ) -> Matrix:
        """Return the seconds per micro-batch that a stage spends on other work than its nodes:
        messages and, in training, the accumulation of gradients, and the gradient reduction and the
        update divided by the number of micro-batches.

        The stage has `degree` replicas of type `device`. It receives activations over the link
        `before` and, in training, gradients over the link `after`; a link is None if the stage is
        the first or the last one. `reduce` is the cost of the gradient reduction as a function of
        bytes.
        """
        found = np.zeros_like(self.gradients)
        if before is not None:
            found = found + message_seconds(before, self.arriving, self.received.local(degree))
        if not self.problem.train:
            return found
        if after is not None:
            found = found + message_seconds(after, self.leaving, self.sent.local(degree))
        count = self.problem.micro_batches
        found = found + self.step_end_seconds(degree, device, reduce) / count
        return found + self.accumulate_seconds(device, count)

    def state_bytes(self, degree: int) -> Matrix:
        """Return the bytes of parameters, gradients and optimizer state on each of `degree`
        replicas, without 16-bit copies of parameters.
        """
        found: Matrix = self.state + self.optimizer * updated_fraction(self.problem, degree)
        return found

    def memory(self, degree: int, recompute: bool) -> tuple[Matrix, Matrix]:
        """Return (constant, per micro-batch): the bytes on each of `degree` replicas that do not
        depend on the number of micro-batches in flight, and the bytes per micro-batch in flight,
        whose forward has run and whose backward has not.
        """
        parts = MemoryParts(
            self.state_bytes(degree),
            self.low_precision,
            self.workspace.local(degree),
            self.received.local(degree),
            self.sent.local(degree),
            self.kept.local(degree),
        )
        return parts.needed(self.problem, recompute)


def make_range_tables(
    problem: Problem, chain: Chain, samples: SampleAxes | None = None
) -> RangeTables:
    """Return the tables of the costs of all ranges of `chain`. `samples` are the batch axes of the
    problem's graph; if None, they are computed.
    """
    graph = problem.graph
    samples = samples or sample_axes(graph)
    block_of: dict[int, int] = dict(enumerate(chain.block_of.tolist()))
    sizes = sent_bytes(graph, problem.precision)
    messages = [
        (samples.has_batch_dimension(name), (block, readers, float(sizes[name])))
        for name, block, readers in values_between_blocks(graph, block_of)
    ]
    counts = [(block, readers, 1.0) for _, (block, readers, _) in messages]
    return RangeTables(
        problem,
        chain,
        samples,
        received=RangeBytes.of(incoming_sums, chain, messages),
        sent=RangeBytes.of(outgoing_sums, chain, messages),
        arriving=incoming_sums(chain.blocks, counts),
        leaving=outgoing_sums(chain.blocks, counts),
        kept=RangeBytes.of(item_sums, chain, _saved_tensors(problem, block_of, samples)),
        workspace=_workspace_by_range(problem, chain, samples),
        state=state_sums(
            problem,
            chain,
            lambda each: each.total - each.low_precision_bytes - each.optimizer_bytes,
        ),
        low_precision=state_sums(problem, chain, lambda each: each.low_precision_bytes),
        optimizer=state_sums(problem, chain, lambda each: each.optimizer_bytes),
        gradients=state_sums(problem, chain, lambda each: each.gradient_bytes),
        operators=(
            range_sums(chain.sums_by_block(np.array([each.operators for each in problem.work]))),
            range_sums(
                chain.sums_by_block(np.array([each.backward_operators for each in problem.work]))
            ),
        ),
    )


def state_sums(problem: Problem, chain: Chain, size: Callable[[ParameterState], int]) -> Matrix:
    """Return the matrix that contains, for each range, the sum of `size(state)` in bytes over the
    parameters that the range reads. `state` is the unsharded state of one parameter. A parameter
    that several blocks of a range read counts once.
    """
    readers = problem.graph.consumers()
    items = []
    for name in (each.value.name for each in problem.graph.parameters):
        blocks = sorted({int(chain.block_of[node]) for node in readers.get(name, ())})
        items.append((blocks, float(size(parameter_state(problem, ((name, 1),))))))
    return item_sums(chain.blocks, items)


def _saved_tensors(
    problem: Problem, block_of: Mapping[int, int], samples: SampleAxes
) -> list[tuple[bool, _Sized]]:
    """Return (True if replicas divide the tensor, (blocks that save the tensor in ascending order,
    bytes)) for each tensor that is saved for backward.
    """
    blocks: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    facts: dict[tuple[str, int], tuple[bool, float]] = {}
    for index, found in enumerate(
        saved_tensors(problem.graph, problem.precision, min_cuda_capability(problem.cluster))
    ):
        for kept in found:
            blocks[kept.key].add(block_of[index])
            cut = any(samples.axes[index] in dimension for dimension in kept.dimensions)
            facts.setdefault(kept.key, (cut, float(kept.bytes)))
    return [(cut, (sorted(blocks[key]), size)) for key, (cut, size) in facts.items()]


def _workspace_by_range(problem: Problem, chain: Chain, samples: SampleAxes) -> RangeBytes:
    """Return the peak bytes of temporary tensors of each range: the maximum over its nodes of the
    bytes of the node's operands, results and further temporary tensors. Operands that no node
    computes do not count.

    In training, operands and results stand for their gradients, which have equal sizes.
    """
    graph = problem.graph
    widths = element_bytes(problem.graph, problem.precision)
    most = {True: np.zeros(chain.blocks), False: np.zeros(chain.blocks)}
    for index, (node, use) in enumerate(zip(graph.nodes, samples.uses, strict=True)):
        if use.row.kind == "view":
            continue
        size: dict[bool, float] = {True: 0.0, False: 0.0}
        scratch = workspace_of(graph, problem.precision, index, use, {})
        size[samples.axes[index] is not None] += scratch.samples
        size[False] += scratch.weight * problem.train
        for name in (*node.inputs, *node.outputs):
            if name and graph.producer(name) is not None:
                size[samples.has_batch_dimension(name)] += (
                    graph.type_of(name).elements * widths[name]
                )
        block = int(chain.block_of[index])
        for cut, figure in size.items():
            most[cut][block] = max(most[cut][block], figure)
    return RangeBytes(range_maxima(most[True]), range_maxima(most[False]))
