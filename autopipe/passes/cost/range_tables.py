"""Time and memory of every range of a chain's blocks as one stage, for any degree of data parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autopipe.ir.cluster import Device, Link
from autopipe.ir.placement import recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.chain import (
    Chain,
    Matrix,
    distinct_sums,
    incoming_sums,
    outgoing_sums,
    range_maxima,
    range_sums,
)
from autopipe.passes.analysis.gradients import kept_values
from autopipe.passes.analysis.operators import SampleAxes, element_bytes, sample_axes
from autopipe.passes.cost.communication import Cost
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.roofline import accumulate_per_byte, node_seconds, task_seconds, update_line
from autopipe.passes.cost.stage_work import updated_part


@dataclass(frozen=True, slots=True)
class Shared:
    """Bytes of every range: those that replicas share out and those that each holds whole."""

    cut: Matrix
    whole: Matrix

    def local(self, degree: int) -> Matrix:
        """Bytes on one of `degree` replicas."""
        return self.cut / degree + self.whole


@dataclass(frozen=True, slots=True)
class Tables:
    """Inputs of the search. Every matrix is indexed by (first block, block after the last)."""

    problem: Problem
    chain: Chain
    samples: SampleAxes
    received: Shared
    sent: Shared
    arriving: Matrix
    """Number of values received: each is a message of its own."""
    leaving: Matrix
    """Number of values sent."""
    kept: Shared
    workspace: Shared
    state: Matrix
    """Bytes of parameters and gradients."""
    optimizer: Matrix
    """Bytes of what the optimizer keeps of them in all."""
    gradients: Matrix

    def seconds(self, degree: int, device: Device) -> tuple[Matrix, Matrix]:
        """Forward and backward of one micro-batch shared among `degree` devices; infinite where it cannot be shared."""
        samples = self.samples
        shares = np.array([1.0 if axis is None else 1.0 / degree for axis in samples.axes])
        forward, backward = node_seconds(self.problem.work, device, self.problem.precision, shares)
        if not self.problem.train:
            backward = np.zeros_like(forward)
        uneven = np.array([not samples.divides(node, degree) for node in range(len(shares))], dtype=float)
        forbidden = np.where(range_sums(self.chain.by_block(uneven)) > 0.5, np.inf, 0.0)
        starts = task_seconds(device)
        return (
            range_sums(self.chain.by_block(forward)) + starts[0] + forbidden,
            range_sums(self.chain.by_block(backward)) + starts[1] * self.problem.train + forbidden,
        )

    def overhead(self, degree: int, device: Device, before: Link | None, after: Link | None, reduce: Cost) -> Matrix:
        """Seconds a micro-batch of receiving and of adding up gradients, and of the step's end shared by all of them.

        A stage receives activations from the stages before it and, in training, gradients from those after it.
        """
        found = _message_seconds(self.received.local(degree), self.arriving, before)
        if self.problem.train:
            found = found + _message_seconds(self.sent.local(degree), self.leaving, after)
            count = self.problem.micro_batches
            line = update_line(device, self.problem.optimizer.states)
            updated = self.gradients * updated_part(self.problem, degree)
            update = updated * line.per_byte_s + line.fixed_s * (self.gradients > 0)
            found = found + (reduce.seconds_each(self.gradients) + update) / count
            found = found + self.gradients * accumulate_per_byte(device) * (1 - 1 / count)
        return found

    def held(self, degree: int) -> Matrix:
        """Bytes of parameters, gradients and optimizer state on each of `degree` replicas."""
        found: Matrix = self.state + self.optimizer * updated_part(self.problem, degree)
        return found

    def memory(self, degree: int, recompute: bool) -> tuple[Matrix, Matrix]:
        """Bytes on a device of a stage: those that are always there, and those for each micro-batch it keeps."""
        received, sent = self.received.local(degree), self.sent.local(degree)
        always = self.held(degree) + self.workspace.local(degree)
        if not self.problem.train:
            return always + received + sent, np.zeros_like(always)
        always = always + 2 * (received + sent)
        kept = self.kept.local(degree)
        return (always + kept, received) if recompute else (always, kept)


def make_tables(problem: Problem, chain: Chain, samples: SampleAxes | None = None) -> Tables:
    """All matrices of a problem's chain; `samples` are those of its graph, where they are known already."""
    graph = problem.graph
    samples = samples or sample_axes(graph)
    values = list(_crossing(problem, chain))
    widths = element_bytes(graph, samples.uses, problem.precision)
    state, optimizer, gradients = _parameters(problem, chain)

    def shared(build, items: list) -> Shared:  # type: ignore[no-untyped-def,type-arg]
        cut = [item[1:] for item in items if item[0]]
        whole = [item[1:] for item in items if not item[0]]
        return Shared(build(chain.blocks, cut), build(chain.blocks, whole))

    located = [(samples.carries(name), *rest) for name, *rest in values]
    return Tables(
        problem,
        chain,
        samples,
        received=shared(incoming_sums, located),
        sent=shared(outgoing_sums, located),
        arriving=incoming_sums(chain.blocks, [(block, readers, 1.0) for _, block, readers, _ in values]),
        leaving=outgoing_sums(chain.blocks, [(block, readers, 1.0) for _, block, readers, _ in values]),
        kept=shared(distinct_sums, list(_kept(problem, chain, samples))),
        workspace=_workspace(problem, chain, samples, widths),
        state=state,
        optimizer=optimizer,
        gradients=gradients,
    )


def _message_seconds(sizes: Matrix, values: Matrix, link: Link | None) -> Matrix:
    if link is None:
        return np.zeros_like(sizes)
    seconds: Matrix = values * link.latency_s + sizes / link.bandwidth_bytes_per_s
    return seconds


def _crossing(problem: Problem, chain: Chain) -> Iterable[tuple[str, int, list[int], float]]:
    """(value, producing block, reading blocks, bytes) of every value that a cut could have to send."""
    graph = problem.graph
    recomputed = recomputed_nodes(graph)
    for name, readers in graph.consumers().items():
        producer = graph.producer(name)
        if producer is None or producer in recomputed:
            continue
        block = int(chain.block_of[producer])
        blocks = sorted({int(chain.block_of[reader]) for reader in readers if reader not in recomputed})
        if blocks and blocks[-1] > block:
            yield name, block, blocks, float(graph.type_of(name).bytes)


def _parameters(problem: Problem, chain: Chain) -> tuple[Matrix, Matrix, Matrix]:
    """Bytes of parameters and gradients, of the optimizer's state, and of gradients alone."""
    graph = problem.graph
    consumers = graph.consumers()
    state, optimizer, gradients = [], [], []
    for parameter in graph.parameters:
        name = parameter.value.name
        blocks = sorted({int(chain.block_of[reader]) for reader in consumers.get(name, ())})
        figures = state_of(problem, ((name, 1),))
        state.append((blocks, float(figures.total - figures.optimizer_bytes)))
        optimizer.append((blocks, float(figures.optimizer_bytes)))
        gradients.append((blocks, float(figures.gradient_bytes)))
    return (
        distinct_sums(chain.blocks, state),
        distinct_sums(chain.blocks, optimizer),
        distinct_sums(chain.blocks, gradients),
    )


def _kept(problem: Problem, chain: Chain, samples: SampleAxes) -> Iterable[tuple[bool, list[int], float]]:
    """(whether replicas share it out, blocks that keep it, bytes) of everything kept."""
    blocks: dict[tuple[str, int], list[int]] = {}
    facts: dict[tuple[str, int], tuple[bool, float]] = {}
    for index, found in enumerate(kept_values(problem.graph, samples.uses, problem.precision)):
        for kept in found:
            blocks.setdefault(kept.key, []).append(int(chain.block_of[index]))
            cut = any(samples.axes[index] in dimension for dimension in kept.dimensions)
            facts.setdefault(kept.key, (cut, float(kept.bytes)))
    for key, (cut, size) in facts.items():
        yield cut, sorted(set(blocks[key])), size


def _workspace(problem: Problem, chain: Chain, samples: SampleAxes, widths: dict[str, int]) -> Shared:
    """The largest task's passing memory: gradients of a node's tensors, or without training what is alive around it."""
    graph = problem.graph
    most = {True: np.zeros(chain.blocks), False: np.zeros(chain.blocks)}
    for index, (node, use) in enumerate(zip(graph.nodes, samples.uses, strict=True)):
        if use.row.kind == "view":
            continue
        size: dict[bool, float] = {True: 0.0, False: 0.0}
        for name in (*node.inputs, *node.outputs):
            if name and graph.producer(name) is not None:
                size[samples.carries(name)] += graph.type_of(name).elements * widths[name]
        block = int(chain.block_of[index])
        for cut, figure in size.items():
            most[cut][block] = max(most[cut][block], figure)
    return Shared(range_maxima(most[True]), range_maxima(most[False]))
