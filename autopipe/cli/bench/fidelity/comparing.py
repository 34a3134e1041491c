"""Model by model: measure its operators, weigh its plans, run them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from autopipe.backends.torch.worker_pool import WorkerPool
from autopipe.cli.bench.fidelity.candidates import candidates_of
from autopipe.cli.bench.fidelity.measuring import measured
from autopipe.cli.bench.fidelity.outcome import Comparison
from autopipe.cli.bench.fidelity.subjects import SUBJECTS, Subject, build, exchange_costs, operation_costs, request
from autopipe.cli.output import Bar, Output
from autopipe.cli.profile_programs import parsed_sizes
from autopipe.ir.cost_file import read_costs
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.measured_costs import Costs

Session = tuple[str, int]
"""A model of `SUBJECTS` and a number of ranks."""


def sessions(only: Sequence[str], ranks: str) -> list[Session]:
    """What is to be done, by number of ranks. Raises ConfigurationError for words that name no model or number."""
    for name in only:
        if name not in SUBJECTS:
            raise ConfigurationError(
                f"there is no case {name!r}", hint=f"there are: {', '.join(SUBJECTS)}", where="--only"
            )
    sizes = parsed_sizes(ranks, "--ranks")
    if not sizes or min(sizes) < 2:
        raise ConfigurationError("a crew has at least 2 ranks", hint="write --ranks 4,8", where="--ranks")
    return [(name, size) for size in dict.fromkeys(sizes) for name in SUBJECTS if not only or name in only]


def compare(
    planned: Sequence[Session], costs: Path | None, folder: Path, end: float, output: Output, bar: Bar
) -> Iterator[Comparison]:
    """What came of each session, as it is done; one that fails is told and left out.

    Costs are measured where `costs` names none. `end` is when to be done, by `time.monotonic`: each session gets a
    part of what is left, by its ranks.
    """
    bar.advance(0, note="measuring exchanges")
    most = max(ranks for _, ranks in planned)
    given = exchange_costs(most) if costs is None else read_costs(costs)
    known: dict[str, tuple[Subject, list[Costs]]] = {}
    crew: WorkerPool | None = None
    try:
        for done, (name, ranks) in enumerate(planned):
            part = ranks / sum(each for _, each in planned[done:])
            until = time.monotonic() + (end - time.monotonic()) * part
            if crew is None or crew.size != ranks:
                if crew is not None:
                    crew.stop()
                crew = WorkerPool(ranks)
            try:
                if name not in known:
                    known[name] = _measured_subject(name, given, most if costs is None else None, folder, bar)
                yield _compared(known[name], ranks, crew, folder / f"{name}.{ranks}", until, bar)
            except AutopipeError as error:
                output.warn(f"{name} on {ranks} ranks: {error}")
    finally:
        if crew is not None:
            crew.stop()


def _measured_subject(
    name: str, given: Costs, ranks: int | None, folder: Path, bar: Bar
) -> tuple[Subject, list[Costs]]:
    """The model, and its costs among up to so many ranks; those `given` alone where None."""
    subject = build(name, folder)
    bar.advance(0, note=f"{name}: measuring operators")
    return subject, [given] if ranks is None else [given, operation_costs(subject, ranks)]


def _compared(
    subject: tuple[Subject, list[Costs]], ranks: int, crew: WorkerPool, folder: Path, until: float, bar: Bar
) -> Comparison:
    model, costs = subject
    title = f"{model.name} on {ranks} ranks"
    bar.advance(0, note=f"{title}: planning")
    folder.mkdir()
    candidates = candidates_of(request(model, ranks, costs, folder))

    def tell(text: str) -> None:
        bar.advance(0, note=f"{title}: {text}")

    return Comparison(model.name, ranks, tuple(measured(candidates, crew, folder, until - time.monotonic(), tell)))
