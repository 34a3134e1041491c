"""The local code of a stage: its operators on the shards of one device, the collectives that its
splits require, and the parameter shards of each rank.

The ranks of a group together compute the function of the stage. Invariant: the gradient of a
replicated value on a rank is a partial sum, and the sum over the ranks that hold the value is the
full gradient. Therefore the backward of each collective is its transpose, and the gradient of a
parameter is the sum over the ranks that hold it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from autopipe.ir.batch import BatchAxes
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import Graph, Node, Value
from autopipe.ir.layout import (
    Layout,
    TensorSlice,
    are_even_splits,
    even_degree_hint,
    holders_by_shard,
    mesh_axes_of,
    replicated_layout,
)
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.ops import OPERATORS, qualified_name, signature_of, spaces_of
from autopipe.ir.ops.operator import split_joint_axes
from autopipe.ir.placement import Split, Stage
from autopipe.ir.program import Collective, Compute, ParameterShard, StageCode
from autopipe.ir.space import AxisKind, Space
from autopipe.ir.words import plural
from autopipe.passes.analysis.operators import collective_element_bytes
from autopipe.passes.analysis.resharding import (
    NodeLayouts,
    ValueRedistribution,
    node_layouts,
    received_layouts,
    with_redistributions,
)
from autopipe.passes.analysis.stage_nodes import StageNodes


@dataclass(frozen=True, slots=True)
class ShardedStage:
    """The code of a stage on local shards, and the layouts of its inputs, parameters and outputs
    over the devices of the stage.
    """

    code: StageCode
    inputs: dict[str, Layout]
    parameters: dict[str, Layout]
    outputs: dict[str, Layout]


def shard_stage(
    graph: Graph,
    number: int,
    stage: Stage,
    nodes: StageNodes,
    replicated_parameters: frozenset[str],
    unread: frozenset[str],
    batch: BatchAxes,
    precision: str,
) -> ShardedStage:
    """Return the local forward of `stage`, which computes `nodes`, and its layouts. `number` is the
    index of the stage.

    replicated_parameters: parameters that are replicated even if a split would shard them.
    unread: outputs that no node reads. If such an output is a scalar, it stays a partial sum,
    because the loss is summed over ranks when it is reported. Each other partial result is reduced
    immediately, to a replicated or a sharded value.
    batch: the batch dimensions of the values.
    precision: the precision of the program, which determines the bytes of collectives.

    Raises CodegenError for splits that cannot be executed.
    """
    group = len(stage.devices)
    splits_of = {
        index: tuple(split for split in splits if split.degree > 1) for index, splits in nodes.nodes
    }
    spaces = spaces_of(graph)
    for index, splits in splits_of.items():
        _check_splits(graph.nodes[index], spaces(index), splits, group)
    forms = [
        node_layouts(graph, index, spaces(index), splits, group)
        for index, splits in splits_of.items()
    ]
    taken = received_layouts(graph, forms, stage, replicated_parameters)
    for name in nodes.outputs:
        if name not in taken and graph.producer(name) is None:
            taken[name] = replicated_layout(graph.type_of(name).shape)
    steps = tuple(with_redistributions(forms, taken, frozenset(nodes.outputs), unread, group))
    reduced = {
        step.value
        for step in steps
        if isinstance(step, ValueRedistribution) and step.step.source.is_partial
    }
    held = _LocalValues(graph, taken)
    operations = tuple(
        _make_collective(
            step,
            held,
            collective_element_bytes(graph, precision, step.value, is_received=step.value in taken),
        )
        if isinstance(step, ValueRedistribution)
        else _make_compute(
            graph, step, spaces(step.index), splits_of[step.index], group, held, reduced, batch
        )
        for step in steps
    )
    indices, constant_indices = _indices_by_name(graph)
    local = {name: held.values[name, layout] for name, layout in taken.items()}
    arguments = [name for name in taken if name not in indices and name not in constant_indices]
    constants = (constant_indices[name] for name in taken if name in constant_indices)
    code = StageCode(
        stage=number,
        devices=stage.devices,
        inputs=tuple(local[name] for name in arguments),
        outputs=tuple(held.values[name, held.layouts[name]] for name in nodes.outputs),
        parameters=tuple(sorted((indices[name], local[name]) for name in taken if name in indices)),
        constants=tuple((index, graph.constants[index]) for index in constants),
        operations=operations,
        recompute=stage.recompute,
        pipeline=stage.pipeline,
    )
    return ShardedStage(
        code=code,
        inputs={name: taken[name] for name in arguments},
        parameters={name: layout for name, layout in taken.items() if name in indices},
        outputs={name: held.layouts[name] for name in nodes.outputs},
    )


def _check_splits(node: Node, space: Space, splits: tuple[Split, ...], group: int) -> None:
    """Raise CodegenError unless the splits divide the work of the node equally among the `group`
    devices of a stage, so that each device has one contiguous shard of each tensor.
    """
    wanted = " ".join(map(str, splits))
    where = repr(node.name)
    if group % math.prod(split.degree for split in splits) or len(
        {split.axis for split in splits}
    ) < len(splits):
        raise CodegenError(
            f"the node cannot be split by {wanted} over {group} {plural(group, 'device')}",
            hint=("split each axis once, by degrees whose product divides the number of devices"),
            where=where,
        )
    for split in splits:
        axis = next((axis for axis in space.axes if axis.name == split.axis), None)
        if axis is None:
            names = " ".join(axis.name for axis in space.axes) or "none"
            raise CodegenError(
                f"operator {node.op} lacks the axis {split.axis!r}",
                hint=f"use an axis of the operator: {names}",
                where=where,
            )
        if axis.kind is AxisKind.UNSPLITTABLE:
            raise CodegenError(
                f"operator {node.op} cannot be split along axis {axis.name!r}", where=where
            )
        if axis.size % split.degree:
            raise CodegenError(
                f"axis {axis.name!r} of operator {node.op} has size {axis.size}, which "
                f"{split.degree} {plural(split.degree, 'device')} cannot divide equally",
                hint=even_degree_hint(axis.size, split.degree),
                where=where,
            )
    if not are_even_splits(space, splits):
        raise CodegenError(
            f"the split {wanted} of operator {node.op} would assign several separate parts of a "
            "tensor to a device, which is not supported",
            where=where,
        )


class _LocalValues:
    """The local shards of the values of a stage on one device.

    A value may exist in several layouts, for example as a partial sum and after its reduction. The
    shard in the layout `layouts[name]` has the name of the value. The shards in other layouts have
    derived names.
    """

    def __init__(self, graph: Graph, taken: Mapping[str, Layout]) -> None:
        self.graph = graph
        self.layouts: dict[str, Layout] = {}
        self.values: dict[tuple[str, Layout], Value] = {}
        self._derived: set[str] = set()
        for name, layout in taken.items():
            self.add(name, layout)

    def add(self, name: str, layout: Layout, form: str | None = None) -> Value:
        """Add a layout of the value `name` and return the local shard of the value in this layout.

        If `form` is None, the shard has the name of the value. Otherwise `form` is a suffix, such
        as `partial`, and the shard has a derived name that no value of the graph has.
        """
        local = name
        if form is None:
            self.layouts[name] = layout
        else:
            local = f"{name}\0{form}"
            while self.graph.has(local) or local in self._derived:
                local += "\0"
            self._derived.add(local)
        found = self.values[name, layout] = Value(
            local, self.graph.type_of(name).dtype, layout.local_shape()
        )
        return found


def _make_collective(
    exchange: ValueRedistribution, held: _LocalValues, itemsize: int
) -> Collective:
    """Return the collective that performs `exchange`, one change of the layout of a value, and add
    its result to `held`, the local shards of the device. `itemsize` is the bytes per element that
    are sent.
    """
    step = exchange.step
    is_first = step.source.is_partial and not step.result.is_partial
    result = held.add(exchange.value, step.result, None if is_first else step.kind)
    return Collective(held.values[exchange.value, step.source], result, step, itemsize)


def _make_compute(
    graph: Graph,
    form: NodeLayouts,
    space: Space,
    splits: tuple[Split, ...],
    group: int,
    held: _LocalValues,
    reduced: set[str],
    batch: BatchAxes,
) -> Compute:
    """Return the node of `form` as an operation on local shards, and add its results to `held`, the
    local shards of the device.

    `form` has the node and the layouts of its operands and results. `space` is the iteration space
    of the node, which `splits` divide over `group` devices. Results in `reduced` are partial sums,
    which a collective after the node reduces. `batch` has the batch dimensions of the values.
    """
    node = form.node
    global_signature = signature_of(graph, form.node)
    row = OPERATORS[qualified_name(node)]
    operands = tuple(
        None if layout is None else held.values[name, layout]
        for name, layout in zip(node.inputs, form.operands, strict=True)
    )
    results = tuple(
        None if layout is None else held.add(name, layout, "partial" if name in reduced else None)
        for name, layout in zip(node.outputs, form.results, strict=True)
    )
    signature = global_signature.sharded(operands, results)
    degrees = {split.axis: split.degree for split in splits}
    joint: list[tuple[str, ...]] = [(axis,) for axis in split_joint_axes(space, degrees)]
    # Along a joint axis, the operator's implementation may communicate with the other devices. It
    # needs a process group for each joint axis, and for the axes over which it reduces each
    # statistic.
    if joint:
        joint += (each.axes for each in row.statistics(global_signature, space, degrees))
    samples = batch.of(next(filter(None, node.outputs))) if row.random else None
    return Compute(
        form.index,
        signature,
        splits,
        mesh_axes_of(splits, group),
        tuple(dict.fromkeys(joint)),
        samples,
    )


@memoize(MAX_CACHED_GRAPHS)
def _indices_by_name(graph: Graph) -> tuple[dict[str, int], dict[str, int]]:
    """Return two mappings from names to indices: of the parameters and of the constants of the
    graph.
    """
    return (
        {parameter.value.name: index for index, parameter in enumerate(graph.parameters)},
        {constant.value.name: index for index, constant in enumerate(graph.constants)},
    )


def parameter_shards(
    graph: Graph, devices: int, stages: tuple[ShardedStage, ...]
) -> tuple[tuple[ParameterShard, ...], ...]:
    """Return the parameter shards of each of `devices` ranks.

    The ranks that hold a shard reduce its gradient together. All stages must shard a parameter
    equally (see `parameters_to_replicate` of passes/analysis).
    """
    indices, _ = _indices_by_name(graph)
    holders: dict[tuple[int, TensorSlice], set[int]] = defaultdict(set)
    users: dict[tuple[int, TensorSlice], set[int]] = defaultdict(set)
    for stage in stages:
        devices_of_stage = stage.code.devices
        for name, layout in stage.parameters.items():
            for box, places in holders_by_shard(layout, len(devices_of_stage)):
                holders[indices[name], box].update(devices_of_stage[place] for place in places)
                users[indices[name], box].add(stage.code.stage)
    shards: list[list[ParameterShard]] = [[] for _ in range(devices)]
    for (index, box), ranks in sorted(
        holders.items(), key=lambda item: (item[0][0], sorted(item[1]))
    ):
        home = min(users[index, box])
        is_home = len(users[index, box]) == 1 and ranks == set(stages[home].code.devices)
        shard = ParameterShard(index, box, tuple(sorted(ranks)), home if is_home else None)
        for rank in ranks:
            shards[rank].append(shard)
    return tuple(map(tuple, shards))
