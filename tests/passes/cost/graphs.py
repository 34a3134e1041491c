"""Small graphs, clusters and problems made by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

from autopipe.configs.cluster import Efficiencies
from autopipe.ir.cluster import Cluster, Device, Level, Link
from autopipe.ir.graph import DType, Fill, Graph, Node, Parameter, Value
from autopipe.ir.placement import Placement, crossing_values
from autopipe.ir.problem import Mode, Problem
from autopipe.passes.cost.roofline import roofline_costs

F32 = DType.FLOAT32


class Builder:
    """Collects nodes; every method returns the name of what it wrote."""

    def __init__(self, batch: int, width: int) -> None:
        self.inputs: tuple[Value, ...] = (Value("x", F32, (batch, width)),)
        self.parameters: list[Parameter] = []
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.shapes: dict[str, tuple[int, ...]] = {"x": (batch, width)}

    def parameter(self, name: str, shape: tuple[int, ...], trainable: bool = True) -> str:
        self.parameters.append(Parameter(Value(name, F32, shape), Fill(0.0), trainable))
        self.shapes[name] = shape
        return name

    def node(
        self, op: str, inputs: tuple[str, ...], shape: tuple[int, ...], **attributes: Any
    ) -> str:
        name = f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(
            Node(name, op, inputs, (f"{name}_out",), tuple(sorted(attributes.items())))
        )
        self.values.append(Value(f"{name}_out", F32, shape))
        self.shapes[f"{name}_out"] = shape
        return f"{name}_out"

    def linear(self, data: str, width: int, trainable: bool = True) -> str:
        weight = self.parameter(
            f"w{len(self.parameters)}", (self.shapes[data][-1], width), trainable
        )
        return self.matmul(data, weight)

    def matmul(self, data: str, weight: str) -> str:
        return self.node(
            "MatMul", (data, weight), (*self.shapes[data][:-1], self.shapes[weight][-1])
        )

    def relu(self, data: str) -> str:
        return self.node("Relu", (data,), self.shapes[data])

    def add(self, left: str, right: str) -> str:
        return self.node("Add", (left, right), self.shapes[left])

    def finish(self, *outputs: str) -> Graph:
        parameters = tuple(self.parameters)
        nodes = tuple(self.nodes)
        values = tuple(self.values)
        graph = Graph("test", 20, self.inputs, parameters, (), nodes, outputs, values, (("x", 0),))
        graph.verify()
        return graph


def perceptron(widths: list[int], batch: int = 8) -> Graph:
    """Linear layers of these widths with a Relu after each."""
    builder = Builder(batch, widths[0])
    data = "x"
    for width in widths[1:]:
        data = builder.relu(builder.linear(data, width))
    return builder.finish(data)


HOST_LAUNCHES = (0.0, 3e-7, 2e-6, 1e-5)
"""Seconds of a host for an operator: free; less than a launch of `device`; about as long; much
longer.
"""


def device(
    memory: int = 10**9,
    flops: float = 1e12,
    bandwidth: float = 1e11,
    latency: float = 1e-6,
    host_launch: float = 0.0,
) -> Device:
    efficiency = tuple((field.name, 0.5) for field in fields(Efficiencies))
    return Device(
        "toy", memory, (("fp32", flops),), bandwidth, latency, efficiency, host_launch_s=host_launch
    )


def cluster(
    count: int, per_node: int | None = None, memory: int = 10**9, **figures: float
) -> Cluster:
    """`count` devices; 1e10 bytes/s and 1e-6 s within a node, 1e9 bytes/s and 1e-5 s between
    nodes.
    """
    inside = per_node or count
    levels = (
        Level("node", inside, Link(1e-6, 1e10)),
        Level("cluster", -(-count // inside), Link(1e-5, 1e9)),
    )
    return Cluster("toy", (device(memory, **figures),) * count, levels)


def hosted(devices: Cluster, launch_s: float) -> Cluster:
    """Return the cluster with hosts that take `launch_s` seconds per operator."""
    return replace(
        devices, devices=tuple(replace(each, host_launch_s=launch_s) for each in devices.devices)
    )


def problem(
    graph: Graph, devices: Cluster, micro_batches: int = 4, mode: Mode = Mode.TRAIN, **more: Any
) -> Problem:
    """One whose batch is `micro_batches` times the graph's own."""
    size = graph.inputs[0].shape[0] * micro_batches
    work = roofline_costs(graph, more.get("precision", "fp32"))
    return Problem(graph, work, devices, size, micro_batches, mode, **more)


def edge_bytes(given: Problem, placement: Placement) -> dict[tuple[int, int], int]:
    """Bytes of whole values that one forward sends from one stage to another; backward returns as
    many.
    """
    found: Counter[tuple[int, int]] = Counter()
    for name, source, target in crossing_values(given.graph, placement):
        found[source, target] += given.graph.type_of(name).bytes
    return dict(found)
