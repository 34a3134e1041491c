"""The factorisation and the micro-batches under which a step is shortest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopipe.ir.errors import REFUSALS, AutopipeError, ConfigurationError, InfeasibleError, ModelError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.cost.memory import static_memory
from autopipe.passes.cost.memory_check import device_memory, fitted
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.grid.bounds import Bounds
from autopipe.passes.placement.grid.degrees import Degrees
from autopipe.passes.placement.grid.sized import SizedProblem
from autopipe.passes.schedule.limits import quick_step_seconds

_TASKS = 2**14
"""The most stages times micro-batches that are tried first: one sample at a time may mean tens of thousands of
micro-batches, whose step takes long to tell."""

_CLOSE = 1.1
"""By how much longer than the best, as a factor, a step may be predicted to be and is looked into nevertheless."""


@dataclass(frozen=True, slots=True)
class GridTrial:
    """A placement that memory holds, and its step."""

    degrees: Degrees
    size: int
    placement: Placement
    step_s: float
    memory: tuple[tuple[int, int, int], ...]
    """Of each device, but equal ones once: bytes whatever the micro-batches, bytes that grow with them, the limit."""

    def fits(self, size: int) -> bool:
        """True if memory should hold the same with micro-batches of `size` samples."""
        return all(fixed + grows * size / self.size <= limit for fixed, grows, limit in self.memory)


@dataclass(frozen=True, slots=True)
class Factorisation:
    """A factorisation with the sizes of micro-batches that it may have, ascending, and an estimate of the step with
    each."""

    degrees: Degrees
    sizes: tuple[int, ...]
    estimates: tuple[float, ...]
    soon: int
    """The size to be tried first: the smallest that does not make too many tasks."""

    def promise(self, first: GridTrial) -> tuple[int, float]:
        """Of the sizes that memory should hold the place of the best, and its step: as much longer than that of the
        size which was tried first as estimates say."""
        tried = self.sizes.index(first.size)
        places = [place for place, size in enumerate(self.sizes) if first.fits(size)]
        best = min(places, key=self.estimates.__getitem__, default=tried)
        return best, first.step_s * self.estimates[best] / self.estimates[tried]


def _walk_of(bounds: Bounds, degrees: Degrees, sizes: Sequence[int]) -> Factorisation | None:
    """None where no size can be shared by the replicas."""
    own = tuple(size for size in sizes if size % degrees.data == 0)
    if not own:
        return None
    most = max(1, _TASKS // (degrees.pipeline * bounds.chunks))
    soon = next((size for size in own if bounds.problem.batch_size <= most * size), own[-1])
    return Factorisation(degrees, own, tuple(bounds.estimate_s(degrees, size) for size in own), soon)


@dataclass(slots=True, eq=False)
class GridSearch:
    """One search: the best trial so far, and the problem on micro-batches of the sizes that were looked into."""

    problem: Problem
    chunks: int
    wave: bool
    best: GridTrial | None = None
    refused: list[AutopipeError] = field(default_factory=list)
    _sized: dict[int, SizedProblem | AutopipeError] = field(default_factory=dict)
    _trials: dict[tuple[Degrees, int], GridTrial | None] = field(default_factory=dict)

    def run(self, every: Sequence[Degrees], sizes: Sequence[int]) -> Placement:
        """The best of all factorisations on micro-batches of any of `sizes` samples.

        First each with small micro-batches, but for those that memory cannot hold, and those whose estimate, which
        leaves out what layers exchange, is no shorter than the best step; then other sizes, where they promise most
        first; then the best with its replicas apart. Raises a reason where there is no placement.
        """
        bounds = Bounds.of(self.problem, self.chunks)
        walks = {degrees: _walk_of(bounds, degrees, sizes) for degrees in every}
        begun = []
        for walk in sorted(filter(None, walks.values()), key=lambda each: min(each.estimates)):
            if min(walk.estimates) < self._best_s() and self._has_room(bounds, walk.degrees):
                # Memory may hold the smallest where it refuses larger ones.
                first = self._try(walk.degrees, walk.soon) or self._try(walk.degrees, walk.sizes[0])
                if first is not None:
                    begun.append((walk, *walk.promise(first)))
        for walk, start, promised_s in sorted(begun, key=lambda each: each[2]):
            if promised_s <= _CLOSE * self._best_s():
                self._go(walk, start)
        if self.best is None:
            raise self._reason(every, sizes)
        if self.best.degrees.may_be_apart(self.problem.cluster):
            self._try(replace(self.best.degrees, apart=True), self.best.size)
        return self.best.placement

    def _go(self, walk: Factorisation, start: int) -> None:
        """Try micro-batches of the size that promises most, and larger and smaller ones as long as that helps."""
        middle = self._try(walk.degrees, walk.sizes[start])
        for places in (range(start + 1, len(walk.sizes)), range(start - 1, -1, -1)):
            last = middle
            for place in places:
                last = self._shorter(walk.degrees, walk.sizes[place], last)
                if last is None:
                    break

    def _has_room(self, bounds: Bounds, degrees: Degrees) -> bool:
        """True if memory may hold the parameters and their state."""
        try:
            bounds.check_memory(degrees)
        except InfeasibleError as error:
            self.refused.append(error)
            return False
        return True

    def _shorter(self, degrees: Degrees, size: int, last: GridTrial | None) -> GridTrial | None:
        """The trial of another size where it is shorter than the last one."""
        found = self._try(degrees, size)
        return found if found and (last is None or found.step_s < last.step_s) else None

    def _try(self, degrees: Degrees, size: int) -> GridTrial | None:
        """The placement on micro-batches of that size, tried once; None where there is none."""
        key = degrees, size
        if key not in self._trials:
            self._trials[key] = None
            try:
                found = self._trials[key] = self._trial(self._of(size), degrees)
            except REFUSALS as error:
                self.refused.append(error)
            else:
                self.best = found if found.step_s < self._best_s() else self.best
        return self._trials[key]

    def _trial(self, sized: SizedProblem, degrees: Degrees) -> GridTrial:
        problem = sized.problem
        placement = fitted(problem, sized.placement(degrees, self.chunks, self.wave))
        costs = stage_costs(problem, placement)
        step_s = quick_step_seconds(problem, placement, costs)
        used, fixed = device_memory(problem, placement, costs), static_memory(problem, placement)
        limits = (problem.memory_of(device) for device in range(problem.cluster.size))
        memory = {(held, most - held, limit) for held, most, limit in zip(fixed, used, limits, strict=True)}
        return GridTrial(degrees, problem.micro_batch_size, placement, step_s, tuple(sorted(memory)))

    def _best_s(self) -> float:
        return math.inf if self.best is None else self.best.step_s

    def _of(self, size: int) -> SizedProblem:
        if size not in self._sized:
            try:
                self._sized[size] = SizedProblem.of(self.problem, size)
            except (ConfigurationError, ModelError) as error:
                self._sized[size] = error
        found = self._sized[size]
        if isinstance(found, AutopipeError):
            raise found
        return found

    def _reason(self, every: Sequence[Degrees], sizes: Sequence[int]) -> AutopipeError:
        """Why there is no placement: what is said of the last candidate, which shares memory the most mostly."""
        if self.refused:
            return self.refused[-1]
        least = min((degrees.data for degrees in every), default=1)
        return InfeasibleError(
            f"grid cannot share a micro-batch of {sizes[-1]} samples equally among {least} replicas",
            hint="choose a micro-batch size that the replicas divide, or other degrees",
        )
