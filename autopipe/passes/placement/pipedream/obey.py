"""Constraints as a search over a chain sees them: which ranges of blocks may stand where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopipe.ir.errors import ConfigurationError
from autopipe.passes.analysis.chain import Chain, Matrix
from autopipe.passes.analysis.constraints import BATCH_AXIS, ResolvedConstraint
from autopipe.passes.analysis.operators import SampleAxes
from autopipe.passes.placement.pipedream.search import Price


@dataclass(frozen=True, slots=True)
class ChainConstraint:
    """The blocks `first` to `last` go, together, to the stage that has what is not None here."""

    first: int
    last: int
    stage: int | None = None
    devices: range | None = None
    degree: int | None = None

    def penalty(self, size: int, index: int, device: int, degree: int) -> Matrix | None:
        """Infinite for ranges that break the rule as stage `index` on these devices; None where none does."""
        first = np.arange(size)[:, None]
        stop = np.arange(size)[None, :]
        touches = (first <= self.last) & (stop > self.first)
        here = (
            (self.stage is None or self.stage == index)
            and (self.devices is None or self.devices == range(device, device + degree))
            and (self.degree is None or self.degree == degree)
        )
        if not here:
            return np.where(touches, np.inf, 0.0)
        if self.stage is None:
            return None
        return np.where((first <= self.first) & (stop > self.last), 0.0, np.inf)


def ruled(price: Price, rules: tuple[ChainConstraint, ...], size: int, stages: int) -> Price:
    """`price` with the rules obeyed, for chains of `stages` stages (which matters to rules about a stage alone)."""

    def obedient(place: int, device: int, degree: int) -> Matrix:
        penalties = (rule.penalty(size, stages - place, device, degree) for rule in rules)
        return sum((penalty for penalty in penalties if penalty is not None), price(place, device, degree))

    return obedient


def groups_of(wishes: tuple[ResolvedConstraint, ...]) -> tuple[tuple[int, ...], ...]:
    """Nodes that cuts must be able to part from the others: all of one stage together, else of one constraint."""
    by_stage: dict[int, list[int]] = {}
    for wish in wishes:
        if wish.constraint.stage is not None:
            by_stage.setdefault(wish.constraint.stage, []).extend(wish.nodes)
    rest = [wish.nodes for wish in wishes if wish.constraint.stage is None]
    return (*map(tuple, by_stage.values()), *rest)


def rules_of(wishes: tuple[ResolvedConstraint, ...], chain: Chain, samples: SampleAxes) -> tuple[ChainConstraint, ...]:
    """The wishes as rules. Raises ConfigurationError, with the reason, for those that no chain can fulfil."""
    stages: dict[int, ChainConstraint] = {}
    found: list[ChainConstraint] = []
    for wish in wishes:
        blocks = chain.block_of[list(wish.nodes)]
        first, last = int(blocks.min()), int(blocks.max())
        if wish.constraint.stage is not None:
            other = stages.get(wish.constraint.stage)
            low, high = (first, last) if other is None else (min(first, other.first), max(last, other.last))
            stages[wish.constraint.stage] = ChainConstraint(low, high, stage=wish.constraint.stage)
        if wish.devices is not None:
            found.append(ChainConstraint(first, last, devices=_neighbours(wish)))
        found.extend(_degrees(wish, chain, samples))
    return (*stages.values(), *found)


def _neighbours(wish: ResolvedConstraint) -> range:
    assert wish.devices is not None
    devices = sorted(wish.devices)
    if devices[-1] - devices[0] + 1 != len(devices):
        raise ConfigurationError(
            f"{wish} asks for devices that are no neighbours, and pipedream's stages are on neighbouring devices",
            hint="strategy manual follows any constraint",
        )
    return range(devices[0], devices[-1] + 1)


def _degrees(wish: ResolvedConstraint, chain: Chain, samples: SampleAxes) -> Iterator[ChainConstraint]:
    nodes = [node for node in wish.nodes if samples.axes[node] is not None]
    if wish.constraint.split == ():
        for block in sorted({int(chain.block_of[node]) for node in nodes}):
            yield ChainConstraint(block, block, degree=1)
    for axis, degree in wish.constraint.split or ():
        if not nodes or any(axis not in (BATCH_AXIS, samples.axes[node]) for node in nodes):
            raise ConfigurationError(
                f"{wish} splits axis {axis!r}, and pipedream splits by samples alone",
                hint="strategy manual follows any constraint",
            )
        for block in sorted({int(chain.block_of[node]) for node in nodes}):
            yield ChainConstraint(block, block, degree=degree)
