"""A stage's nodes on local shards, with the exchanges that its splits ask for; and the ranks' blocks of parameters.

The ranks of a group together compute one function, and each rank's gradient of a value it holds is its own share:
shares of copies add up to the whole. Then the backward of every exchange is its transpose, and a parameter's gradient
is the sum over the ranks that hold it, whatever is split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autopipe.ir.batch import BatchAxes, Samples
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import Constant, Graph, Node, Value
from autopipe.ir.layout import Box, Layout, are_blocks, even_degree_hint, holders_by_box, mesh_of, replicated
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.ops import OPERATORS, Spaces, qualified_name, signature_of
from autopipe.ir.ops.operator import Signature, joint_splits
from autopipe.ir.placement import Split, Stage
from autopipe.ir.program import Collective, Compute, Operation, Shard, StageCode
from autopipe.ir.space import AxisKind, Space
from autopipe.passes.analysis.resharding import Exchange, NodeLayouts, node_layouts, taken_layouts, with_exchanges
from autopipe.passes.analysis.stage_nodes import StageNodes


@dataclass(frozen=True, slots=True)
class ShardedStage:
    """A stage's code and how its group holds what it takes and gives."""

    code: StageCode
    inputs: dict[str, Layout]
    parameters: dict[str, Layout]
    outputs: dict[str, Layout]


@dataclass(frozen=True, slots=True)
class _Use:
    """One node of the stage with its space and splits."""

    index: int
    node: Node
    signature: Signature
    space: Space
    splits: tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class Demands:
    """Requirements of the rest of the program on the layouts of a stage."""

    whole: frozenset[str] = frozenset()
    """Parameters that every device must hold whole."""
    shares: frozenset[str] = frozenset()
    """Scalars that nothing computes with: they may leave the stage as partial sums (a loss is added up when it is
    reported)."""


def shard_stage(
    graph: Graph, number: int, stage: Stage, nodes: StageNodes, demands: Demands, batch: BatchAxes
) -> ShardedStage:
    """The local forward of `stage` computing `nodes`; `batch` says where samples are in the program's micro-batches.

    Partial results are reduced at once, to the whole or to shards, but for the shares that `demands` allows. Raises
    CodegenError for splits that cannot be executed.
    """
    group = len(stage.devices)
    uses = tuple(_use(graph, index, splits, group) for index, splits in nodes.nodes)
    forms = tuple(node_layouts(graph, use.index, use.space, use.splits, group) for use in uses)
    taken = taken_layouts(graph, forms, demands.whole)
    worker = _Sharding(graph, stage, taken, nodes.outputs, demands.shares, batch)
    worker.place(uses, forms)
    return worker.finish(number)


def _use(graph: Graph, index: int, splits: tuple[Split, ...], group: int) -> _Use:
    node = graph.nodes[index]
    signature = signature_of(graph, node)
    space = _spaces(graph)[index]
    splits = tuple(split for split in splits if split.degree > 1)
    _check_splits(node, space, splits, group)
    return _Use(index, node, signature, space, splits)


@remembered(GRAPHS)
def _spaces(graph: Graph) -> Spaces:
    return Spaces(graph)


def _check_splits(node: Node, space: Space, splits: tuple[Split, ...], group: int) -> None:
    """Raise CodegenError unless the splits leave every device of the group an equal block of the node's work."""
    wanted = " ".join(map(str, splits))
    if group % math.prod(split.degree for split in splits) or len({split.axis for split in splits}) < len(splits):
        raise CodegenError(
            f"a node split as {wanted} over {group} devices cannot be executed",
            hint="each axis can be split once, and the product of all degrees must divide the number of devices",
            where=repr(node.name),
        )
    for split in splits:
        _check_split(node, space, split)
    if not are_blocks(space, splits):
        raise CodegenError(f"a share of {wanted} of {node.op} is not one block of its tensors", where=repr(node.name))


def _check_split(node: Node, space: Space, split: Split) -> None:
    """Raise CodegenError unless the axis is there and can be cut into equal parts."""
    axis = next((axis for axis in space.axes if axis.name == split.axis), None)
    if axis is None:
        names = " ".join(axis.name for axis in space.axes) or "none"
        raise CodegenError(f"{node.op} has no axis {split.axis!r}", hint=f"it has {names}", where=repr(node.name))
    if axis.kind is AxisKind.WHOLE:
        raise CodegenError(f"{node.op} cannot be split along {axis.name!r}", where=repr(node.name))
    if axis.extent % split.degree:
        raise CodegenError(
            f"axis {axis.name!r} of {node.op} has extent {axis.extent}: {split.degree} devices cannot share it equally",
            hint=even_degree_hint(axis.extent, split.degree),
            where=repr(node.name),
        )


def _joint(use: _Use) -> tuple[tuple[str, ...], ...]:
    """The sets of split axes that the node's operator asks a group for: each joint one, and those it tells over."""
    degrees = {split.axis: split.degree for split in use.splits}
    alone = [(axis,) for axis in joint_splits(use.space, degrees)]
    told = OPERATORS[qualified_name(use.node)].statistics(use.signature, use.space, degrees) if alone else ()
    return tuple(dict.fromkeys((*alone, *(each.axes for each in told))))


@dataclass(slots=True)
class _Sharding:
    """The operations of a stage as they are put together.

    `values` has each form of a value that the group holds: the first, by which it is known, under its own name.
    """

    graph: Graph
    stage: Stage
    taken: dict[str, Layout]
    outputs: tuple[str, ...]
    shares: frozenset[str]
    batch: BatchAxes
    operations: list[Operation] = field(default_factory=list)
    layouts: dict[str, Layout] = field(default_factory=dict)
    values: dict[tuple[str, Layout], Value] = field(default_factory=dict)
    spelled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for name in self.outputs:
            if name not in self.taken and self.graph.producer(name) is None:
                self.taken[name] = replicated(self.graph.type_of(name).shape)
        for name, layout in self.taken.items():
            self._hold(name, layout, name)

    def _hold(self, name: str, layout: Layout, spelled: str) -> Value:
        """A form of the value in that layout, called `spelled`."""
        value = self.graph.type_of(name)
        local = Value(spelled, value.dtype, layout.local_shape())
        self.values[name, layout] = local
        if spelled == name:
            self.layouts[name] = layout
        return local

    def place(self, uses: tuple[_Use, ...], forms: tuple[NodeLayouts, ...]) -> None:
        """Add the operations of all nodes and the exchanges between them."""
        by_index = {use.index: use for use in uses}
        group = len(self.stage.devices)
        steps = tuple(with_exchanges(forms, self.taken, frozenset(self.outputs), self.shares, group))
        reduced = {step.value for step in steps if isinstance(step, Exchange) and step.step.source.is_partial}
        for step in steps:
            if isinstance(step, NodeLayouts):
                self._compute(by_index[step.index], step, reduced)
            else:
                self._exchange(step)

    def _compute(self, use: _Use, form: NodeLayouts, reduced: set[str]) -> None:
        operands = tuple(
            None if layout is None else self.values[name, layout]
            for name, layout in zip(use.node.inputs, form.operands, strict=True)
        )
        results = tuple(
            None if layout is None else self._computed(name, layout, reduced)
            for name, layout in zip(use.node.outputs, form.results, strict=True)
        )
        signature = replace(use.signature, operands=operands, results=results, constants=self._constants(use, operands))
        mesh = mesh_of(use.splits, len(self.stage.devices))
        self.operations.append(Compute(use.index, signature, use.splits, mesh, _joint(use), self._samples(use.node)))

    def _samples(self, node: Node) -> Samples | None:
        """Where samples are counted in what a random node draws."""
        if not OPERATORS[qualified_name(node)].random:
            return None
        return self.batch.of(next(filter(None, node.outputs)))

    def _computed(self, name: str, layout: Layout, reduced: set[str]) -> Value:
        return self._hold(name, layout, self._derived(name, "partial") if name in reduced else name)

    def _constants(self, use: _Use, operands: tuple[Value | None, ...]) -> tuple:  # type: ignore[type-arg]
        """Numbers stay known only where the operand is the whole constant."""
        return tuple(
            None if value is None or array is None or value.shape != array.shape else array
            for value, array in zip(operands, use.signature.constants, strict=True)
        )

    def _exchange(self, exchange: Exchange) -> None:
        step = exchange.step
        source = self.values[exchange.value, step.source]
        is_first = step.source.is_partial and not step.result.is_partial
        spelled = exchange.value if is_first else self._derived(exchange.value, step.kind)
        self.operations.append(Collective(source, self._hold(exchange.value, step.result, spelled), step))

    def _derived(self, name: str, what: str) -> str:
        """A name for another form of a value that no value of the model has."""
        found = f"{name}\0{what}"
        while self.graph.has(found) or found in self.spelled:
            found += "\0"
        self.spelled.add(found)
        return found

    def finish(self, number: int) -> ShardedStage:
        graph = self.graph
        held = {name: self.values[name, layout] for name, layout in self.taken.items()}
        indices, constant_indices = _indices(graph)
        arguments = [name for name in held if name not in indices and name not in constant_indices]
        parameters = sorted((indices[name], held[name]) for name in held if name in indices)
        code = StageCode(
            stage=number,
            devices=self.stage.devices,
            inputs=tuple(held[name] for name in arguments),
            outputs=tuple(self.values[name, self.layouts[name]] for name in self.outputs),
            parameters=tuple(parameters),
            constants=self._local_constants(constant_indices),
            operations=tuple(self.operations),
            recompute=self.stage.recompute,
            pipeline=self.stage.pipeline,
        )
        return ShardedStage(
            code=code,
            inputs={name: self.taken[name] for name in arguments},
            parameters={name: layout for name, layout in self.taken.items() if name in indices},
            outputs={name: self.layouts[name] for name in self.outputs},
        )

    def _local_constants(self, indices: dict[str, int]) -> tuple[tuple[int, Constant], ...]:
        return tuple((indices[name], self.graph.constants[indices[name]]) for name in self.taken if name in indices)


@remembered(GRAPHS)
def _indices(graph: Graph) -> tuple[dict[str, int], dict[str, int]]:
    """Where each parameter and each constant stands, by name: all stages of a graph ask."""
    return (
        {parameter.value.name: index for index, parameter in enumerate(graph.parameters)},
        {constant.value.name: index for index, constant in enumerate(graph.constants)},
    )


def parameter_shards(graph: Graph, devices: int, stages: tuple[ShardedStage, ...]) -> tuple[tuple[Shard, ...], ...]:
    """For each rank its blocks of parameters; ranks with the same block of a parameter share its gradient.

    No parameter may be torn (see `torn_parameters`).
    """
    indices = {parameter.value.name: index for index, parameter in enumerate(graph.parameters)}
    holders: dict[tuple[int, Box], set[int]] = {}
    users: dict[tuple[int, Box], set[int]] = {}
    for name, holding, box, stage in _blocks(stages):
        holders.setdefault((indices[name], box), set()).update(holding)
        users.setdefault((indices[name], box), set()).add(stage)
    shards: list[list[Shard]] = [[] for _ in range(devices)]
    for (index, box), ranks in sorted(holders.items(), key=lambda item: (item[0][0], sorted(item[1]))):
        stages_using = users[index, box]
        home = min(stages_using) if len(stages_using) == 1 else None
        if home is not None and ranks != set(stages[home].code.devices):
            home = None
        shard = Shard(index, box, tuple(sorted(ranks)), home)
        for rank in ranks:
            shards[rank].append(shard)
    return tuple(map(tuple, shards))


def torn_parameters(stages: tuple[ShardedStage, ...]) -> frozenset[str]:
    """Parameters of which a rank would hold two blocks, or whose blocks overlap without being equal."""
    boxes: dict[str, dict[Box, set[int]]] = {}
    torn: set[str] = set()
    for name, holding, box, _ in _blocks(stages):
        others = boxes.setdefault(name, {})
        for other, ranks in others.items():
            if other != box and (not ranks.isdisjoint(holding) or other.intersect(box) is not None):
                torn.add(name)
        others.setdefault(box, set()).update(holding)
    return frozenset(torn)


def _blocks(stages: tuple[ShardedStage, ...]) -> Iterator[tuple[str, frozenset[int], Box, int]]:
    """Each (parameter, ranks, block, stage)."""
    for stage in stages:
        devices = stage.code.devices
        ranks: dict[Layout, list[tuple[frozenset[int], Box]]] = {}
        for name, layout in stage.parameters.items():
            if layout not in ranks:
                boxes = holders_by_box(layout, len(devices))
                ranks[layout] = [(frozenset(devices[place] for place in places), box) for box, places in boxes]
            for holding, box in ranks[layout]:
                yield name, holding, box, stage.code.stage
