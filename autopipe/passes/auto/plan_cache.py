"""An answer as it is kept between runs, and the plan that is made of it again.

What is kept is what was decided. All else is worked out anew from the model, and has to come to the same step.

A folder of JSON documents that outlives a run: what was found once need not be searched again.

Documents are read by name, written whole or not at all, and hold data alone: nothing that can be run. Any number of
runs may share the folder. One that cannot be read or written is one that is not there.

Decision of a strategy, in a form that processes exchange.

Key of a cached plan: a digest of all that it follows from.

A schedule that was found, in a form that processes exchange and that is kept between runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import autopipe
from autopipe.ir.codec import JsonRecord, read_record, record_text
from autopipe.ir.errors import REFUSALS, AutopipeError, ConfigurationError, InternalError, OutOfMemoryError
from autopipe.ir.placement import Placement
from autopipe.ir.plan import Alternative
from autopipe.ir.plan_file import (
    alternatives_form,
    alternatives_of,
    placement_form,
    placement_of,
    split_proof_form,
    split_proof_of,
)
from autopipe.ir.schedule import Schedule, Task
from autopipe.ir.schedule_file import proof_form, proof_of, repetend_of, repetends_form
from autopipe.passes.annotations import annotated_constraints
from autopipe.passes.atomic_file import replacing
from autopipe.passes.auto.candidates import Candidate
from autopipe.passes.batching import Batching
from autopipe.passes.frontend import Model
from autopipe.passes.pipeline import PlanResult, Request, assemble_plan, place_as, verify_and_simulate
from autopipe.passes.registry import scheduler_class, scheduler_names, strategy_class, strategy_names
from autopipe.passes.runner import Runner

_REFUSALS = {each.__name__: each for each in (*REFUSALS, OutOfMemoryError, InternalError)}


@dataclasses.dataclass(frozen=True, slots=True)
class PlacementDecision:
    """A placement and the division of the batch that it is for."""

    placement: Placement
    batching: Batching


def encode_decision(decided: PlacementDecision) -> dict[str, object]:
    """The decision as lists, dicts and scalars."""
    placement, batching = decided.placement, decided.batching
    return {
        "placement": placement_form(placement),
        "splits": split_proof_form(placement.proof),
        "batch_size": batching.batch_size,
        "micro_batches": batching.micro_batches,
        "sizes": list(batching.sizes),
    }


def decode_decision(record: JsonRecord) -> PlacementDecision:
    """The decision that `encode_decision` gave. Raises ConfigurationError."""
    placement = dataclasses.replace(placement_of(record.at("placement")), proof=split_proof_of(record.at("splits")))
    counts = record.at("batch_size").integer(1), record.at("micro_batches").integer(1)
    return PlacementDecision(placement, Batching(*counts, record.at("sizes").integers()))


def refused_form(error: AutopipeError) -> dict[str, object]:
    """Why there is no placement, as texts."""
    return {"refused": type(error).__name__, "message": error.message, "hint": error.hint, "where": error.where}


def refused_of(record: JsonRecord) -> AutopipeError:
    """The error that `refused_form` told."""
    kind = _REFUSALS.get(record.at("refused").text(), AutopipeError)
    return kind(*(record.at(name).text() for name in ("message", "hint", "where")))


def schedule_form(found: Schedule) -> dict[str, object]:
    """The schedule as lists, dicts and scalars: the orders that differ, and which of them each device follows."""
    orders = {order: index for index, order in enumerate(dict.fromkeys(found.tasks))}
    return {
        "micro_batches": found.micro_batches,
        "orders": [" ".join(map(str, order)) for order in orders],
        "devices": [orders[order] for order in found.tasks],
        "repetends": repetends_form(found.repetends),
        "period": found.period,
        "proof": proof_form(found.proof),
    }


def schedule_of(record: JsonRecord) -> Schedule:
    """The schedule that `schedule_form` gave.

    Raises ConfigurationError, and Python's own errors for tasks that are none.
    """
    orders = [tuple(map(Task.parse, each.text().split())) for each in record.at("orders").items()]
    devices = record.at("devices").integers()
    if max(devices, default=0) >= len(orders):
        record.refuse("an order for each device")
    period = record.at("period")
    return Schedule(
        record.at("micro_batches").integer(1),
        tuple(orders[index] for index in devices),
        tuple(map(repetend_of, record.at("repetends").items())) or None,
        None if period.value is None else period.number(),
        proof_of(record.at("proof")),
    )


FORMAT = "autopipe.answer/1"


def answer_form(found: PlanResult) -> dict[str, object]:
    """Decisions as lists, dicts and scalars. `found.plan.alternatives` has the choice that was best."""
    plan = found.plan
    chosen = min(plan.alternatives, key=lambda each: math.inf if each.step_time_s is None else each.step_time_s)
    batching = Batching(plan.batch_size, plan.summary.micro_batches, found.problem.micro_batch_sizes)
    return {
        "format": FORMAT,
        "graph_digest": plan.graph_digest,
        "chosen": alternatives_form((chosen,)),
        "decided": encode_decision(PlacementDecision(plan.placement, batching)),
        "step_time_s": plan.summary.step_time_s,
        "schedule": schedule_form(plan.schedule),
        "alternatives": alternatives_form(plan.alternatives),
    }


def answer_of(record: JsonRecord, request: Request, runner: Runner) -> PlanResult:
    """The plan that was found for `request`, made again.

    Raises AutopipeError where what is kept cannot be read, or does not give the plan that it is said to; numbers that
    make no sense may raise Python's own errors.
    """
    (chosen,) = alternatives_of(record.at("chosen"))
    decided = decode_decision(record.at("decided"))
    candidate = _candidate_of(chosen)
    settled = candidate.settled(dataclasses.replace(request, batch_size=decided.batching.batch_size))
    placed = place_as(settled, decided.batching, decided.placement, runner)
    if placed.problem.graph.digest() != record.at("graph_digest").text():
        raise ConfigurationError("the graph is not the one that was planned", where=record.file)
    scheduler = request.scheduler or scheduler_class(chosen.choice.schedule or "")()
    scheduled = verify_and_simulate(placed, schedule_of(record.at("schedule")), runner)
    if scheduled.timeline.end != record.at("step_time_s").number():
        raise ConfigurationError("the step is not the one that was planned", where=record.file)
    found = assemble_plan(settled, candidate.strategy, scheduler, placed, scheduled, runner)
    rows = alternatives_of(record.at("alternatives"))
    return dataclasses.replace(found, plan=dataclasses.replace(found.plan, alternatives=rows))


def _candidate_of(chosen: Alternative) -> Candidate:
    choice = chosen.choice
    options = {name: _option(value) for name, value in choice.options}
    try:
        strategy = strategy_class(choice.strategy)(**options)
    except TypeError as error:
        raise ConfigurationError(f"{choice.strategy} has no such options: {error}") from error
    return Candidate(strategy, choice.micro_batches, choice.recompute, choice.shard)


def _option(text: str) -> object:
    """The value that an option of a choice spells: JSON's spelling, or a text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


_NOT_ASKED = ("model", "time_limit")
"""Fields of a request that do not decide what is best: where the model's file lies, and how long one waits."""


def answer_key(request: Request, model: Model) -> str:
    """SHA-256 of a request for the best plan of a model, as its file is read without a batch, and of the code."""
    digest = hashlib.sha256()
    fields = (field.name for field in dataclasses.fields(request) if field.name not in _NOT_ASKED)
    parts = (
        code_digest(),
        strategy_names(),
        scheduler_names(),
        model.graph.digest(),
        model.batch,
        model.mode,
        model.loss,
        annotated_constraints(model, request.cluster.size),
        *((name, getattr(request, name)) for name in fields),
    )
    for part in parts:
        digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest()


@functools.cache
def code_digest() -> str:
    """SHA-256 of autopipe's sources: what other code found may be worse, or wrong."""
    digest = hashlib.sha256()
    root = Path(autopipe.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


_MOST_BYTES = 256 * 2**20
"""Bytes of all documents together, of which those that were used last stay."""


def cache_folder() -> Path | None:
    """`$AUTOPIPE_CACHE`, else `autopipe` where the user's caches are; None where there is no such place."""
    named = os.environ.get("AUTOPIPE_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(home) / "autopipe" if home else Path.home() / ".cache" / "autopipe"
    except RuntimeError:  # There is no home.
        return None


def answers() -> Store | None:
    """The answers of earlier runs; None where there is no place for them."""
    folder = cache_folder()
    return None if folder is None else Store(folder / "answers")


@dataclass(frozen=True, slots=True)
class Store:
    """The documents of one folder, which is made where it is needed."""

    folder: Path
    most_bytes: int = _MOST_BYTES

    def read(self, name: str, form: str) -> JsonRecord | None:
        """The document called `name`, whose `format` is `form`; None where there is none that can be read."""
        path = self._path(name)
        try:
            record = read_record(path, form)
        except ConfigurationError:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # It was used last.
        return record

    def write(self, name: str, document: dict[str, object]) -> None:
        """Keep a document, and drop those that were not used for longest where there are too many."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._path(name)) as file:
                file.write(record_text(document).encode())
            self._make_room()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _make_room(self) -> None:
        """Another run may remove the same documents meanwhile."""
        found = []
        for path in self.folder.glob("*.json"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        used = 0
        for _, size, path in sorted(found, key=lambda each: each[0], reverse=True):
            used += size
            if used > self.most_bytes:
                path.unlink(missing_ok=True)
