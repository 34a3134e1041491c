"""Random graphs, placements and schedules for hypothesis."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.vendor.pretty import RepresentationPrinter

from autopipe.ir.batch import batch_axes_of
from autopipe.ir.graph import DType, Graph
from autopipe.ir.layout import are_even_splits, is_even_split
from autopipe.ir.ops import space_of
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task
from autopipe.ir.space import AxisKind, Space
from autopipe.passes.schedule.published.base import order_gpipe
from autopipe.passes.schedule.published.one_f_one_b import order_kfkb
from tests.distributed.support.builder import Builder
from tests.distributed.support.running import stage_graph

BATCH = 4
WIDTH = 4
CHANNELS = 2
IMAGE = (8, 6)
ROWS = 6
"""Rows of embedding tables; whole numbers in batches stay below it."""


@dataclass(frozen=True, slots=True)
class Case:
    """A graph, where and when it runs, and its loss (None for inference)."""

    graph: Graph
    placement: Placement
    schedule: Schedule
    loss: str | None

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        printer.text(repr(self))

    def __repr__(self) -> str:
        nodes = "\n".join(
            (
                f"  {index} {node.op} {' '.join(node.inputs)} -> {' '.join(node.outputs)} "
                f"{node.attributes}"
            )
            for index, node in enumerate(self.graph.nodes)
        )
        stages = "\n".join(f"  {stage}" for stage in self.placement.stages)
        return (
            f"loss {self.loss}, outputs "
            f"{self.graph.outputs}\n{nodes}\n{stages}\n{self.schedule.grid()}"
        )


@st.composite
def windows(
    draw: st.DrawFn, extents: tuple[int, ...], small_pads: bool = False
) -> dict[str, tuple[int, ...]]:
    """A window with strides, dilations and pads at each end as it may be, of which at least one
    fits in `extents`.

    With `small_pads` no window lies in pads alone, as those of a pooling may not.
    """
    found: dict[str, list[int]] = {
        "kernel_shape": [],
        "strides": [],
        "dilations": [],
        "begin": [],
        "end": [],
    }
    for extent in extents:
        dilation = draw(st.sampled_from([1, 1, 2])) if not small_pads else 1
        kernel = draw(st.sampled_from([1, 2, 3, 3]))
        reach = dilation * (kernel - 1) + 1
        pads = [draw(st.integers(0, min(reach - 1, 2))) for _ in range(2)]
        if extent + sum(pads) < reach:
            kernel = 1
            pads = [0, 0]
        for name, number in zip(
            found, (kernel, draw(st.sampled_from([1, 1, 2])), dilation, *pads), strict=True
        ):
            found[name].append(number)
    pads = found.pop("begin") + found.pop("end")
    return {name: tuple(numbers) for name, numbers in found.items()} | {"pads": tuple(pads)}


class _Growing:
    """A graph to which random nodes are added."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.builder = Builder()
        self.floats = [self.builder.input((BATCH, WIDTH)), self.builder.input((BATCH, 2, WIDTH))]
        self.ids = [self.builder.input((BATCH, 2), DType.INT64)]
        self.images: list[str] = []
        self.weights = [
            self.builder.parameter((WIDTH, WIDTH)),
            self.builder.parameter((ROWS, WIDTH)),
        ]

    def some(self, rank: int | None = None, width: int | None = None) -> str:
        """A float value, the youngest ones most often."""
        fitting = [
            name
            for name in self.floats
            if (rank is None or len(self.builder.shape(name)) == rank)
            and (width is None or self.builder.shape(name)[-1] == width)
        ]
        return self.draw(st.sampled_from(fitting[-4:]))

    def weight(self, shape: tuple[int, ...]) -> str:
        """A parameter of that shape, perhaps one that others use too."""
        fitting = [name for name in self.weights if self.builder.shape(name) == shape]
        if fitting and self.draw(st.booleans()):
            return self.draw(st.sampled_from(fitting))
        self.weights.append(self.builder.parameter(shape, self.draw(st.integers(0, 4)) > 0))
        return self.weights[-1]

    def grow(self) -> None:
        kinds = [
            self.unary, self.binary, self.product, self.product, self.bias, self.embedding, self.arg_max, self.flat,
            self.transposed, self.reduced, self.softmax, self.halves, self.joined, self.masked, self.normalised,
            self.convolved, self.convolved, self.pooled, self.flat_image,
        ]  # fmt: skip
        self.draw(st.sampled_from(kinds))()

    def unary(self) -> None:
        op = self.draw(st.sampled_from(["Tanh", "Sigmoid", "Neg", "Identity", "Relu"]))
        self.floats.append(self.builder.node(op, self.some()))

    def binary(self) -> None:
        first = self.some()
        shape = self.builder.shape(first)
        second = self.draw(
            st.sampled_from([name for name in self.floats if self.builder.shape(name) == shape])
        )
        self.floats.append(
            self.builder.node(self.draw(st.sampled_from(["Add", "Sub", "Mul"])), first, second)
        )

    def product(self) -> None:
        value = self.some(width=WIDTH)
        width = self.draw(st.sampled_from([WIDTH, WIDTH, 8]))
        self.floats.append(self.builder.node("MatMul", value, self.weight((WIDTH, width))))

    def bias(self) -> None:
        value = self.some()
        self.floats.append(
            self.builder.node("Add", value, self.weight(self.builder.shape(value)[-1:]))
        )

    def embedding(self) -> None:
        ids = self.draw(st.sampled_from(self.ids))
        self.floats.append(self.builder.node("Gather", self.weight((ROWS, WIDTH)), ids))

    def arg_max(self) -> None:
        self.ids.append(self.builder.node("ArgMax", self.some(3, WIDTH), axis=2, keepdims=0))

    def flat(self) -> None:
        value = self.some(3)
        batch, rows, width = self.builder.shape(value)
        shape = self.draw(st.sampled_from([(batch, rows * width), (batch * rows, width)]))
        self.floats.append(self.builder.node("Reshape", value, self.builder.constant(shape)))

    def transposed(self) -> None:
        self.floats.append(self.builder.node("Transpose", self.some(3), perm=(0, 2, 1)))

    def reduced(self) -> None:
        op = self.draw(st.sampled_from(["ReduceSum", "ReduceMean", "ReduceMax"]))
        axes = self.builder.constant([self.draw(st.integers(1, 2))])
        self.floats.append(self.builder.node(op, self.some(3), axes, keepdims=0))

    def softmax(self) -> None:
        self.floats.append(self.builder.node("Softmax", self.some(), axis=-1))

    def halves(self) -> None:
        value = self.some()
        axis = len(self.builder.shape(value)) - 1
        if self.builder.shape(value)[axis] % 2 == 0:
            first = self.builder.node("Split", value, outputs=2, axis=axis, num_outputs=2)
            self.floats += [first, self.builder.nodes[-1].outputs[1]]

    def joined(self) -> None:
        first = self.some()
        shape = self.builder.shape(first)
        second = self.draw(
            st.sampled_from([name for name in self.floats if self.builder.shape(name) == shape])
        )
        if shape[-1] <= 8:
            self.floats.append(self.builder.node("Concat", first, second, axis=len(shape) - 1))

    def masked(self) -> None:
        """A mask that depends on inputs alone is computed by every stage that needs it."""
        limit = self.builder.constant(2)
        mask = self.builder.node("Cast", self.builder.node("Greater", self.ids[0], limit), to=11)
        narrow = [name for name in self.floats if self.builder.shape(name) == (BATCH, 2)]
        if not narrow:
            narrow = [
                self.builder.node(
                    "ReduceMean", self.floats[1], self.builder.constant([2]), keepdims=0
                )
            ]
        self.floats.append(self.builder.node("Mul", narrow[-1], mask))

    def image(self) -> str:
        """A value of rows and columns that hold several channels."""
        if not self.images:
            self.images.append(self.builder.input((BATCH, CHANNELS, *IMAGE)))
        return self.draw(st.sampled_from(self.images[-2:]))

    def image_made(self, name: str) -> None:
        self.images.append(name)
        self.floats.append(name)

    def convolved(self) -> None:
        value = self.image()
        channels, *extents = self.builder.shape(value)[1:]
        groups = self.draw(st.sampled_from([1, 1, channels]))
        window = self.draw(windows(tuple(extents)))
        kernel = window.pop("kernel_shape")
        filters = groups if groups > 1 else CHANNELS * self.draw(st.sampled_from([1, 2]))
        weight = self.weight((filters, channels // groups, *kernel))
        bias = [self.weight(self.builder.shape(weight)[:1])] if self.draw(st.booleans()) else []
        self.image_made(self.builder.node("Conv", value, weight, *bias, group=groups, **window))

    def pooled(self) -> None:
        value = self.image()
        window = self.draw(windows(self.builder.shape(value)[2:], small_pads=True))
        if self.draw(st.booleans()):
            self.image_made(self.builder.node("MaxPool", value, **window))
        else:
            del window["dilations"]
            counted = self.draw(st.integers(0, 1))
            self.image_made(
                self.builder.node("AveragePool", value, count_include_pad=counted, **window)
            )

    def rectified(self) -> None:
        self.image_made(self.builder.node("Relu", self.image()))

    def flat_image(self) -> None:
        value = self.image()
        batch, *rest = self.builder.shape(value)
        self.floats.append(
            self.builder.node("Reshape", value, self.builder.constant((batch, math.prod(rest))))
        )

    def normalised(self) -> None:
        value = self.some(width=WIDTH)
        scale = self.weight((WIDTH,))
        bias = self.weight((WIDTH,))
        self.floats.append(self.builder.node("LayerNormalization", value, scale, bias, axis=-1))


@st.composite
def graphs(draw: st.DrawFn, train: bool, chained: bool = False) -> tuple[Graph, str | None]:
    """A graph with its loss, or with several outputs.

    With `chained`, a node reads the first product, so that two stages can exchange a value.
    """
    growing = _Growing(draw)
    builder = growing.builder
    growing.product()
    if chained:
        growing.floats.append(builder.node("Tanh", growing.floats[-1]))
    for _ in range(draw(st.integers(1, 8))):
        growing.grow()
    made = [name for name in growing.floats if name not in {value.name for value in builder.inputs}]
    if not train:
        given = [*growing.floats[:2], growing.ids[0], *growing.weights]
        names = draw(
            st.lists(st.sampled_from(made + growing.ids[1:]), min_size=1, max_size=3, unique=True)
        )
        names += draw(st.lists(st.sampled_from(given), max_size=1))
        return builder.graph(*names), None
    ends = draw(st.lists(st.sampled_from(made[-4:]), min_size=1, max_size=2, unique=True))
    if draw(st.booleans()):
        logits = growing.some(2)
        labels = builder.input(builder.shape(logits)[:1], DType.INT64, 0)
        if builder.shape(logits)[0] == BATCH and builder.shape(logits)[1] >= ROWS:
            ends.append(logits)
            loss = builder.node("SoftmaxCrossEntropyLoss", logits, labels)
            return builder.graph(loss), loss
    loss = builder.mean_square(ends[0])
    for end in ends[1:]:
        loss = builder.node("Add", loss, builder.mean_square(end))
    return builder.graph(loss), loss


@st.composite
def image_graphs(draw: st.DrawFn, train: bool) -> tuple[Graph, str | None]:
    """Convolutions and poolings one behind another, with its loss, or with the last two values as
    outputs.
    """
    growing = _Growing(draw)
    for _ in range(draw(st.integers(2, 5))):
        draw(
            st.sampled_from(
                [growing.convolved, growing.convolved, growing.pooled, growing.rectified]
            )
        )()
    if not train:
        return growing.builder.graph(*growing.images[-2:]), None
    loss = growing.builder.mean_square(growing.images[-1])
    return growing.builder.graph(loss), loss


def _assignment(draw: st.DrawFn, graph: Graph) -> list[list[int]]:
    """Nodes by stage: each at or after the stages of what it reads."""
    stages = draw(st.integers(1, 4))
    stage_of: dict[int, int] = {}
    contiguous = draw(st.booleans())
    for index, node in enumerate(graph.nodes):
        producers = [graph.producer(name) for name in node.inputs]
        least = max((stage_of[each] for each in producers if each is not None), default=0)
        if contiguous:
            least = max([least, *stage_of.values()])
        step = (
            draw(st.sampled_from([0, 0, 1]))
            if contiguous
            else draw(st.integers(0, stages - 1 - least))
        )
        stage_of[index] = min(least + step, stages - 1)
    nodes: list[list[int]] = [[] for _ in range(stages)]
    for index, stage in stage_of.items():
        nodes[stage].append(index)
    return [each for each in nodes if each]


def _splits(
    draw: st.DrawFn, graph: Graph, nodes: list[int], group: int
) -> tuple[tuple[int, tuple[Split, ...]], ...]:
    """Nothing, the batch, or any axes of each node."""
    kind = draw(st.sampled_from(["whole", "batch", "any", "any"]))
    if group == 1 or kind == "whole":
        return ()
    batch = batch_axes_of(graph)
    found = []
    for index in nodes:
        space = space_of(graph, graph.nodes[index])
        own = batch.axis(index)
        if kind == "batch" and own is not None and is_even_split(space, own, group):
            found.append((index, (Split(own, group),)))
        elif kind == "any":
            splits = _any_splits(draw, space, group)
            found += [(index, splits)] if splits else []
    return tuple(found)


def _any_splits(draw: st.DrawFn, space: Space, group: int) -> tuple[Split, ...]:
    """Some of the axes in any order, together into at most `group` blocks."""
    splits: tuple[Split, ...] = ()
    axes = [
        axis.name for axis in space.axes if axis.kind is not AxisKind.UNSPLITTABLE and axis.size > 1
    ]
    for axis in draw(st.permutations(axes)):
        left = group // math.prod(split.degree for split in splits)
        degree = draw(st.sampled_from([each for each in (1, 2, 4) if each <= left]))
        if degree > 1 and are_even_splits(space, (*splits, Split(axis, degree))):
            splits = (*splits, Split(axis, degree))
    return splits


@st.composite
def placements(draw: st.DrawFn, graph: Graph) -> Placement:
    """Stages on groups of 1, 2 or 4 of at most four devices, in any order of devices, several on
    one or on all.

    Now and then two or three pipelines, each cut and placed in its own way.
    """
    devices = draw(st.sampled_from([1, 2, 2, 4, 4]))
    stages = []
    for pipeline in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        for nodes in _assignment(draw, graph):
            degree = draw(st.sampled_from([each for each in (1, 1, 2, 4) if each <= devices]))
            group = tuple(draw(st.permutations(range(devices)))[:degree])
            splits = _splits(draw, graph, nodes, degree)
            read = tuple(
                sorted({name for node in nodes for name in graph.nodes[node].inputs if name})
            )
            gathers = read if draw(st.booleans()) else ()
            stages.append(
                Stage(
                    tuple(nodes),
                    group,
                    BATCH,
                    splits,
                    draw(st.integers(0, 3)) == 0,
                    pipeline,
                    gathers,
                )
            )
    return Placement(tuple(stages))


@st.composite
def schedules(draw: st.DrawFn, graph: Graph, placement: Placement, train: bool) -> Schedule:
    """1F1B, GPipe, or any order that can run: micro-batches in any order on each stage, backwards
    whole or halved.
    """
    stages = stage_graph(graph, placement)
    micro_batches = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["1f1b", "gpipe", "any"]))
    if kind != "any" and placement.pipelines == 1:
        order = order_kfkb if kind == "1f1b" else order_gpipe
        schedule = order(stages, micro_batches, train, lambda task: 1)
    else:
        schedule = _any_order(draw, stages, micro_batches, train)
    schedule.verify(stages, train)
    return schedule


def _any_order(draw: st.DrawFn, graph: StageGraph, micro_batches: int, train: bool) -> Schedule:
    tasks: set[Task] = set()
    halved = train and draw(st.booleans())
    for stage in range(len(graph.stage_devices)):
        for index in graph.micro_batches_of(stage, micro_batches):
            phases = [Phase.FORWARD]
            if halved and draw(st.booleans()):
                phases += [Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT]
            elif train:
                phases.append(Phase.BACKWARD)
            tasks.update(Task(stage, phase, index) for phase in phases)
    rest = sorted(
        tasks, key=lambda task: (task.micro_batch, task.phase is not Phase.FORWARD, task.stage)
    )
    done: set[Task] = set()
    rows: list[list[Task]] = [[] for _ in range(graph.devices)]
    while rest:
        task = draw(
            st.sampled_from([each for each in rest if _needs(each, graph.edges) & tasks <= done])
        )
        rest.remove(task)
        done.add(task)
        for device in graph.stage_devices[task.stage]:
            rows[device].append(task)
    return Schedule(micro_batches, tuple(map(tuple, rows)))


def _needs(task: Task, edges: tuple[tuple[int, int], ...]) -> set[Task]:
    """What a task waits for; of a whole and a split backward, those that there are."""
    if task.phase is Phase.FORWARD:
        return {
            Task(source, Phase.FORWARD, task.micro_batch)
            for source, target in edges
            if target == task.stage
        }
    if task.phase is Phase.WEIGHT_GRADIENT:
        return {Task(task.stage, Phase.INPUT_GRADIENT, task.micro_batch)}
    later = [target for source, target in edges if source == task.stage]
    backwards = (Phase.BACKWARD, Phase.INPUT_GRADIENT)
    found = {Task(target, phase, task.micro_batch) for target in later for phase in backwards}
    return found | {Task(task.stage, Phase.FORWARD, task.micro_batch)}


Drawn = st.SearchStrategy[tuple[Graph, str | None]]


@st.composite
def cases(draw: st.DrawFn, train: bool, drawn: Callable[[bool], Drawn] = graphs) -> Case:
    """A whole case with a graph of those that `drawn` gives."""
    graph, loss = draw(drawn(train))
    placement = draw(placements(graph))
    placement.verify(graph)
    return Case(graph, placement, draw(schedules(graph, placement, train)), loss)
