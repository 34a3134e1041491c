"""Which ways to a placement are tried: every strategy, the cheap ones first, in the forms that schedules ask for."""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.passes.auto.candidate import Candidate
from autopipe.passes.registry import strategy_class, strategy_names
from autopipe.passes.request import Request

_FORMS: tuple[tuple[str, tuple[tuple[str, object], ...]], ...] = (
    ("manual", ()),
    ("data_parallel", ()),
    ("expert", ()),
    ("one_weird_trick", ()),
    ("pase", ()),
    ("grid", ()),
    ("pipedream", ()),
    ("tessel_shapes", ()),
    ("tessel_shapes", (("shape", "v"),)),
    ("tessel_shapes", (("shape", "x"),)),
    ("tessel_shapes", (("shape", "m"),)),
    ("tessel_shapes", (("shape", "nn"),)),
    ("tessel_shapes", (("shape", "k"),)),
    ("tessel_shapes", (("shape", "v"), ("chunks", 2))),
    ("tessel_shapes", (("shape", "v"), ("chunks", 2), ("wave", True))),
    ("graphpipe", ()),
    ("grid", (("chunks", 2),)),
    ("grid", (("chunks", 2), ("wave", True))),
    ("graphpipe", (("per_stage_micro_batch", True),)),
    ("graphpipe", (("intra", "pase"),)),
    ("pipedream", (("sweep", True),)),
    ("tepdist", ()),
    ("piper", ()),
    ("breadth_first", ()),
    ("mcmc", ()),
)
"""Strategies and options in the order in which they are tried: about that of the time they take, so that there is a
plan soon. X, chunks and waves are what Chimera, interleaved 1F1B and the zero-bubble V schedules run on."""

_FOLLOWERS = ("given", "manual")
"""Strategies that follow what somebody writes; of them, constraints make manual a candidate."""


def candidates(request: Request) -> Iterator[Candidate]:
    """The candidates for a request, those of other packages' strategies last."""
    known = strategy_names()
    forms = [form for form in _FORMS if form[0] in known]
    others = [(name, ()) for name in known if name not in {each for each, _ in forms}]
    for name, options in (*forms, *others):
        if name not in _FOLLOWERS or (name == "manual" and request.constraints):
            yield Candidate(strategy_class(name)(**dict(options)))
