"""Time and memory of each contiguous range of a chain's blocks as one stage, for any degree of data
parallelism.

A chain is the graph as a sequence of blocks of nodes. A matrix of this module has at [i, j] the
cost of the stage of blocks i to j - 1.
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
    distinct_sums,
    incoming_sums,
    outgoing_sums,
    range_maxima,
    range_sums,
    values_between,
)
from autopipe.passes.analysis.gradients import kept_values, most_widened, scratch_of, sent_bytes
from autopipe.passes.analysis.operators import SampleAxes, element_bytes, sample_axes
from autopipe.passes.cost.communication import Cost
from autopipe.passes.cost.memory import State, state_of
from autopipe.passes.cost.roofline import (
    accumulate_per_byte,
    node_seconds,
    task_seconds,
    update_line,
)
from autopipe.passes.cost.stage_work import updated_part

_Item = TypeVar("_Item")
_Sized = tuple[list[int], float]


@dataclass(frozen=True, slots=True)
class RangeBytes:
    """Bytes of each range, divided into tensors with a batch axis and tensors without.

    Replicas divide the first kind among them; each replica holds the second kind in full.
    """

    sharded: Matrix
    replicated: Matrix

    @staticmethod
    def of(
        sums: Callable[[int, list[_Item]], Matrix],
        chain: Chain,
        items: Iterable[tuple[bool, _Item]],
    ) -> RangeBytes:
        """Sum up items by `sums`. Each item is a pair (is sharded, arguments of `sums`)."""
        parts: dict[bool, list[_Item]] = {True: [], False: []}
        for is_sharded, item in items:
            parts[is_sharded].append(item)
        return RangeBytes(sums(chain.blocks, parts[True]), sums(chain.blocks, parts[False]))

    def local(self, degree: int) -> Matrix:
        """Return the bytes on each of `degree` replicas."""
        return self.sharded / degree + self.replicated


@dataclass(frozen=True, slots=True)
class Tables:
    """Costs of all ranges. Each matrix is indexed by (first block, block after the last)."""

    problem: Problem
    chain: Chain
    samples: SampleAxes
    received: RangeBytes
    """Bytes of the values that the range receives per micro-batch."""
    sent: RangeBytes
    """Bytes of the values that the range sends per micro-batch."""
    arriving: Matrix
    """Number of values received. Each value is one message."""
    leaving: Matrix
    """Number of values sent."""
    kept: RangeBytes
    """Bytes saved for backward per micro-batch."""
    workspace: RangeBytes
    """Peak bytes of temporary tensors of one task."""
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
        """Return the seconds of the host for a forward and for a backward, if the host needs
        `launch_s` seconds to start an operator.
        """
        forward, backward = (each * launch_s for each in self.operators)
        if not self.problem.train:
            return forward, np.zeros_like(forward)
        return forward, backward + forward if recompute else backward

    def host_wait(
        self, device: Device, forward: Matrix, backward: Matrix, recompute: bool
    ) -> Matrix:
        """Return the seconds per micro-batch during which the device waits for its host.

        `forward` and `backward` are the device's seconds from `seconds`.
        """
        count = self.problem.micro_batches
        added = self.gradients * accumulate_per_byte(device) * (1 - 1 / count) * self.problem.train
        on_device = forward, backward + added + (forward if recompute else 0.0)
        on_host = self.host_seconds(device.host_launch_s, recompute)
        waits: Matrix = np.maximum(0.0, on_host[0] - on_device[0]) + np.maximum(
            0.0, on_host[1] - on_device[1]
        )
        return waits

    def seconds(self, degree: int, device: Device) -> tuple[Matrix, Matrix]:
        """Return the seconds of forward and of backward of one micro-batch on `degree` replicas.

        The entries are infinite for ranges with a node that cannot be divided by samples.
        """
        samples = self.samples
        shares = np.array([1.0 if axis is None else 1.0 / degree for axis in samples.axes])
        forward, backward = node_seconds(self.problem.work, device, self.problem.precision, shares)
        if not self.problem.train:
            backward = np.zeros_like(forward)
        uneven = np.array(
            [not samples.divides(node, degree) for node in range(len(shares))], dtype=float
        )
        forbidden = np.where(range_sums(self.chain.by_block(uneven)) > 0.5, np.inf, 0.0)
        starts = task_seconds(device)
        return (
            range_sums(self.chain.by_block(forward)) + starts[0] + forbidden,
            range_sums(self.chain.by_block(backward)) + starts[1] * self.problem.train + forbidden,
        )

    def overhead(
        self, degree: int, device: Device, before: Link | None, after: Link | None, reduce: Cost
    ) -> Matrix:
        """Return the seconds per micro-batch of messages, of the accumulation of gradients, and of
        the gradient reduction and the update divided by the number of micro-batches.

        A stage receives activations over the link `before` and, in training, gradients over the
        link `after`; None is no link. `reduce` is the cost of the gradient reduction.
        """

        def message_seconds(sizes: Matrix, values: Matrix, link: Link | None) -> Matrix:
            seconds: Matrix = np.zeros_like(sizes)
            return (
                seconds
                if link is None
                else values * link.latency_s + sizes / link.bandwidth_bytes_per_s
            )

        found = message_seconds(self.received.local(degree), self.arriving, before)
        if self.problem.train:
            found = found + message_seconds(self.sent.local(degree), self.leaving, after)
            count = self.problem.micro_batches
            line = update_line(device, self.problem.optimizer.states)
            updated = self.gradients * updated_part(self.problem, degree)
            update = updated * line.per_byte_s + line.fixed_s * (self.gradients > 0)
            found = found + (reduce.seconds_each(self.gradients) + update) / count
            found = found + self.gradients * accumulate_per_byte(device) * (1 - 1 / count)
        return found

    def held(self, degree: int) -> Matrix:
        """Return the bytes of parameters, gradients and optimizer state on each of `degree`
        replicas.
        """
        found: Matrix = self.state + self.optimizer * updated_part(self.problem, degree)
        return found

    def memory(self, degree: int, recompute: bool) -> tuple[Matrix, Matrix]:
        """Return (constant, per micro-batch): bytes on each of `degree` replicas that do not depend
        on the micro-batches in flight, and bytes per micro-batch in flight.
        """
        received = self.received.local(degree)
        sent = self.sent.local(degree)
        always = self.held(degree) + self.workspace.local(degree)
        if not self.problem.train:
            return always + self.low_precision + received + sent, np.zeros_like(always)
        always = always + 2 * (received + sent)
        kept = self.kept.local(degree)
        kept_received = received * most_widened(self.problem.precision)
        return (always + kept, kept_received) if recompute else (always + self.low_precision, kept)


def make_tables(problem: Problem, chain: Chain, samples: SampleAxes | None = None) -> Tables:
    """Return the tables of a problem's chain. `samples` are the batch axes of the problem's graph,
    computed if None.
    """
    graph = problem.graph
    samples = samples or sample_axes(graph)
    block_of: dict[int, int] = dict(enumerate(chain.block_of.tolist()))
    sizes = sent_bytes(graph, problem.precision)
    messages = [
        (samples.carries(name), (block, readers, float(sizes[name])))
        for name, block, readers in values_between(graph, block_of)
    ]
    counts = [(block, readers, 1.0) for _, (block, readers, _) in messages]
    return Tables(
        problem,
        chain,
        samples,
        received=RangeBytes.of(incoming_sums, chain, messages),
        sent=RangeBytes.of(outgoing_sums, chain, messages),
        arriving=incoming_sums(chain.blocks, counts),
        leaving=outgoing_sums(chain.blocks, counts),
        kept=RangeBytes.of(distinct_sums, chain, _kept(problem, block_of, samples)),
        workspace=_workspace(problem, chain, samples),
        state=state_sums(
            problem,
            chain,
            lambda each: each.total - each.low_precision_bytes - each.optimizer_bytes,
        ),
        low_precision=state_sums(problem, chain, lambda each: each.low_precision_bytes),
        optimizer=state_sums(problem, chain, lambda each: each.optimizer_bytes),
        gradients=state_sums(problem, chain, lambda each: each.gradient_bytes),
        operators=(
            range_sums(chain.by_block(np.array([each.operators for each in problem.work]))),
            range_sums(
                chain.by_block(np.array([each.backward_operators for each in problem.work]))
            ),
        ),
    )


def state_sums(problem: Problem, chain: Chain, size: Callable[[State], int]) -> Matrix:
    """Return the matrix of the bytes that `size` selects from the unsharded state of the parameters
    of each range. A parameter that several blocks of a range read counts once.
    """
    readers = problem.graph.consumers()
    items = []
    for name in (each.value.name for each in problem.graph.parameters):
        blocks = sorted({int(chain.block_of[node]) for node in readers.get(name, ())})
        items.append((blocks, float(size(state_of(problem, ((name, 1),))))))
    return distinct_sums(chain.blocks, items)


def _kept(
    problem: Problem, block_of: Mapping[int, int], samples: SampleAxes
) -> list[tuple[bool, _Sized]]:
    """Return (is sharded, (blocks that save it, bytes)) of each value that is saved for
    backward.
    """
    blocks: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    facts: dict[tuple[str, int], tuple[bool, float]] = {}
    for index, found in enumerate(
        kept_values(problem.graph, problem.precision, min_cuda_capability(problem.cluster))
    ):
        for kept in found:
            blocks[kept.key].add(block_of[index])
            cut = any(samples.axes[index] in dimension for dimension in kept.dimensions)
            facts.setdefault(kept.key, (cut, float(kept.bytes)))
    return [(cut, (sorted(blocks[key]), size)) for key, (cut, size) in facts.items()]


def _workspace(problem: Problem, chain: Chain, samples: SampleAxes) -> RangeBytes:
    """Return the workspace of each range: the maximum over its nodes of the bytes of the node's
    operands, results and temporary tensors.

    In training these are the gradients of the operands and results; in inference the tensors
    themselves.
    """
    graph = problem.graph
    widths = element_bytes(problem.graph, problem.precision)
    most = {True: np.zeros(chain.blocks), False: np.zeros(chain.blocks)}
    for index, (node, use) in enumerate(zip(graph.nodes, samples.uses, strict=True)):
        if use.row.kind == "view":
            continue
        size: dict[bool, float] = {True: 0.0, False: 0.0}
        scratch = scratch_of(graph, problem.precision, index, use, {})
        size[samples.axes[index] is not None] += scratch.samples
        size[False] += scratch.weight * problem.train
        for name in (*node.inputs, *node.outputs):
            if name and graph.producer(name) is not None:
                size[samples.carries(name)] += graph.type_of(name).elements * widths[name]
        block = int(chain.block_of[index])
        for cut, figure in size.items():
            most[cut][block] = max(most[cut][block], figure)
    return RangeBytes(range_maxima(most[True]), range_maxima(most[False]))
