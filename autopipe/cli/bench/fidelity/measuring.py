"""Candidates run in turns, so that a machine that grows slower does so for all of them; every other round from the last
to the first, so that none always follows the same one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from autopipe.backends.torch.runtime.data import save_samples
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.backends.torch.worker_pool import WorkerPool
from autopipe.cli.bench.fidelity.candidates import Candidate
from autopipe.cli.bench.fidelity.outcome import Outcome
from autopipe.ir.errors import AutopipeError

_RECORDED, _WARM_UP, _STEPS = 1, 3, 4
"""Steps of a program: with allocations counted, in the first round alone; to warm up, while the heap still grows; those
that count."""
_SLOW, _FEW_STEPS = 4.0, 2
"""What is predicted to take so many times the least runs fewer steps that count."""
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 12
_NEAR = 1.3
"""Candidates within so much of the fastest one are run more often than others: they decide which one is fastest."""
_FOR_NEAR = 0.5
"""Part of the time that is kept for them."""
_PATIENCE_S = 120.0
"""A program of a few steps takes a second or two."""


def measured(
    candidates: Sequence[Candidate], crew: WorkerPool, folder: Path, seconds: float, tell: Callable[[str], None]
) -> list[Outcome]:
    """What came of each candidate: all are run once, and again while there is time, of `seconds` in all. The chosen one
    and those near the fastest are run once more in any case, and in what time is left for no round of all.

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
                tell(f"round {turn + 1}, {index + 1} of {len(candidates)}: {candidates[index].name}")
                steps = _FEW_STEPS if candidates[index].predicted_s > slow_s else _STEPS
                program = folder / f"{index}"
                outcomes[index] = _run(candidates[index], outcomes[index], crew, program, turn == 0, steps)
        now = time.monotonic()
        left, each_s = started + seconds - now, (now - began) / max(1, len(chosen))
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


def _run(candidate: Candidate, before: Outcome, crew: WorkerPool, program: Path, first: bool, count: int) -> Outcome:
    """Some more steps of a candidate; its memory too, the first time."""
    recorded = _RECORDED if first else 0
    try:
        if first:
            candidate.write(program)
        data = _samples(program, program.parent / "samples.npz")
        steps = recorded + _WARM_UP + count
        found = crew.run(program, data, steps, (candidate.fullest_rank, recorded), _PATIENCE_S)
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
    """One step's samples in a file, the same for all candidates, so that drawing them is no part of a step."""
    if not target.exists():
        save_samples(read_manifest(program), target)
    return target
