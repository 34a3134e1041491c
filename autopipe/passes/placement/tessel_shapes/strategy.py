"""The shapes as a strategy: what of the model goes over all devices, what on one each, and in which order.

Lin et al., "Tessel: boosting distributed execution of large DNN models via flexible schedule search", HPCA 2024,
sections II and VI.

Branches that know nothing of one another until they meet: what K puts on separate devices.

Which devices each part of a shape gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import ClassVar

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage, recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.chain import Chain
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import check_operators, fitted, may_share
from autopipe.passes.placement.tessel_shapes.cuts import (
    CostedModel,
    Outline,
    SharedLookup,
    StageRow,
    costed_model,
    hoisted,
    large_tables,
    line_around,
    line_of,
    line_of_parts,
    stage_of_several,
    whole_line,
    wide_nodes,
    with_chains_cut,
    with_chains_that_fit,
)
from autopipe.passes.schedule.device_order import best_order
from autopipe.passes.sharding.regions import visited


@dataclass(frozen=True, slots=True)
class BranchJoin:
    """The branches, and everything from where they meet on. All nodes are in one of them."""

    branches: tuple[tuple[int, ...], ...]
    rest: tuple[int, ...]


@dataclass(slots=True)
class _Component:
    nodes: list[int] = field(default_factory=list)
    seconds: float = 0.0


def find_join(model: CostedModel, order: tuple[int, ...]) -> BranchJoin | None:
    """The first node, in `order`, at which branches meet: each half a device's share of the work or more.

    Each has at least half as much work as the largest too: a decoder's first layer is no branch beside the encoder.
    None where there is none. Values made of parameters alone, masks and positions connect nothing.
    """
    graph = model.graph
    apart = recomputed_nodes(graph) | {node for node in range(len(graph.nodes)) if model.is_weight(node)}
    least = model.share * float(model.seconds.sum())
    component: dict[int, _Component] = {}
    for node in sorted(set(range(len(graph.nodes))) - apart):
        producers = [graph.producer(name) for name in graph.nodes[node].inputs if name]
        met = {id(component[each]): component[each] for each in producers if each is not None and each in component}
        most = max((each.seconds for each in met.values()), default=0.0)
        large = [each for each in met.values() if each.seconds >= max(least, most / 2)]
        if len(large) > 1:
            return _join(model, order, [sorted(each.nodes) for each in large], apart)
        joined = _joined(list(met.values()))
        joined.nodes.append(node)
        joined.seconds += float(model.seconds[node])
        component |= dict.fromkeys(joined.nodes if len(met) > 1 else [node], joined)
    return None


def _joined(parts: list[_Component]) -> _Component:
    if len(parts) == 1:
        return parts[0]
    return _Component([node for part in parts for node in part.nodes], sum(part.seconds for part in parts))


def _join(model: CostedModel, order: tuple[int, ...], branches: list[list[int]], apart: Set[int]) -> BranchJoin:
    """The branches in order of their first nodes, each with the weights it reads first; all others are the rest."""
    branches = sorted(branches)
    home = {node: index for index, nodes in enumerate(branches) for node in nodes}
    rest = len(branches)
    for node in reversed(order):
        if node not in home:
            names = [name for name in model.graph.nodes[node].outputs if name]
            homes = [home[reader] for name in names for reader in model.readers.get(name, ())]
            home[node] = min(homes, default=rest) if node in apart else rest
    found = [tuple(sorted(node for node, index in home.items() if index == each)) for each in range(rest + 1)]
    return BranchJoin(tuple(found[:rest]), found[rest])


def shared_out(weights: Sequence[float], devices: int) -> tuple[tuple[int, ...], ...]:
    """Neighbouring devices for each part, one at least: each further one to the part with most work a device."""
    counts = [1] * len(weights)
    for _ in range(devices - len(weights)):
        counts[max(range(len(weights)), key=lambda part: weights[part] / counts[part])] += 1
    starts = [sum(counts[:part]) for part in range(len(weights))]
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True))


_SHAPES = ("auto", "v", "x", "m", "nn", "k")


@dataclass(frozen=True, slots=True)
class TesselShapes:
    """Places a model in the form of a V, X, M, NN or K."""

    shape: str = "auto"
    """`v`: a chain of stages; `x`: two, in opposite directions over the devices, with parameters twice; `m`: lookups in
    large tables and heads split over all devices, the chain between them on one each; `nn`: the same where a second
    lookup parts the chain, as between encoder and decoder; `k`: branches on devices of their own, and what follows
    where they meet split over all. `auto`: nn, m or k where the model has what they need, else v."""
    chunks: int = 1
    """Stages that each device has of a chain."""
    wave: bool = False
    """True if chunks go over the devices back and forth instead of again and again."""

    name: ClassVar[str] = "tessel_shapes"

    def division(self, graph: Graph) -> Division:
        """It may make several stages."""
        return Division.MANY

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for options out of range or constraints, InfeasibleError for an empty model."""
        if self.shape.lower() not in _SHAPES:
            raise ConfigurationError(
                f"there is no shape {self.shape!r}", hint=f"there are: {', '.join(_SHAPES)}", where="strategy"
            )
        if self.chunks < 1:
            raise ConfigurationError(f"chunks is {self.chunks}", hint="it must be at least 1", where="strategy")
        if problem.constraints:
            raise ConfigurationError(
                "tessel_shapes follows no constraints", hint="strategy manual follows any", where="constraints"
            )
        check_operators(problem)

    def run(self, problem: Problem) -> Placement:
        """The placement. Raises InfeasibleError where the model does not have the shape or memory does not hold it.

        So it does for a part that is to be shared by devices of different kinds, which shapes m, nn and k have.
        """
        return best_order(problem, self._fitted)

    def _fitted(self, problem: Problem) -> Placement:
        model, shape = costed_model(problem), self.shape.lower()
        outline = self._found(problem, model) if shape == "auto" else self._outline(problem, model, shape)
        return fitted(problem, with_chains_that_fit(problem, outline))

    def _found(self, problem: Problem, model: CostedModel) -> Outline:
        """That of the first shape that the model has and the devices can take."""
        for shape in ("nn", "m", "k") if may_share(problem, range(model.devices)) else ():
            try:
                outline = self._outline(problem, model, shape, only_large=True)
                with_chains_cut(problem, outline, (math.inf,) * model.devices)
            except InfeasibleError:
                continue
            return outline
        return self._outline(problem, model, "v")

    def _outline(self, problem: Problem, model: CostedModel, shape: str, only_large: bool = False) -> Outline:
        if shape == "k":
            return tuple(self._branches(problem, model, only_large))
        if shape in ("m", "nn"):
            return tuple(self._around_tables(problem, model, shape, only_large))
        if shape == "x" and model.devices < 2:
            raise InfeasibleError("shape x runs in two directions over devices, and there is one", hint="take shape v")
        chain = whole_line(model)
        devices = tuple(range(model.devices))
        down = self._chain(model, chain, chain.order, devices)
        if shape == "v":
            return (down,)
        return down, replace(self._chain(model, chain, chain.order, devices[::-1]), pipeline=1)

    def _around_tables(
        self, problem: Problem, model: CostedModel, shape: str, only_large: bool
    ) -> Iterator[Stage | StageRow]:
        """M and NN: shared parts over all devices, chains between them."""
        tables = large_tables(model, at_least_one=not only_large)
        wide = wide_nodes(model, tables, model.devices)
        if not wide:
            raise InfeasibleError(
                f"shape {shape} shares lookups in large tables among all devices, and the model has none",
                hint="take shape v",
            )
        line = line_around(model, (each.nodes for each in wide))
        parts = line_of_parts(model, line, wide)
        if shape == "m":
            parts = hoisted(model, parts, wide)
        chains = [part for part in parts if not part.shared]
        _check_chains(shape, len(chains), model.devices, wide)
        everyone = tuple(range(model.devices))
        groups = iter(shared_out([model.weighs(part.nodes) for part in chains], model.devices))
        for part in parts:
            if part.shared:
                yield stage_of_several(problem, model, part.nodes, everyone, tables)
            else:
                yield self._chain(model, line, part.nodes, next(groups))

    def _branches(self, problem: Problem, model: CostedModel, only_shared: bool) -> Iterator[Stage | StageRow]:
        """K: branches on devices of their own, then the rest over all (refused at will where they cannot share it)."""
        line = whole_line(model)
        meeting = find_join(model, line.order)
        if meeting is None or len(meeting.branches) > model.devices:
            found = "none" if meeting is None else f"{len(meeting.branches)} for {model.devices} devices"
            raise InfeasibleError(
                f"shape k puts branches on devices of their own, and the model has {found}", hint="take shape v"
            )
        tables = large_tables(model, at_least_one=False)
        rest = stage_of_several(problem, model, meeting.rest, tuple(range(model.devices)), tables)
        if only_shared and not _is_shared(model, rest):
            raise InfeasibleError(f"{model.devices} devices cannot share what follows where branches meet")
        groups = shared_out([model.weighs(branch) for branch in meeting.branches], model.devices)
        for branch, devices in zip(meeting.branches, groups, strict=True):
            yield self._chain(model, line, branch, devices)
        yield rest

    def _chain(self, model: CostedModel, line: Chain, nodes: tuple[int, ...], devices: tuple[int, ...]) -> StageRow:
        return StageRow(line_of(model, line, nodes), visited(devices, self.chunks, self.wave))


def _is_shared(model: CostedModel, stage: Stage) -> bool:
    """True if a stage's devices share half of its work, or its work is little."""
    work, shared = model.weighs(stage.nodes), model.weighs(node for node, _ in stage.splits)
    return shared >= work / 2 or work < model.share * float(model.seconds.sum())


def _check_chains(shape: str, chains: int, devices: int, wide: Sequence[SharedLookup]) -> None:
    """Raise InfeasibleError unless the parts between large tables make the shape."""
    tables = ", ".join(sorted({repr(each.table) for each in wide}))
    wanted = {"m": 1, "nn": 2}[shape]
    if chains != wanted:
        raise InfeasibleError(
            f"shape {shape} has {wanted} chain{'s' * (wanted > 1)} between large tables, and the lookups in {tables} "
            f"leave {chains}",
            hint="take shape " + ("nn" if chains == 2 else "m" if chains == 1 else "v"),
        )
    if chains > devices:
        raise InfeasibleError(f"shape {shape} needs {chains} devices at least, and there are {devices}")
