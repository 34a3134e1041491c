"""Candidates run in turns, so that a machine that grows slower does so for all of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from autopipe.backends.torch.crew.crew import Crew
from autopipe.backends.torch.runtime.data import RandomSource
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.cli.bench.fidelity.candidates import Candidate
from autopipe.cli.bench.fidelity.outcome import Outcome
from autopipe.ir.errors import AutopipeError

_RECORDED, _WARM_UP, _STEPS = 2, 1, 4
"""Steps of a program: those with allocations counted, in the first round alone; those that warm up; those that count.
In the second step there is all that the optimizer keeps."""
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 4
_PATIENCE_S = 120.0
"""A program of a few steps takes a second or two."""


def measured(
    candidates: Sequence[Candidate], crew: Crew, folder: Path, seconds: float, tell: Callable[[str], None]
) -> tuple[list[Outcome], int]:
    """What came of each candidate, and how often all were run: until `seconds` are over, but twice.

    `tell` hears what is being run. A candidate that fails stops no other.
    """
    started = time.monotonic()
    outcomes = [_unrun(each) for each in candidates]
    rounds = 0
    while rounds < _LEAST_ROUNDS or (rounds < _MOST_ROUNDS and _fits(started, rounds, seconds)):
        for index, candidate in enumerate(candidates):
            if not outcomes[index].failed:
                tell(f"round {rounds + 1}, {index + 1} of {len(candidates)}: {candidate.name}")
                outcomes[index] = _run(candidate, outcomes[index], crew, folder / f"{index}", rounds == 0)
        rounds += 1
    return outcomes, rounds


def _fits(started: float, rounds: int, seconds: float) -> bool:
    """Whether another round is over in time."""
    return (time.monotonic() - started) * (rounds + 1) / rounds <= seconds


def _unrun(candidate: Candidate) -> Outcome:
    return Outcome(
        name=candidate.name,
        chosen=candidate.chosen,
        predicted_s=candidate.predicted_s,
        predicted_memory=max(candidate.timeline.peak_memory),
        predicted_bytes=candidate.communication_bytes,
        failed=candidate.refused,
    )


def _run(candidate: Candidate, before: Outcome, crew: Crew, program: Path, first: bool) -> Outcome:
    """Some more steps of a candidate; its memory too, the first time."""
    recorded = _RECORDED if first else 0
    try:
        if first:
            candidate.write(program)
        data = _samples(program, program.parent / "samples.npz")
        steps = recorded + _WARM_UP + _STEPS
        found = crew.run(program, data, steps, (candidate.fullest_rank, recorded), _PATIENCE_S)
    except AutopipeError as error:
        return dataclasses.replace(before, steps_s=(), failed=str(error))
    return dataclasses.replace(
        before,
        steps_s=before.steps_s + found.steps_s[recorded + _WARM_UP :],
        measured_memory=found.peak_memory_bytes if first else before.measured_memory,
        measured_bytes=found.communication_bytes,
    )


def _samples(program: Path, target: Path) -> Path:
    """One step's samples in a file, the same for all candidates, so that drawing them is no part of a step."""
    if not target.exists():
        manifest = read_manifest(program)
        source = RandomSource(manifest, 0)
        rows = {each.name: source.rows(each, 0, manifest.batch_size) for each in manifest.inputs}
        np.savez(target, **rows)  # type: ignore[arg-type]
    return target
