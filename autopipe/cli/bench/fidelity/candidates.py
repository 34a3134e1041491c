"""The plans that are weighed for a request, each program once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopipe.backends.torch.emission.program import ProgramFiles, Provenance, write_program
from autopipe.ir.errors import AutopipeError
from autopipe.ir.plan import Choice
from autopipe.ir.program import Program
from autopipe.ir.timeline import Timeline
from autopipe.passes.analysis.operators import element_bytes, uses_of
from autopipe.passes.auto.choose import weigh
from autopipe.passes.auto.search import CandidateTrial, ScheduleOutcome
from autopipe.passes.lower.lower import lower
from autopipe.passes.lower.traffic import communication_bytes
from autopipe.passes.pipeline import Placed, Request
from autopipe.passes.runner import NullObserver, Runner


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that was weighed, and the program that it becomes."""

    name: str
    """What to ask for in order to get it."""
    chosen: bool
    """Whether it is what is planned where nothing is named."""
    placed: Placed
    timeline: Timeline
    program: Program | None
    refused: str = ""
    """Why there is no program."""

    @property
    def predicted_s(self) -> float:
        """Seconds of the simulated step."""
        return self.timeline.end

    @property
    def fullest_rank(self) -> int:
        """The rank that is to need most memory."""
        peaks = self.timeline.peak_memory
        return peaks.index(max(peaks))

    @property
    def communication_bytes(self) -> int | None:
        """What a step's exchanges are to move; None where there is no program."""
        if self.program is None:
            return None
        problem = self.placed.problem
        widths = element_bytes(problem.graph, uses_of(problem.graph), problem.precision)
        count, devices = problem.micro_batches, problem.cluster.size
        shard = problem.optimizer.shard
        found = communication_bytes(problem.graph, self.placed.placement, count, devices, problem.loss, widths, shard)
        return sum(found.values())

    def write(self, folder: Path) -> None:
        """Write the ranks' files. Raises CodegenError where their text would be wrong."""
        assert self.program is not None
        titles = ("A candidate.",) * len(self.program.stages), ("A candidate.",) * self.program.world_size
        problem, model = self.placed.problem, self.placed.model
        provenance = Provenance(
            model=str(model.path), model_digest=model.digest, plan_digest=self.name, optimizer=problem.optimizer,
            precision=problem.precision, seed=problem.seed, predicted_step_s=self.timeline.end,
            predicted_bubble=self.timeline.bubble_rate,
        )  # fmt: skip
        write_program([ProgramFiles("", self.program, *titles)], provenance, folder)


def candidates_of(request: Request) -> tuple[Candidate, ...]:
    """All plans that are weighed for the request and have a simulated step, the first of those with equal programs.

    Bounds leave out most schedules; the fastest placement of several stages is run under all of them. The chosen plan
    comes first. Raises the reason where there is none.
    """
    search = weigh(request, Runner(NullObserver()))
    assert search.best is not None
    best = search.best.best
    pipelines = [each for each in search.tried if each.placed and each.runs and len(each.placed.placement.stages) > 1]
    if pipelines:
        search.schedule(min(pipelines, key=lambda each: each.step_s))
    runs = [(each, run) for each in search.tried for run in each.runs]
    runs.sort(key=lambda pair: pair[1] is not best)
    found: list[Candidate] = []
    for each, run in runs:
        candidate = _candidate(request, each, run, chosen=not found)
        if candidate is not None and (
            candidate.program is None or all(candidate.program != other.program for other in found)
        ):
            found.append(candidate)
    return tuple(found)


def _candidate(request: Request, tried: CandidateTrial, run: ScheduleOutcome, chosen: bool) -> Candidate | None:
    """What came of a schedule on a placement; None where there is no step."""
    placed = tried.placed
    if placed is None or run.scheduled is None:
        return None
    problem = placed.problem
    loss, shard = problem.loss if problem.train else None, problem.optimizer.shard
    name = choice_text(tried.candidate.choice(request, run.scheduler.name), problem.micro_batches)
    program, refused = None, ""
    try:
        program = lower(problem.graph, placed.placement, run.scheduled.schedule, loss, shard)
    except AutopipeError as error:
        refused = error.line
    return Candidate(name, chosen, placed, run.scheduled.timeline, program, refused)


def choice_text(choice: Choice, micro_batches: int) -> str:
    """A choice in one line, as its names and options are spelled."""
    options = ",".join(f"{name}={value}" for name, value in choice.options)
    parts = [
        f"{choice.strategy}({options})" if options else choice.strategy,
        str(choice.schedule),
        f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}",
        *([f"recompute={choice.recompute}"] if choice.recompute != "none" else []),
        *(["shard"] if choice.shard else []),
    ]
    return ", ".join(parts)
