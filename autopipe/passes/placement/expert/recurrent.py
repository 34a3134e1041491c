"""Layers of a recurrent network in a pipeline, each on several devices that share samples."""

from __future__ import annotations

from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.sharding.regions import check_samples, with_samples_split


def data_and_pipeline(problem: Problem) -> Placement:
    """A stage for each recurrent layer, or for as many in turn as let stages share the devices equally.

    Wu et al., "Google's Neural Machine Translation System" (2016), section 3.1, as PaSE (IPDPS 2021, section IV)
    compares with it. What comes before the first layer joins it, what follows a layer joins that layer. Raises
    InfeasibleError where a stage's devices cannot share the samples.
    """
    graph, devices = problem.graph, problem.cluster.size
    samples = sample_axes(graph)
    layer_of = _layers(graph, samples)
    layers = 1 + max(layer_of)
    count = max(each for each in range(1, min(layers, devices) + 1) if devices % each == 0)
    size = devices // count
    check_samples(problem, size, "expert")
    stages = []
    for stage in range(count):
        nodes = tuple(node for node, layer in enumerate(layer_of) if layer * count // layers == stage)
        group = tuple(range(stage * size, (stage + 1) * size))
        splits = with_samples_split(samples, nodes, size, {})
        recompute = problem.train and problem.recompute == "full"
        stages.append(Stage(nodes, group, problem.micro_batch_size, splits, recompute))
    return Placement(tuple(stages))


def _layers(graph: Graph, samples: SampleAxes) -> list[int]:
    """For each node the recurrent layer it belongs to: the last that it depends on, else the first that reads it."""
    found: list[int] = []
    for node, use in zip(graph.nodes, samples.uses, strict=True):
        producers = (graph.producer(name) for name in node.inputs if name)
        before = max((found[each] for each in producers if each is not None), default=0)
        found.append(before + (use.row.kind == "recurrent"))
    readers = graph.consumers()
    for index in range(len(found) - 1, -1, -1):
        after = (found[each] for name in graph.nodes[index].outputs for each in readers.get(name, ()))
        found[index] = found[index] or min(after, default=1)
    return [layer - 1 for layer in found]
