"""Cost of blocks on a group that shares them, and sums over the blocks of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.problem import Problem
from autopipe.passes.analysis.gradients import kept_values
from autopipe.passes.analysis.operators import uses_of
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.stage_work import StageWork, stage_work
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.partition.downsets import Downsets, Figures, Pairs
from autopipe.passes.placement.piper.blocks import Blocks
from autopipe.passes.placement.piper.sharing import StageSharing

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Sums:
    """Figures that add up over a stage's blocks: `own` of one block each, and `common` ones of several, once each."""

    own: NDArray[np.float64]
    common: tuple[tuple[tuple[int, ...], float], ...] = ()

    def over(self, downsets: Downsets, pairs: Pairs) -> Figures:
        """The sum over the blocks between the two downsets of each of some pairs."""
        if not self.own.any() and not self.common:
            return np.zeros(len(pairs.inner))
        found = pairs.difference(downsets.holds @ self.own)
        for blocks, figure in self.common:
            found += figure * (pairs.difference(downsets.holds[:, list(blocks)].sum(axis=1)) > 0)
        return found


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """Seconds and bytes on one device of a group. Those of a micro-batch are as in `StageCost`."""

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    kept: Sums
    """Bytes that backward needs of a micro-batch."""
    state: Sums
    """Bytes of parameters, gradients and optimizer state."""
    gradients: Sums
    """Bytes of the gradients of parameters that each device of the group holds whole."""
    cut_gradients: Sums
    """Bytes on one device of the gradients of parameters that the devices of a replica share."""
    workspace: NDArray[np.float64]
    """Bytes that come and go while a block runs."""


def block_figures(problem: Problem, blocks: Blocks, sharing: StageSharing) -> BlockFigures:
    """The figures of each block on such a group."""
    placement = sharing.placement(problem, blocks)
    works = stage_work(problem, placement)
    costs = stage_costs(problem, placement)
    parts = [work.parameters for work in works]
    gradients = [{name: _gradient_bytes(problem, name, count) for name, count in each.items()} for each in parts]
    return BlockFigures(
        forward_s=np.array([cost.forward_s for cost in costs]),
        backward_s=np.array([cost.backward_s for cost in costs]),
        kept=_sums(_kept(problem, works)),
        state=_sums(
            [
                {name: _state_bytes(problem, name, count, sharing.devices) for name, count in each.items()}
                for each in parts
            ]
        ),
        gradients=_sums(_those(gradients, parts, cut=False)),
        cut_gradients=_sums(_those(gradients, parts, cut=True)),
        workspace=np.array([float(cost.transient_bytes) for cost in costs]),
    )


def _state_bytes(problem: Problem, name: str, parts: int, devices: int) -> int:
    return state_of(problem, [(name, parts)], {name: devices // parts}).total


def _gradient_bytes(problem: Problem, name: str, parts: int) -> int:
    return state_of(problem, [(name, parts)]).gradient_bytes


def _those(gradients: list[dict[str, int]], parts: Iterable[Mapping[str, int]], cut: bool) -> list[dict[str, int]]:
    """The gradients of parameters that are held in parts, or of the others."""
    return [
        {name: size for name, size in each.items() if (counts[name] > 1) == cut}
        for each, counts in zip(gradients, parts, strict=True)
    ]


def _kept(problem: Problem, works: tuple[StageWork, ...]) -> list[dict[tuple[str, int], int]]:
    """By block the bytes of each value that backward needs of it."""
    kept = kept_values(problem.graph, uses_of(problem.graph), problem.precision)
    found = []
    for work in works:
        own: dict[tuple[str, int], int] = {}
        for each in work.nodes:
            for value in kept[each.index]:
                own[value.key] = max(value.local_bytes(each.sharing.degrees), own.get(value.key, 0))
        found.append(own)
    return found


def _sums(by_block: list[dict[Key, int]]) -> Sums:
    """Figures by block and by what they are of: the same thing counts once, at its largest."""
    blocks: dict[Key, list[int]] = {}
    figures: dict[Key, int] = {}
    for block, each in enumerate(by_block):
        for key, figure in each.items():
            blocks.setdefault(key, []).append(block)
            figures[key] = max(figure, figures.get(key, 0))
    own = np.zeros(len(by_block))
    common: dict[tuple[int, ...], float] = {}
    for key, members in blocks.items():
        if len(members) == 1:
            own[members[0]] += figures[key]
        else:
            common[tuple(members)] = common.get(tuple(members), 0.0) + figures[key]
    return Sums(own, tuple(common.items()))
