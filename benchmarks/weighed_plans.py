"""Every plan that is weighed for a small model, predicted and then run on ranks of this machine.

Candidates run in turns, so that a machine that grows slower does so for all of them; every other
round goes from the last to the first, so that none always follows the same one.
"""

from __future__ import annotations

import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from autopipe.api.events import Progress
from autopipe.api.exchange_costs import exchanges_of
from autopipe.api.profile_samples import parsed_sizes
from autopipe.api.profile_session import Profiling, processor
from autopipe.api.profile_settings import ProfileSettings
from autopipe.api.request import make_request
from autopipe.backends.torch.codegen.program import ProgramFiles, Provenance, write_program
from autopipe.backends.torch.runtime.data.sources import save_samples
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.cli.output import Output, Verbosity
from autopipe.configs import zoo
from autopipe.configs.configuration import load_configuration
from autopipe.ir.cluster import usable_cpu_cores
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.measured_costs import Costs, DeviceCosts, costs_text, merge_costs, read_costs
from autopipe.ir.output_kinds import write_texts
from autopipe.ir.plan import Choice
from autopipe.ir.program import Program
from autopipe.ir.timeline import Timeline
from autopipe.ir.words import bytes_text, seconds_text
from autopipe.passes.auto.choose import search_plans
from autopipe.passes.auto.search import CandidateTrial, ScheduleOutcome
from autopipe.passes.lower.lower import lower
from autopipe.passes.lower.traffic import communication_bytes
from autopipe.passes.pipeline import PredictedPlacement, Request, Runner
from benchmarks.scatter import scatter_svg
from benchmarks.table import Row
from benchmarks.worker_pool import WorkerPool

# The models, and what is measured of this machine before.

SUBJECTS: Final[dict[str, dict[str, int]]] = {
    "gpt": {"layers": 2, "hidden": 128},
    "moe": {"layers": 1, "hidden": 128},
    "mt5": {"layers": 1, "hidden": 128},
    "two-branch": {"repeats": 2, "hidden": 128},
    "unet": {},
    "vgg19": {},
}
"""Models of the zoo, with the sizes that are not its defaults: steps of some ten milliseconds on
two cores.
"""
BATCH: Final = 32
"""Samples of a step."""
_SIZES: Final = (1, 2, 4, 8, 16, 32)
"""Micro-batches whose operators are measured: shares of larger ones among them."""
_DEVICE: Final = "one core"
_OPERATIONS_S: Final = 10.0
_EXCHANGES_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Subject:
    """A model of the zoo in a file."""

    name: str
    path: Path


def build(name: str, folder: Path) -> Subject:
    """Write a model of `SUBJECTS`, with its loss and random weights."""
    path = folder / f"{name}.onnx"
    zoo.build(zoo.configure(name, {**SUBJECTS[name], "loss": True, "weights": "random"})).save(path)
    return Subject(name, path)


def exchange_costs(ranks: int) -> Costs:
    """What messages and collectives of up to so many ranks take here. Raises LaunchError where a
    rank fails.
    """
    exchanges = exchanges_of(ranks, "cpu", _EXCHANGES_S)
    return Costs((DeviceCosts(_DEVICE, (f"exchanges of {ranks} ranks",), exchanges=exchanges),))


def operation_costs(subject: Subject, ranks: int) -> Costs:
    """What the operators of a model take on a core while all other cores are busy, and up to so
    many ranks in turns.
    """
    settings = ProfileSettings(
        sizes=_SIZES, degrees=(), device="cpu", name=_DEVICE, seconds=_OPERATIONS_S
    )
    configuration = load_configuration(words={"--cluster": "cpu-local"})
    profiling = Profiling(make_request(configuration, subject.path), settings)
    with Output(verbosity=Verbosity.QUIET).progress("operators") as bar:
        costs, _ = profiling.run(bar)
    return Costs((costs,))


def request(subject: Subject, ranks: int, costs: Sequence[Costs], folder: Path) -> Request:
    """What is asked for: the best plan for so many ranks of this machine, at costs measured on
    it.
    """
    path = folder / f"{subject.name}.costs"
    path.write_text(costs_text(merge_costs(costs)), encoding="utf-8")
    words = {"--gpus": ranks, "--cluster": "cpu-local", "--costs": path, "--batch-size": BATCH}
    return make_request(
        load_configuration(words={flag: str(word) for flag, word in words.items()}), subject.path
    )


# The plans that are weighed for a request, each program once.


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that was weighed, and the program that it becomes."""

    name: str
    """What to ask for in order to get it."""
    chosen: bool
    """Whether it is what is planned where nothing is named."""
    placed: PredictedPlacement
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
        count = problem.micro_batches
        devices = problem.cluster.size
        how = problem.optimizer.shard, problem.precision
        found = communication_bytes(
            problem.graph, self.placed.placement, count, devices, problem.loss, *how
        )
        return sum(found.values())

    def write(self, folder: Path) -> None:
        """Write the ranks' files. Raises CodegenError where their text would be wrong."""
        assert self.program is not None
        titles = (
            ("A candidate.",) * len(self.program.stages),
            ("A candidate.",) * self.program.world_size,
        )
        problem = self.placed.problem
        model = self.placed.model
        provenance = Provenance(
            model=str(model.path), model_digest=model.digest, plan_digest=self.name, optimizer=problem.optimizer,
            precision=problem.precision, seed=problem.seed, predicted_step_s=self.timeline.end,
            predicted_bubble=self.timeline.bubble_rate,
        )  # fmt: skip
        write_program([ProgramFiles("", self.program, *titles)], provenance, folder)


def candidates_of(request: Request) -> tuple[Candidate, ...]:
    """All plans that are weighed for the request and have a simulated step, the first of those with
    equal programs.

    Bounds leave out most schedules; the fastest placement of several stages is run under all of
    them. The chosen plan comes first. Raises the reason where there is none.
    """
    search = search_plans(request, Runner())
    assert search.best is not None
    best = search.best.best
    pipelines = [
        each
        for each in search.trials
        if each.placed and each.runs and len(each.placed.placement.stages) > 1
    ]
    if pipelines:
        fastest = min(pipelines, key=lambda each: each.step_s)
        assert fastest.placed is not None
        for scheduler in search.schedulers():
            if not fastest.has_run(scheduler):
                search.run_scheduler(fastest, fastest.placed, scheduler)
    runs = [(each, run) for each in search.trials for run in each.runs]
    runs.sort(key=lambda pair: pair[1] is not best)
    found: list[Candidate] = []
    for each, run in runs:
        candidate = _candidate(request, each, run, chosen=not found)
        if candidate is not None and (
            candidate.program is None or all(candidate.program != other.program for other in found)
        ):
            found.append(candidate)
    return tuple(found)


def _candidate(
    request: Request, tried: CandidateTrial, run: ScheduleOutcome, chosen: bool
) -> Candidate | None:
    """What came of a schedule on a placement; None where there is no step."""
    placed = tried.placed
    if placed is None or run.scheduled is None:
        return None
    problem = placed.problem
    loss = problem.loss if problem.train else None
    shard = problem.optimizer.shard
    name = choice_text(tried.candidate.choice(request, run.scheduler.name), problem.micro_batches)
    program = None
    refused = ""
    try:
        program = lower(
            problem.graph,
            placed.placement,
            run.scheduled.schedule,
            loss,
            shard,
            precision=problem.precision,
        )
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


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The correlation of ranks, equal values sharing the mean of theirs; None where one figure is
    the same for all.

    Spearman, "The proof and measurement of association between two things", American Journal of
    Psychology 15(1), 1904.
    """
    ranks = [_ranks(np.asarray(each, dtype=float)) for each in (first, second)]
    centred = [each - each.mean() for each in ranks]
    spread = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum()) / spread if spread else None


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[places], dtype=float)


# What came of running them.

_DIGITS = 9
"""Predictions that differ by less than a nanosecond are one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A candidate, predicted and measured; bytes are None, and there are no steps, where it did not
    run.
    """

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
        return tuple(
            sorted(
                ((each, step) for each, step in found if step is not None), key=lambda pair: pair[1]
            )
        )

    @property
    def correlation(self) -> float | None:
        """Spearman's, of predicted and measured steps; None where there is nothing to order."""
        ran = self.measured
        return (
            spearman(
                [round(each.predicted_s, _DIGITS) for each, _ in ran], [step for _, step in ran]
            )
            if ran
            else None
        )

    @property
    def chosen_over_fastest(self) -> float | None:
        """The chosen plan's step over the fastest one; None where it did not run."""
        ran = self.measured
        return next((step / ran[0][1] for each, step in ran if each.chosen), None)


# Running them in turns.

_RECORDED = 1
_WARM_UP = 3
_STEPS = 4
"""Steps of a program: with allocations counted, in the first round alone; to warm up, while the
heap still grows; those that count.
"""
_SLOW = 4.0
_FEW_STEPS = 2
"""What is predicted to take so many times the least runs fewer steps that count."""
_LEAST_ROUNDS = 2
_MOST_ROUNDS = 12
_NEAR = 1.3
"""Candidates within so much of the fastest one are run more often than others: they decide which
one is fastest.
"""
_FOR_NEAR = 0.5
"""Part of the time that is kept for them."""
_PATIENCE_S = 120.0
"""A program of a few steps takes a second or two."""


def measured(
    candidates: Sequence[Candidate],
    pool: WorkerPool,
    folder: Path,
    seconds: float,
    tell: Callable[[str], None],
) -> list[Outcome]:
    """What came of each candidate: all are run once, and again while there is time, of `seconds` in
    all. The chosen one and those near the fastest are run once more in any case, and in what time
    is left for no round of all.

    `tell` hears what is being run. A candidate that fails stops no other.
    """
    started = time.monotonic()
    outcomes = [_unrun(each) for each in candidates]
    slow_s = _SLOW * min(each.predicted_s for each in candidates)
    chosen: Sequence[int] = range(len(candidates))
    for turn in range(_MOST_ROUNDS):
        began = time.monotonic()
        for index in chosen if turn % 2 == 0 else reversed(chosen):
            if not outcomes[index].failed:
                tell(
                    f"round {turn + 1}, {index + 1} of {len(candidates)}: {candidates[index].name}"
                )
                steps = _FEW_STEPS if candidates[index].predicted_s > slow_s else _STEPS
                program = folder / f"{index}"
                outcomes[index] = _run(
                    candidates[index], outcomes[index], pool, program, turn == 0, steps
                )
        now = time.monotonic()
        left = started + seconds - now
        each_s = (now - began) / max(1, len(chosen))
        chosen = range(len(candidates))
        if len(chosen) * each_s > (1 - _FOR_NEAR) * left:
            chosen = _deciding(outcomes)
        if turn + 1 >= _LEAST_ROUNDS and len(chosen) * each_s > left:
            break
    return outcomes


def _deciding(outcomes: Sequence[Outcome]) -> Sequence[int]:
    """The chosen one, and those near the fastest."""
    steps = [each.measured_s for each in outcomes]
    limit = _NEAR * min((step for step in steps if step is not None), default=0.0)
    return [
        index
        for index, (outcome, step) in enumerate(zip(outcomes, steps, strict=True))
        if step is not None and (outcome.chosen or step <= limit)
    ]


def _unrun(candidate: Candidate) -> Outcome:
    return Outcome(
        name=candidate.name,
        chosen=candidate.chosen,
        predicted_s=candidate.predicted_s,
        predicted_memory=max(candidate.timeline.peak_memory),
        predicted_bytes=candidate.communication_bytes,
        failed=candidate.refused,
    )


def _run(
    candidate: Candidate, before: Outcome, pool: WorkerPool, program: Path, first: bool, count: int
) -> Outcome:
    """Some more steps of a candidate; its memory too, the first time."""
    recorded = _RECORDED if first else 0
    try:
        if first:
            candidate.write(program)
        data = _samples(program, program.parent / "samples.npz")
        steps = recorded + _WARM_UP + count
        found = pool.run(program, data, steps, (candidate.fullest_rank, recorded), _PATIENCE_S)
    except AutopipeError as error:
        return dataclasses.replace(before, steps_s=(), failed=str(error))
    return dataclasses.replace(
        before,
        steps_s=before.steps_s + found.steps_s[recorded + _WARM_UP :],
        measured_memory=found.peak_memory_bytes if first else before.measured_memory,
        measured_bytes=found.communication_bytes,
        processor_s=min(found.processor_s, before.processor_s or found.processor_s),
    )


def _samples(program: Path, target: Path) -> Path:
    """One step's samples in a file, the same for all candidates, so that drawing them is no part of
    a step.
    """
    if not target.exists():
        save_samples(read_manifest(program), target)
    return target


# Rows of a benchmark, and a table for a person.

_PREDICTED = "simulated with costs measured in this run"
_ALLOCATED = "allocated by torch at most, on the rank that is to need most, parameters included"

_ALL_RANKS = "of a step, all ranks together, counted by the kernel"

HEADINGS = (
    "candidate",
    "predicted",
    "measured",
    "off",
    "processors",
    "memory",
    "allocated",
    "to move",
    "moved",
)
"""Of `cells`."""


def rows(comparison: Comparison) -> Iterator[Row]:
    """Two figures of each kind for every candidate, then those of all."""
    for each in comparison.outcomes:
        for metric, predicted, measured, unit, note in _figures(each):
            yield Row(
                comparison.name, f"predicted_{metric}", None, predicted, unit, each.name, _PREDICTED
            )
            yield Row(comparison.name, metric, None, measured, unit, each.name, each.failed or note)
        yield Row(
            comparison.name,
            "processor_time_s",
            None,
            each.processor_s,
            "s",
            each.name,
            each.failed or _ALL_RANKS,
        )
    note = f"{len(comparison.measured)} of {len(comparison.outcomes)} candidates ran"
    yield Row(
        comparison.name,
        "spearman",
        None,
        comparison.correlation,
        "",
        "predicted and measured steps",
        note,
    )
    over = comparison.chosen_over_fastest
    yield Row(
        comparison.name, "chosen_over_fastest", None, over, "times", "the plan that is chosen", note
    )


def _figures(outcome: Outcome) -> Iterator[tuple[str, float | None, float | None, str, str]]:
    steps = f"median of {len(outcome.steps_s)} steps, measured here"
    yield "step_time_s", outcome.predicted_s, outcome.measured_s, "s", steps
    yield (
        "peak_memory_bytes",
        outcome.predicted_memory,
        outcome.measured_memory,
        "bytes",
        _ALLOCATED,
    )
    yield (
        "communication_bytes",
        outcome.predicted_bytes,
        outcome.measured_bytes,
        "bytes",
        "counted by the ranks",
    )


def cells(outcome: Outcome) -> tuple[str, ...]:
    """An outcome as texts below `HEADINGS`; the chosen plan has a mark."""
    measured = outcome.measured_s
    return (
        f"{outcome.name} ←" if outcome.chosen else outcome.name,
        seconds_text(outcome.predicted_s),
        "failed" if measured is None else seconds_text(measured),
        "–" if measured is None else f"{outcome.predicted_s / measured - 1:+.0%}",
        "–" if outcome.processor_s is None else seconds_text(outcome.processor_s),
        bytes_text(outcome.predicted_memory),
        _bytes(outcome.measured_memory),
        _bytes(outcome.predicted_bytes),
        _bytes(outcome.measured_bytes),
    )


def ordered(comparison: Comparison) -> Iterator[Outcome]:
    """The outcomes, the fastest first, those that failed last."""
    yield from (each for each, _ in comparison.measured)
    yield from (each for each in comparison.outcomes if each.measured_s is None)


def verdict(comparison: Comparison) -> str:
    """The figures of all candidates in one line."""
    correlation = comparison.correlation
    over = comparison.chosen_over_fastest
    parts = [
        f"{len(comparison.measured)} of {len(comparison.outcomes)} candidates ran",
        "Spearman –" if correlation is None else f"Spearman {correlation:.3f}",
        "the chosen plan did not run"
        if over is None
        else f"the chosen plan takes {over:.2f} of the fastest one's step",
    ]
    return ", ".join(parts)


def table(comparison: Comparison) -> Iterator[str]:
    """A title, a line a candidate, and what failed."""
    lines = [HEADINGS, *map(cells, ordered(comparison))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    yield f"{comparison.model} on {comparison.ranks} ranks: {verdict(comparison)}"
    for first, *others in lines:
        figures = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *figures])
    yield from (f"  {each.name}: {each.failed}" for each in comparison.outcomes if each.failed)
    yield ""


def _bytes(size: int | None) -> str:
    return "–" if size is None else bytes_text(size)


# A page of Markdown, and its picture.

_TEXT = """# All plans that are weighed, predicted and run

Made by `{command}` on {day}: {cores} processors ({processor}), ranks of one
thread, over gloo.

Small models of the zoo train on {batch} samples a step. `auto` weighs plans for four and for eight ranks with what was
measured of this machine right before: operators on one processor beside busy others, messages and collectives between
ranks. Every plan that differs from the others in its program is then run, all in turns. A step is predicted as if every
rank had a processor of its own.

{summary}

![predicted and measured steps]({picture})

*Measured* is the median step of the slowest rank, *processors* the processor time of a step on all of them: shared
evenly it is what the step takes at least. *Memory* is what the rank that is to need most is to hold at its
peak, *allocated* what torch's allocator gave it, its parameters included. *To move* and *moved* are the bytes of a
step's exchanges, predicted and counted. ← is the plan that is chosen where nothing is named.

{tables}
"""


def write_page(target: Path, command: str, comparisons: Sequence[Comparison]) -> None:
    """Write the page and, beside it, its picture, with what has been measured so far."""
    picture = target.with_suffix(".svg")
    text = _TEXT.format(
        command=command,
        day=datetime.datetime.now(datetime.UTC).date(),
        cores=usable_cpu_cores(),
        processor=processor(),
        batch=BATCH,
        summary="\n".join(_summary(comparisons)),
        picture=picture.name,
        tables="\n\n".join(map(_table, comparisons)),
    )
    points = {
        each.name: [(one.predicted_s, step) for one, step in each.measured] for each in comparisons
    }
    drawn = scatter_svg("seconds of a step", ("predicted", "measured"), points)
    write_texts({target: text, picture: drawn})


def _summary(comparisons: Sequence[Comparison]) -> Iterator[str]:
    yield "| model and ranks | ran | Spearman | chosen over fastest | median off |"
    yield "|---|---:|---:|---:|---:|"
    for each in comparisons:
        offs = [one.predicted_s / step - 1 for one, step in each.measured]
        figures = (
            f"{len(each.measured)} of {len(each.outcomes)}",
            _figure(each.correlation, ".3f"),
            _figure(each.chosen_over_fastest, ".2f"),
            _figure(statistics.median(offs) if offs else None, "+.0%"),
        )
        yield f"| {each.name} | {' | '.join(figures)} |"


def _table(comparison: Comparison) -> str:
    lines = [f"## {comparison.model} on {comparison.ranks} ranks", ""]
    lines += [f"| {' | '.join(HEADINGS)} |", "|---" + "|---:" * (len(HEADINGS) - 1) + "|"]
    lines += [f"| {' | '.join(cells(each))} |" for each in ordered(comparison)]
    lines += ["", *(f"- {each.name}: {each.failed}" for each in comparison.outcomes if each.failed)]
    return "\n".join(lines).rstrip()


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


# Model by model: measure its operators, weigh its plans, run them.

Session = tuple[str, int]
"""A model of `SUBJECTS` and a number of ranks."""


def sessions(only: Sequence[str], ranks: str) -> list[Session]:
    """What is to be done, by number of ranks. Raises ConfigurationError for words that name no
    model or number.
    """
    for name in only:
        if name not in SUBJECTS:
            raise ConfigurationError(
                f"there is no case {name!r}",
                hint=f"there are: {', '.join(SUBJECTS)}",
                where="--only",
            )
    sizes = parsed_sizes(ranks, "--ranks")
    if not sizes or min(sizes) < 2:
        raise ConfigurationError(
            "a crew has at least 2 ranks", hint="write --ranks 4,8", where="--ranks"
        )
    return [
        (name, size)
        for size in dict.fromkeys(sizes)
        for name in SUBJECTS
        if not only or name in only
    ]


def compare(
    planned: Sequence[Session],
    costs: Path | None,
    folder: Path,
    end: float,
    output: Output,
    bar: Progress,
) -> Iterator[Comparison]:
    """What came of each session, as it is done; one that fails is told and left out.

    Costs are measured where `costs` names none. `end` is when to be done, by `time.monotonic`: each
    session gets a part of what is left, by its ranks.
    """
    bar.advance(0, note="measuring exchanges")
    most = max(ranks for _, ranks in planned)
    given = exchange_costs(most) if costs is None else read_costs(costs)
    known: dict[str, tuple[Subject, list[Costs]]] = {}
    pool: WorkerPool | None = None
    try:
        for done, (name, ranks) in enumerate(planned):
            part = ranks / sum(each for _, each in planned[done:])
            until = time.monotonic() + (end - time.monotonic()) * part
            if pool is None or pool.size != ranks:
                if pool is not None:
                    pool.stop()
                pool = WorkerPool(ranks)
            try:
                if name not in known:
                    known[name] = _measured_subject(
                        name, given, most if costs is None else None, folder, bar
                    )
                yield _compared(known[name], ranks, pool, folder / f"{name}.{ranks}", until, bar)
            except AutopipeError as error:
                output.warn(f"{name} on {ranks} ranks: {error}")
    finally:
        if pool is not None:
            pool.stop()


def _measured_subject(
    name: str, given: Costs, ranks: int | None, folder: Path, bar: Progress
) -> tuple[Subject, list[Costs]]:
    """The model, and its costs among up to so many ranks; those `given` alone where None."""
    subject = build(name, folder)
    bar.advance(0, note=f"{name}: measuring operators")
    return subject, [given] if ranks is None else [given, operation_costs(subject, ranks)]


def _compared(
    subject: tuple[Subject, list[Costs]],
    ranks: int,
    pool: WorkerPool,
    folder: Path,
    until: float,
    bar: Progress,
) -> Comparison:
    model, costs = subject
    title = f"{model.name} on {ranks} ranks"
    bar.advance(0, note=f"{title}: planning")
    folder.mkdir()
    candidates = candidates_of(request(model, ranks, costs, folder))

    def tell(text: str) -> None:
        bar.advance(0, note=f"{title}: {text}")

    return Comparison(
        model.name, ranks, tuple(measured(candidates, pool, folder, until - time.monotonic(), tell))
    )
