"""Decision of a strategy, in a form that processes exchange."""

from __future__ import annotations

import dataclasses

from autopipe.ir.codec import JsonRecord
from autopipe.ir.errors import REFUSALS, AutopipeError, InternalError, OutOfMemoryError
from autopipe.ir.placement import Placement
from autopipe.ir.plan_file import placement_form, placement_of, split_proof_form, split_proof_of
from autopipe.passes.batching import Batching

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
