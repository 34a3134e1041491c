"""The command line that gives an alternative."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from autopipe.cli.plan_folder import CONFIGURATION_FILE
from autopipe.ir.plan import Alternative, Choice
from autopipe.passes.pipeline import PlanResult


def alternative_command(folder: Path, planned: PlanResult, alternative: Alternative) -> str:
    """The command that plans what an alternative chose, all else as in the plan of `folder`."""
    choice = alternative.choice
    target = ".".join((str(folder), choice.strategy, *([choice.schedule] if choice.schedule else [])))
    words = ["autopipe", "plan", _short(planned.plan.model), "--config", str(folder / CONFIGURATION_FILE)]
    return shlex.join([*words, *_choice_words(planned, choice), "-o", target])


def _choice_words(planned: PlanResult, choice: Choice) -> Iterator[str]:
    """The flags that set what the effective configuration of the plan has otherwise."""
    problem = planned.problem
    yield from ("--strategy", choice.strategy)
    for name, value in _options(planned, choice):
        yield from ("--set", f"strategy.{name}={value}")
    if choice.schedule is not None:
        yield from ("--schedule", choice.schedule)
    count = "auto" if choice.micro_batches is None else str(choice.micro_batches)
    if count != str(problem.micro_batches):
        yield from ("--micro-batches", count)
    if choice.recompute != problem.recompute:
        yield from ("--set", f"recompute={choice.recompute}")
    if choice.shard != problem.optimizer.shard:
        yield from ("--set", f"optimizer.shard={json.dumps(choice.shard)}")


def _options(planned: PlanResult, choice: Choice) -> Iterator[tuple[str, str]]:
    """The options of the choice, and of the plan's own strategy, whose options stay, the defaults of the others."""
    wanted = dict(choice.options)
    strategy = cast(Any, planned.request.strategy)
    if strategy.name == choice.strategy:
        for field in dataclasses.fields(strategy):
            if field.name not in wanted and getattr(strategy, field.name) != field.default:
                yield field.name, json.dumps(field.default)
    yield from wanted.items()


def _short(path: str) -> str:
    """The path, from here where that is shorter."""
    return min(path, os.path.relpath(path), key=len)
