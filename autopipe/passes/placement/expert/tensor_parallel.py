"""Heads, feed-forward columns and rows, and the vocabulary within groups of devices; samples among the groups."""

from __future__ import annotations

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.sharding.regions import check_samples, whole_group_splits, with_samples_split


def tensor_parallel(problem: Problem, degree: int) -> Placement:
    """One stage on all devices, in groups of `degree` neighbours that share layers; 0 takes the largest that does.

    Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019),
    section 3. The largest degree is that of a whole node, or less where more nodes of the graph can be shared so.
    Raises InfeasibleError where `degree` does not divide the devices, or groups cannot share the samples.
    """
    graph, devices = problem.graph, problem.cluster.size
    samples = sample_axes(graph)
    if degree == 0:
        degree, found = _largest(problem)
    elif devices % degree:
        raise InfeasibleError(f"{devices} devices cannot be parted into groups of {degree}", where="strategy.tensor")
    else:
        found = whole_group_splits(graph, devices // degree, degree)
    check_samples(problem, devices // degree, "expert")
    nodes = tuple(range(len(graph.nodes)))
    splits = with_samples_split(samples, nodes, devices // degree, found)
    recompute = problem.train and problem.recompute == "full"
    return Placement((Stage(nodes, tuple(range(devices)), problem.micro_batch_size, splits, recompute),))


def _largest(problem: Problem) -> tuple[int, dict[int, tuple[Split, ...]]]:
    """The degree within a node that shares most nodes of the graph, the largest of equals, with their splits."""
    devices = problem.cluster.size
    within = [each for each in range(1, problem.cluster.devices_per_node + 1) if devices % each == 0]
    degrees = [each for each in within if problem.micro_batch_size % (devices // each) == 0]
    if not degrees:
        check_samples(problem, devices // within[-1], "expert")
    found = {degree: whole_group_splits(problem.graph, devices // degree, degree) for degree in degrees}
    best = max(degrees, key=lambda degree: (len(found[degree]), degree))
    return best, found[best]
