"""Key of a cached plan: a digest of all that it follows from."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path

import autopipe
from autopipe.passes.annotations import annotated_constraints
from autopipe.passes.frontend import Model
from autopipe.passes.registry import scheduler_names, strategy_names
from autopipe.passes.request import Request

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
