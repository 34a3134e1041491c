"""1F1B's placements of a model with large tables: chains of stages, as the paper's baseline has them.

Lin et al., "Tessel" (HPCA 2024), sections II and VI-D: a large embedding does not fit one device. Either a few devices
have it and the layers go over the others, as in Figure 2; or all stages are split over groups of devices large enough
for it, as on several servers. The zoo's heads are the embedding itself, so that the chain ends where a table is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from autopipe.cli.bench.tessel.recomputed import with_layers_recomputed
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.chain import Chain, make_chain
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.tessel_shapes.cuts import (
    CostedModel,
    ModelPart,
    SharedLookup,
    costed_model,
    hoisted,
    large_tables,
    line_of,
    line_of_parts,
    stage_of,
    stage_of_several,
    wide_nodes,
)
from autopipe.passes.placement.tessel_shapes.strategy import shared_out

_MOST_BLOCKS = 224
_SHARES = 8
"""Equal parts of the layers of which some go beside the tables."""


def tables_apart(problem: Problem) -> Iterator[Placement]:
    """Tables on 1, 2, 4 … devices with no layers up to half of them, split likewise; the rest a stage a device."""
    for degree in _degrees(problem.cluster.size // 2):
        for shares in range(_SHARES // 2 + 1):
            with suppress(InfeasibleError):
                yield with_tables_apart(problem, degree, shares)


def equal_groups(problem: Problem) -> Iterator[Placement]:
    """Stages on 1, 2, 4 … devices each, every one split over its own; tables at both ends."""
    model = costed_model(problem)
    tables = large_tables(model, at_least_one=True)
    for degree in _degrees(model.devices):
        with suppress(InfeasibleError):
            line = _line(model, wide_nodes(model, tables, degree))
            runs = line_of(model, line, line.order).even(model.devices // degree)
            groups = (tuple(range(place * degree, (place + 1) * degree)) for place in range(len(runs)))
            stages = tuple(
                stage_of_several(problem, model, run, group, tables) for run, group in zip(runs, groups, strict=True)
            )
            yield with_layers_recomputed(Placement(stages))


def device_seconds(problem: Problem, placement: Placement) -> list[float]:
    """Seconds of a micro-batch, forward and backward, on each device."""
    seconds = [0.0] * problem.cluster.size
    for stage, cost in zip(placement.stages, stage_costs(problem, placement), strict=True):
        for device in stage.devices:
            seconds[device] += cost.forward_s + cost.backward_s
    return seconds


def with_tables_apart(problem: Problem, degree: int, shares: int) -> Placement:
    """Tables and heads on the first `degree` devices with `shares` eighths of the layers, the rest on the others."""
    model = costed_model(problem)
    tables = large_tables(model, at_least_one=True)
    wide = wide_nodes(model, tables, degree)
    line = _line(model, wide)
    parts = _with_layers_moved(model, line, hoisted(model, line_of_parts(model, line, wide), wide), shares)
    layers = [part for part in parts if not part.shared]
    if len(layers) > model.devices - degree:
        raise InfeasibleError("there are fewer devices than chains")
    groups = iter(shared_out([model.weighs(part.nodes) for part in layers], model.devices - degree))
    stages: list[Stage] = []
    for part in parts:
        if part.shared:
            stages.append(stage_of_several(problem, model, part.nodes, tuple(range(degree)), tables))
            continue
        devices = [degree + device for device in next(groups)]
        runs = line_of(model, line, part.nodes).even(len(devices))
        stages += [stage_of(problem, run, (device,)) for run, device in zip(runs, devices, strict=True)]
    return with_layers_recomputed(Placement(tuple(stages)))


def _degrees(most: int) -> Iterator[int]:
    degree = 1
    while degree <= most:
        yield degree
        degree *= 2


def _line(model: CostedModel, wide: tuple[SharedLookup, ...]) -> Chain:
    return make_chain(model.graph, model.seconds, _MOST_BLOCKS, tuple(tuple(each.nodes) for each in wide))


def _with_layers_moved(model: CostedModel, line: Chain, parts: tuple[ModelPart, ...], shares: int) -> list[ModelPart]:
    """The parts with the first chain's beginning in the shared part before it."""
    found = list(parts)
    place = next(index for index, part in enumerate(found) if not part.shared)
    if not shares or not place:
        return found
    runs = line_of(model, line, found[place].nodes).even(_SHARES)
    moved = tuple(node for run in runs[:shares] for node in run)
    rest = tuple(node for run in runs[shares:] for node in run)
    found[place - 1 : place + 1] = [ModelPart((*found[place - 1].nodes, *moved), True), ModelPart(rest, False)]
    return found
