"""What came of running the candidates of one model on so many ranks."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from autopipe.cli.bench.fidelity.correlation import spearman

_DIGITS = 9
"""Predictions that differ by less than a nanosecond are one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A candidate, predicted and measured; bytes are None, and there are no steps, where it did not run."""

    name: str
    chosen: bool
    predicted_s: float
    predicted_memory: int
    """Bytes of the rank that is to need most."""
    predicted_bytes: int | None
    """What a step's exchanges move, over all ranks."""
    steps_s: tuple[float, ...] = ()
    measured_memory: int | None = None
    """Bytes that this rank allocated at most."""
    measured_bytes: int | None = None
    processor_s: float | None = None
    """Processor time of a step, of all ranks: over the number of processors no step is shorter."""
    failed: str = ""

    @property
    def measured_s(self) -> float | None:
        """The median step."""
        return statistics.median(self.steps_s) if self.steps_s else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All candidates of one model on so many ranks."""

    model: str
    ranks: int
    outcomes: tuple[Outcome, ...]

    @property
    def name(self) -> str:
        """As cases of benchmarks are called."""
        return f"{self.model}/p={self.ranks}"

    @property
    def measured(self) -> tuple[tuple[Outcome, float], ...]:
        """Those that ran, with their steps, the fastest first."""
        found = [(each, each.measured_s) for each in self.outcomes]
        return tuple(sorted(((each, step) for each, step in found if step is not None), key=lambda pair: pair[1]))

    @property
    def correlation(self) -> float | None:
        """Spearman's, of predicted and measured steps; None where there is nothing to order."""
        ran = self.measured
        return (
            spearman([round(each.predicted_s, _DIGITS) for each, _ in ran], [step for _, step in ran]) if ran else None
        )

    @property
    def chosen_over_fastest(self) -> float | None:
        """The chosen plan's step over the fastest one; None where it did not run."""
        ran = self.measured
        return next((step / ran[0][1] for each, step in ran if each.chosen), None)
