"""Which ways to a placement are tried: every strategy, the cheap ones first, in the forms that schedules ask for."""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.passes.auto.candidate import Candidate
from autopipe.passes.registry import STRATEGIES, strategy_class, strategy_names
from autopipe.passes.request import Request

_Form = tuple[str, tuple[tuple[str, object], ...]]
"""A strategy and its options."""

_FORMS: tuple[_Form, ...] = (
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

_WITH_AND_WITHOUT = ("tepdist",)
"""Strategies that weigh what recomputes against what does not: one search where memory asks for it, instead of two."""

_FOLLOWERS = ("given", "manual")
"""Strategies that follow what somebody writes; of them, constraints make manual a candidate."""


def candidates(request: Request, short: bool = False) -> Iterator[Candidate]:
    """The candidates for a request, those of other packages' strategies last.

    `short` says whether there may be less memory than a step wants, and recomputation may help.
    """
    for name, options in _forms(request):
        recompute = "auto" if short and name in _WITH_AND_WITHOUT else "none"
        yield Candidate(strategy_class(name)(**dict(options)), recompute=recompute)


def strategies_of(request: Request) -> tuple[str, ...]:
    """The names of the candidates' strategies, each once; our own need not be loaded for that."""
    names = dict.fromkeys(name for name, _ in _forms(request))
    return tuple(name if name in STRATEGIES else strategy_class(name).name for name in names)


def _forms(request: Request) -> Iterator[_Form]:
    known = strategy_names()
    forms = [form for form in _FORMS if form[0] in known]
    others: list[_Form] = [(name, ()) for name in known if name not in {each for each, _ in forms}]
    for form in (*forms, *others):
        if form[0] not in _FOLLOWERS or (form[0] == "manual" and request.constraints):
            yield form
