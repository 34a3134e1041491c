"""Annotations as constraints on a graph's nodes: obeyed by strategies as a user's own are, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.graph import Graph
from autopipe.ir.problem import Constraint
from autopipe.passes.annotations.axes import cuts_of
from autopipe.passes.annotations.mesh import Cuts, order_of, splits_over
from autopipe.passes.annotations.sharding import Annotation, Configuration, Sharding
from autopipe.passes.cost.constraints import BATCH_AXIS
from autopipe.passes.cost.splits import SampleAxes, sample_axes
from autopipe.passes.frontend.load import located
from autopipe.passes.frontend.model import Model
from autopipe.passes.frontend.origins import Origin


@dataclass(frozen=True, slots=True)
class _Wish:
    """Constraints of the annotations on a node of the graph; without `shardings` none on its tensors."""

    node: int
    stage: int | None
    shardings: tuple[Sharding, ...]
    cuts: Cuts

    @property
    def group(self) -> frozenset[int]:
        """The node's devices, none where they are left open."""
        return self.shardings[0].group() if self.shardings else frozenset()


def annotated_constraints(model: Model, devices: int) -> tuple[Constraint, ...]:
    """Constraints that the annotations of `model` are for `devices` devices; () where it has none.

    Raises ConfigurationError where no configuration, or more than one, is for that number, and ModelError, naming the
    node, for annotations that do not fit its operator or its tensors' shapes, or contradict one another.
    """
    configuration = _chosen(model.configurations, devices)
    if configuration is None:
        return ()
    try:
        return tuple(_constraints(model, configuration))
    except ModelError as error:
        raise located(error, model.path) from error


def _chosen(configurations: tuple[Configuration, ...], devices: int) -> Configuration | None:
    """The configuration for `devices` devices."""
    annotated = [each for each in configurations if each.annotations]
    fitting = [each for each in annotated if each.devices == devices]
    if len(fitting) == 1 or not annotated:
        return fitting[0] if fitting else None
    if fitting:
        names = " and ".join(repr(each.name) for each in fitting)
        raise ConfigurationError(
            f"the model's device configurations {names} are all for {devices} devices",
            hint="leave one of them in the file",
        )
    known = ", ".join(f"{each.name!r} for {each.devices}" for each in annotated)
    raise ConfigurationError(
        f"the model is annotated, but not for {devices} devices: {known}",
        hint="plan for as many devices, or the model without its annotations",
    )


def _constraints(model: Model, configuration: Configuration) -> Iterator[Constraint]:
    """One for stage and devices of the nodes that share them, and one for each split of some of these."""
    samples = sample_axes(model.graph)
    wishes = _wishes(model, configuration, samples)
    stages = sorted({wish.stage for wish in wishes if wish.stage is not None})
    teams: dict[object, list[_Wish]] = {}
    for wish in wishes:
        teams.setdefault(wish.group if wish.stage is None else wish.stage, []).append(wish)
    for members in teams.values():
        stage = None if members[0].stage is None else stages.index(members[0].stage)
        source = "the model's annotation" + ("" if stage is None else f" of stage {stage}")
        order = _order(model.graph, [wish for wish in members if wish.shardings])
        yield Constraint(source, stage, order, nodes=tuple(model.graph.nodes[wish.node].name for wish in members))
        by_split: dict[tuple[tuple[str, int], ...], list[str]] = {}
        for wish in members:
            splits = splits_over(order, wish.cuts) if order and wish.shardings else None
            if splits is not None:
                own = samples.axes[wish.node]
                split = tuple((BATCH_AXIS if each.axis == own else each.axis, each.degree) for each in splits)
                by_split.setdefault(split, []).append(model.graph.nodes[wish.node].name)
        for split, names in by_split.items():
            yield Constraint(source, split=split, nodes=tuple(names))


def _wishes(model: Model, configuration: Configuration, samples: SampleAxes) -> list[_Wish]:
    """Constraints on each annotated node of the graph, in its order.

    A node of the file that writes what the graph's node does says most. Of others that became part of the same operator
    (its scores, its softmax) only layouts of tensors are taken that the first says nothing of.
    """
    annotations = {each.node: each for each in configuration.annotations}
    stages: dict[int, int | None] = {}
    layouts: dict[int, dict[str, Sharding]] = {}
    parts = zip(model.origins.nodes, model.origins.owners(), strict=True)
    for origin, owner in sorted(parts, key=lambda part: part[0].writes is None):
        annotation = annotations.get(origin.position)
        if annotation is None or owner is None:
            continue
        known = layouts.setdefault(owner, {})
        if origin.writes is not None:
            stages[owner] = annotation.stage
            known.update(_own(model.graph, owner, origin, annotation))
        else:
            known.update({**_own(model.graph, owner, origin, annotation), **known})
    return [
        _Wish(
            node,
            stages.get(node),
            tuple(layouts[node].values()),
            cuts_of(model.graph, node, samples.uses[node].space, layouts[node]) if layouts[node] else (),
        )
        for node in sorted(layouts)
        if layouts[node] or stages.get(node) is not None
    ]


def _own(graph: Graph, node: int, origin: Origin, annotation: Annotation) -> dict[str, Sharding]:
    """The annotation's layouts of what `node` reads and writes, by the graph's names."""
    tensors = {*graph.nodes[node].inputs, *graph.nodes[node].outputs}
    names = dict(origin.values)
    found: dict[str, Sharding] = {}
    for sharding in annotation.shardings:
        name = names.get(sharding.tensor)
        if name not in tensors or name is None:
            continue
        other = found.setdefault(name, sharding)
        if (other.cuts, other.devices) != (sharding.cuts, sharding.devices):
            raise ModelError(
                f"its annotations of {other.tensor!r} and {sharding.tensor!r}, which are one value, differ",
                where=origin.title,
            )
    return found


def _order(graph: Graph, members: Sequence[_Wish]) -> tuple[int, ...] | None:
    """The devices of a stage in the order over which its nodes are split; None where no layout tells them."""
    if not members:
        return None
    first = members[0]
    other = next((wish for wish in members if wish.group != first.group), None)
    if other is not None:
        raise ModelError(
            f"it is annotated for devices {_listed(other)}, but {graph.nodes[first.node].name!r} of its stage for"
            f" {_listed(first)}",
            hint="all nodes of a stage are on the same devices",
            where=repr(graph.nodes[other.node].name),
        )
    order = order_of((sharding for wish in members for sharding in wish.shardings), (wish.cuts for wish in members))
    if order is None:
        raise ModelError(
            f"its stage's nodes are annotated for blocks that no splits over devices {_listed(first)} make",
            hint="equal parts, outer to inner over the devices in one order, copies innermost, can be followed",
            where=repr(graph.nodes[first.node].name),
        )
    return order


def _listed(wish: _Wish) -> str:
    return ", ".join(map(str, sorted(wish.group)))
