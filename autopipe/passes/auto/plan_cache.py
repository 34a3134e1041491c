"""The cache of results of strategy `auto`, so that an equal request is not searched again.

A cached result contains only decisions: strategy, placement and schedule. The rest of the plan is
computed again from the model, and its step time must equal the cached step time. Results are JSON
files in a folder that several runs may share. A file is named by a digest of all inputs of the
search. A file that cannot be read or written is ignored. The processes of a search exchange
placements and schedules in this format too.
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
from typing import Annotated, Any

from autopipe.ir.codec import Count, CustomCodec, Index, Inline, Record, decode, encode
from autopipe.ir.errors import (
    CANDIDATE_ERRORS,
    AutopipeError,
    ConfigurationError,
    InternalError,
    OutOfMemoryError,
)
from autopipe.ir.files import JsonRecord, document_text, read_json_record
from autopipe.ir.output_files import open_replacement_file
from autopipe.ir.output_kinds import is_autopipe_document
from autopipe.ir.placement import Placement, SplitProof
from autopipe.ir.plan import Alternative
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Proof, Repetends, Schedule, Task
from autopipe.passes.annotations import annotated_constraints
from autopipe.passes.auto.candidates import Candidate
from autopipe.passes.batching import Batching
from autopipe.passes.frontend import Model
from autopipe.passes.pipeline import (
    PlanResult,
    Request,
    Runner,
    add_other_loss_form,
    assemble_plan,
    predict_given_placement,
    simulate_schedule,
)
from autopipe.passes.registry import (
    scheduler_class,
    scheduler_names,
    strategy_class,
    strategy_names,
)

FORMAT = "autopipe.answer/1"
_REFUSALS = {each.__name__: each for each in (*CANDIDATE_ERRORS, OutOfMemoryError, InternalError)}


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """A placement, its division of the batch into micro-batches, and the proof of its splits (their
    cost and a lower bound on it). The encoding of a placement does not contain the proof.
    """

    placement: Placement
    batching: Annotated[Batching, Inline()]
    splits: SplitProof | None

    @staticmethod
    def of(placement: Placement, problem: Problem) -> PlacementDecision:
        """Return the decision for a placement of `problem`."""
        batching = Batching(problem.batch_size, problem.micro_batches, problem.micro_batch_sizes)
        return PlacementDecision(placement, batching, placement.proof)

    @property
    def placement_with_proof(self) -> Placement:
        """The placement with the proof of its splits."""
        return dataclasses.replace(self.placement, proof=self.splits)


def encode_error(error: AutopipeError) -> dict[str, object]:
    """Return an error as a dict of texts, which `decode_error` reads."""
    return {
        "refused": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "where": error.where,
    }


def decode_error(record: JsonRecord) -> AutopipeError:
    """Return the error that `encode_error` encoded."""
    kind = _REFUSALS.get(record.get("refused", str), AutopipeError)
    return kind(*(record.get(name, str) for name in ("message", "hint", "where")))


def encode_schedule(found: Schedule) -> dict[str, Any]:
    """Return a schedule as lists, dicts and scalars, which `decode_schedule` reads."""
    orders = {order: index for index, order in enumerate(dict.fromkeys(found.tasks))}
    texts = tuple(" ".join(map(str, order)) for order in orders)
    devices = tuple(orders[order] for order in found.tasks)
    return encode(
        _EncodedSchedule(
            found.micro_batches, texts, devices, found.repetends or (), found.period, found.proof
        )
    )


def decode_schedule(record: Record) -> Schedule:
    """Return the schedule that `encode_schedule` encoded. Raise ConfigurationError for an invalid
    record, and ValueError or LookupError for invalid tasks.
    """
    found: _EncodedSchedule = decode(record, _EncodedSchedule)
    orders = [tuple(map(Task.parse, each.split())) for each in found.orders]
    if max(found.devices, default=0) >= len(orders):
        record.reject("an order for each device")
    tasks = tuple(orders[index] for index in found.devices)
    return Schedule(found.micro_batches, tasks, found.repetends or None, found.period, found.proof)


@dataclass(frozen=True, slots=True)
class _EncodedSchedule:
    """The encoding of a schedule. `orders` contains the distinct orders of tasks as texts, and
    `devices` the index of the order of each device.
    """

    micro_batches: Count
    orders: tuple[str, ...]
    devices: tuple[Index, ...]
    repetends: Repetends
    period: float | None
    proof: Proof | None


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """The cached result of a search: the decisions of the best plan. `chosen` is the best of
    `alternatives`.
    """

    graph_digest: str
    chosen: Alternative
    decided: PlacementDecision
    step_time_s: float
    schedule: Annotated[Schedule, CustomCodec(encode_schedule, decode_schedule)]
    alternatives: tuple[Alternative, ...]


def encode_result(found: PlanResult) -> dict[str, Any]:
    """Return the cache entry for a result of `auto`, as lists, dicts and scalars."""
    plan = found.plan
    chosen = min(
        plan.alternatives,
        key=lambda each: math.inf if each.step_time_s is None else each.step_time_s,
    )
    decided = PlacementDecision.of(plan.placement, found.problem)
    answer = CachedPlan(
        plan.graph_digest,
        chosen,
        decided,
        plan.summary.step_time_s,
        plan.schedule,
        plan.alternatives,
    )
    return {"format": FORMAT, **encode(answer)}


def decode_result(record: JsonRecord, request: Request, runner: Runner) -> PlanResult:
    """Return the plan for `request` that follows from a cache entry.

    Raise AutopipeError if the entry is invalid, or if the graph or the step time of the plan
    differs from the stored one. Invalid numbers may raise ArithmeticError, LookupError, TypeError
    or ValueError.
    """
    kept: CachedPlan = decode(record, CachedPlan)
    candidate = _decode_candidate(kept.chosen)
    settled = candidate.apply_to(
        dataclasses.replace(request, batch_size=kept.decided.batching.batch_size)
    )
    placed = predict_given_placement(
        settled, kept.decided.batching, kept.decided.placement_with_proof, runner
    )
    if placed.problem.graph.digest() != kept.graph_digest:
        raise ConfigurationError("the cached plan is for another graph", where=record.file)
    named = dataclasses.replace(
        settled, scheduler=request.scheduler or scheduler_class(kept.chosen.choice.schedule or "")()
    )
    kept.schedule.verify(placed.graph, placed.problem.train)
    scheduled = simulate_schedule(placed, kept.schedule, runner)
    if scheduled.timeline.end != kept.step_time_s:
        raise ConfigurationError("the cached plan has another step time", where=record.file)
    found = assemble_plan(named, placed, scheduled, runner)
    return add_alternatives(found, kept.alternatives)


def add_alternatives(found: PlanResult, alternatives: tuple[Alternative, ...]) -> PlanResult:
    """Return the plan with a list of its alternatives, and with the best step of an alternative
    that uses the other form of the losses (saved or recomputed logits).
    """
    scores = found.plan.summary.scores
    others = [
        each
        for each in alternatives
        if scores is not None and each.choice.scores not in (None, scores.choice)
    ]
    steps = [each.step_time_s for each in others if each.step_time_s is not None]
    refused = next((each.refused for each in others if each.refused is not None), None)
    found = add_other_loss_form(found, min(steps, default=None), None if steps else refused)
    return dataclasses.replace(
        found, plan=dataclasses.replace(found.plan, alternatives=alternatives)
    )


def _decode_candidate(chosen: Alternative) -> Candidate:
    """Return the candidate with the settings of an alternative. Raise ConfigurationError for an
    option that the strategy does not support.
    """
    choice = chosen.choice
    options = dict[str, object](chosen.choice.options)
    for name, text in choice.options:
        # Options are stored as JSON, except for texts. An option that is not valid JSON is
        # therefore used as text.
        with contextlib.suppress(ValueError):
            options[name] = json.loads(text)
    try:
        strategy = strategy_class(choice.strategy)(**options)
    except TypeError as error:
        raise ConfigurationError(
            f"strategy {choice.strategy} does not support an option of the cached plan: {error}"
        ) from error
    return Candidate(strategy, choice.micro_batches, choice.recompute, choice.shard, choice.scores)


def cache_key(request: Request, model: Model) -> str:
    """Return the SHA-256, in hexadecimal, of the inputs of a search: the request, the model's
    graph, and the source code of autopipe.

    The path of the model, the time limit, the data, the evaluation and the learning-rate scheduler
    do not affect the best plan, and are not included.
    """
    digest = hashlib.sha256()
    fields = (
        field.name
        for field in dataclasses.fields(request)
        if field.name not in ("model", "time_limit", "data", "evaluation", "lr_scheduler")
    )
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
    """Return the SHA-256, in hexadecimal, of autopipe's source code. It makes sure that results of
    another version are not used.
    """
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cache_folder() -> Path | None:
    """Return the cache folder: `$AUTOPIPE_CACHE` if it is set, otherwise the folder `autopipe` in
    the user's cache folder; None if the user has no home folder.
    """
    if named := os.environ.get("AUTOPIPE_CACHE"):
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(home) / "autopipe" if home else Path.home() / ".cache" / "autopipe"
    # `Path.home` raises RuntimeError if the user is without a home folder. No plan is cached then.
    except RuntimeError:
        return None


def open_plan_cache() -> JsonStore | None:
    """Return the cache of results of `auto`; None if there is no cache folder."""
    folder = cache_folder()
    return None if folder is None else JsonStore(folder / "answers")


@dataclass(frozen=True, slots=True)
class JsonStore:
    """A folder of JSON documents, which is created at the first write."""

    folder: Path
    most_bytes: int = 256 * 2**20
    """Maximum total bytes of the documents. If they exceed it, the least recently used documents
    are deleted first.
    """

    def read(self, name: str, form: str) -> JsonRecord | None:
        """Return the document `name` if its key `format` has the value `form`; None if it does not
        exist or is invalid.
        """
        path = self.folder / f"{name}.json"
        try:
            record = read_json_record(path, form)
        except ConfigurationError:
            return None
        with contextlib.suppress(OSError):
            # Set the modification time to the time of this use, because `write` deletes the
            # documents with the oldest modification times first.
            os.utime(path)
        return record

    def write(self, name: str, document: dict[str, object]) -> None:
        """Write `document` under `name`. Then delete the least recently used documents until at
        most `most_bytes` remain. Errors of the file system are ignored.
        """
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open_replacement_file(self.folder / f"{name}.json") as file:
                file.write(document_text(document).encode())
            found = []
            for path in self.folder.glob("*.json"):
                # Another run may delete the file between these calls, so the file is skipped if it
                # cannot be read.
                with contextlib.suppress(OSError):
                    if not is_autopipe_document(path):
                        continue
                    status = path.stat()
                    found.append((status.st_mtime, status.st_size, path))
            used = 0
            for _, size, path in sorted(found, key=lambda each: each[0], reverse=True):
                used += size
                if used > self.most_bytes:
                    path.unlink(missing_ok=True)
