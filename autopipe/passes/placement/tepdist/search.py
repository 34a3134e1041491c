"""The outer search: every factorisation of the devices, with the micro-batches under which its step is shortest."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopipe.ir.errors import REFUSALS, AutopipeError, ConfigurationError, InfeasibleError, ModelError
from autopipe.ir.placement import Placement
from autopipe.passes.placement.tepdist.bounds import Bounds
from autopipe.passes.placement.tepdist.level import Level
from autopipe.passes.placement.tepdist.meshes import Mesh
from autopipe.passes.placement.tepdist.sized import Divide, Nodes, SizedProblem


@dataclass(frozen=True, slots=True)
class MeshTrial:
    """Result of a factorisation with one number of micro-batches."""

    mesh: Mesh
    micro_batches: int
    step_s: float = math.inf
    """Seconds of a step; infinite where no placement was found."""
    placement: Placement | None = None
    least_s: float = 0.0
    """Seconds that no step can be shorter than, where it was looked into no further."""
    late: bool = False
    """True if that was for want of time."""
    refused: AutopipeError | None = None
    """Reason why it has no step."""


@dataclass(slots=True, eq=False)
class Outer:
    """One outer search: what it has tried, and the best of that."""

    bounds: Bounds
    solver: Level
    divisions: Sequence[Divide]
    """Ways to divide the nodes among stages, each of which is tried."""
    end: float | None = None
    """When to stop, by `time.monotonic`, once there is a placement."""
    tried: list[MeshTrial] = field(default_factory=list)
    best: MeshTrial | None = None
    undivided: dict[str, str] = field(default_factory=dict)
    """By a factorisation's name why not all ways to divide the nodes were possible; empty where they were."""
    _sized: dict[int, SizedProblem | AutopipeError] = field(default_factory=dict)

    def run(self, meshes: Iterable[Mesh], sizes: Iterable[int]) -> MeshTrial:
        """The best of all `meshes` on micro-batches of `sizes` samples.

        Raises the reason against the most promising of them where none has a placement.
        """
        counts = sorted(self.bounds.problem.batch_size // size for size in sizes)
        estimates = {mesh: [self.bounds.estimate_s(mesh, count) for count in counts] for mesh in meshes}
        for mesh in sorted(estimates, key=lambda each: min(estimates[each])):
            self._walk(mesh, counts, estimates[mesh])
        if self.best is None:
            raise self._reason()
        return self.best

    def _walk(self, mesh: Mesh, counts: Sequence[int], estimates: Sequence[float]) -> None:
        """Try numbers of micro-batches from the most promising one on, up and then down, as long as that helps."""
        start = min(range(len(counts)), key=estimates.__getitem__)
        first = last = self._try(mesh, counts[start])
        for count in counts[start + 1 :]:
            found = self._try(mesh, count)
            # Smaller micro-batches may fit into memory where larger ones do not.
            if found.step_s >= last.step_s and last.refused is None:
                break
            last = found
        last = first
        for count in () if isinstance(first.refused, InfeasibleError) else counts[:start][::-1]:
            found = self._try(mesh, count)
            if found.step_s >= last.step_s:
                break
            last = found

    def _try(self, mesh: Mesh, count: int) -> MeshTrial:
        try:
            found = self._answer(mesh, count)
        except REFUSALS as error:
            found = MeshTrial(mesh, count, refused=error)
        self.tried.append(found)
        if found.placement is not None and found.step_s < self._known_s():
            self.best = found
        return found

    def _answer(self, mesh: Mesh, count: int) -> MeshTrial:
        """The best placement, or why it is not worth looking for."""
        least = self.bounds.step_s(mesh, count)
        late = self.best is not None and self.end is not None and time.monotonic() > self.end
        if late or least >= self._known_s():
            return MeshTrial(mesh, count, least_s=least, late=late)
        sized = self.of(count)
        found = [self._placed(sized, mesh, count, stages) for stages in self._divided(sized, mesh)]
        return min(found, key=lambda each: (each.step_s, each.refused is not None))

    def _placed(self, sized: SizedProblem, mesh: Mesh, count: int, stages: Nodes) -> MeshTrial:
        """The best placement of stages as divided."""
        least = self.bounds.divided_s(mesh, count, stages)
        if least >= self._known_s():
            return MeshTrial(mesh, count, least_s=least)
        try:
            found = sized.placements(mesh, stages, self._known_s())
        except InfeasibleError as error:
            return MeshTrial(mesh, count, refused=error)
        step_s, placement = min(found, key=lambda each: each[0], default=(math.inf, None))
        return MeshTrial(mesh, count, step_s, placement, 0.0 if found else self._known_s())

    def _divided(self, sized: SizedProblem, mesh: Mesh) -> Iterable[Nodes]:
        """The divisions that there are, each once. Raises the first one's reason where there is none."""
        found: dict[Nodes, None] = {}
        refused: dict[str, InfeasibleError] = {}
        for division in self.divisions:
            try:
                found[sized.stages(mesh, division)] = None
            except InfeasibleError as error:
                refused[error.message] = error
        self.undivided.setdefault(mesh.name, "; ".join(refused))
        if not found:
            raise next(iter(refused.values()))
        return found

    def _known_s(self) -> float:
        return self.bounds.problem.known_s if self.best is None else self.best.step_s

    def of(self, count: int) -> SizedProblem:
        """The problem in `count` micro-batches. Raises ConfigurationError or ModelError where there is none."""
        if count not in self._sized:
            try:
                self._sized[count] = SizedProblem.of(
                    self.bounds.problem, self.bounds.problem.batch_size // count, self.solver
                )
            except (ConfigurationError, ModelError) as error:
                self._sized[count] = error
        found = self._sized[count]
        if isinstance(found, AutopipeError):
            raise found
        return found

    def _reason(self) -> AutopipeError:
        """Why there is no placement: memory, if it is that somewhere, else what is said of the most promising."""
        refusals = [each.refused for each in self.tried if each.refused is not None]
        if self.bounds.problem.known_s < math.inf:
            refusals.append(InfeasibleError(f"no step is shorter than {self.bounds.problem.known_s:.6g} s"))
        assert refusals, "there is a placement, or a reason against each"
        return next((each for each in refusals if isinstance(each, InfeasibleError)), refusals[0])
