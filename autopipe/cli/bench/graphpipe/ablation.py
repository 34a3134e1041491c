"""Figure 9: what stages beside one another bring, and what larger micro-batches bring on top."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopipe.cli.bench.graphpipe.models import PAPER
from autopipe.cli.bench.graphpipe.planned import best_pipedream, decision, step_of
from autopipe.cli.bench.graphpipe.published import BATCH, FULL_SPEEDUP, MODELS, PARALLEL_SPEEDUP
from autopipe.cli.bench.row import Case, Row

_DEVICES = 32
_PARALLEL, _FULL = "parallel stages alone", "with micro-batches of its own"


def ablations() -> list[Case]:
    """One case a model, then one for the least and most of all."""
    cases = [Case(f"{model}/p={_DEVICES}", "Figure 9", partial(_rows, model)) for model in MODELS]
    return [*cases, Case(f"all/p={_DEVICES}", "Figure 9", _range)]


def _rows(model: str) -> Iterator[Row]:
    for what, gain, note in _gains(model):
        yield Row(f"{model}/p={_DEVICES}", "speedup", None, gain, "times", what, note)


def _range() -> Iterator[Row]:
    for what, (least, most) in {_PARALLEL: PARALLEL_SPEEDUP, _FULL: FULL_SPEEDUP}.items():
        found = [gain for model in MODELS for name, gain, _ in _gains(model) if name == what and gain]
        for theirs, ours, which in ((least, min(found), "least"), (most, max(found), "most")):
            note = f"{which} of {', '.join(MODELS)}"
            yield Row(f"all/p={_DEVICES}", "speedup", theirs, ours, "times", f"{what}, {which}", note)


def _gains(model: str) -> Iterator[tuple[str, float | None, str]]:
    """Each step of the ablation, its gain over the sequential pipeline, and what it is."""
    batch = BATCH[model][-1]
    base = best_pipedream(model, _DEVICES, batch)
    if isinstance(base, str):
        yield _FULL, None, base
        return
    for what, size in ((_PARALLEL, base.micro_batch_size), (_FULL, None)):
        step = step_of("graphpipe", model, _DEVICES, batch, PAPER, size)
        if isinstance(step, str):
            yield what, None, step
        else:
            yield what, step.throughput / base.throughput, f"{decision(step)}; against {decision(base)}"
