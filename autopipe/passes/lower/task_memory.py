"""Memory along a rank's tasks: each value from the task that makes it to the end of the last one that uses it."""

from __future__ import annotations

from collections.abc import Iterable

from autopipe.ir.program import Verb
from autopipe.ir.timeline import StagePrediction


class Memory:
    """Bytes in use after each task so far, of stages that take what is predicted."""

    def __init__(self, stages: Iterable[StagePrediction]) -> None:
        self.static = sum(each.static_bytes for each in stages)
        """All through a step."""
        self.held: list[int] = []
        self._used = self.static

    def add(self, change: int, meanwhile: int) -> None:
        """A task that takes `change` (gives back, below 0) for good, and `meanwhile` more while it runs."""
        self._used += change
        self.held.append(self._used + meanwhile)

    @staticmethod
    def taken(cost: StagePrediction, verb: Verb, train: bool) -> tuple[int, int]:
        """Bytes that a computation allocates for later tasks, and only while it runs."""
        if verb is Verb.FORWARD:
            return (cost.kept_bytes, 0) if train else (0, cost.transient_bytes)
        if verb is Verb.INPUT_GRADIENT:
            more = max(cost.weight_kept_bytes - cost.kept_bytes, 0)
            return more, max(cost.transient_bytes - more, 0)
        return 0, 0 if verb is Verb.WEIGHT_GRADIENT else cost.transient_bytes

    @staticmethod
    def freed(cost: StagePrediction, verb: Verb, train: bool) -> int:
        """Bytes that no task uses after a computation."""
        if not train or verb is Verb.FORWARD:
            return 0
        if verb is Verb.INPUT_GRADIENT:
            return max(cost.kept_bytes - cost.weight_kept_bytes, 0)
        return cost.weight_kept_bytes if verb is Verb.WEIGHT_GRADIENT else cost.kept_bytes
