"""Figure 9: what stages beside one another bring, and what larger micro-batches bring on top."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopipe.cli.bench.graphpipe.models import PAPER
from autopipe.cli.bench.graphpipe.planned import AS_PUBLISHED, decision, step_of
from autopipe.cli.bench.graphpipe.published import BATCH, FULL_SPEEDUP, MODELS, PARALLEL_SPEEDUP
from autopipe.cli.bench.row import Case, Row

_DEVICES = 32
_RIVALS = ("pipedream", "pipedream" + AS_PUBLISHED)


def ablations() -> list[Case]:
    """One case a model, then one for the least and most of all."""
    cases = [Case(f"{model}/p={_DEVICES}", "Figure 9", partial(_rows, model)) for model in MODELS]
    return [*cases, Case(f"all/p={_DEVICES}", "Figure 9", _range)]


def _rows(model: str) -> Iterator[Row]:
    for rival in _RIVALS:
        for what, gain, note in _gains(model, rival):
            yield Row(f"{model}/p={_DEVICES}", "speedup", None, gain, "times", f"{what} over {rival}", note)


def _range() -> Iterator[Row]:
    published = {"parallel stages alone": PARALLEL_SPEEDUP, "with larger micro-batches": FULL_SPEEDUP}
    for rival in _RIVALS:
        for what, (least, most) in published.items():
            found = [gain for model in MODELS for name, gain, _ in _gains(model, rival) if name == what and gain]
            for theirs, ours, which in ((least, min(found), "least"), (most, max(found), "most")):
                note = f"{which} of {', '.join(MODELS)}"
                yield Row(f"all/p={_DEVICES}", "speedup", theirs, ours, "times", f"{what} over {rival}", note)


def _gains(model: str, rival: str) -> Iterator[tuple[str, float | None, str]]:
    """Each step of the ablation, its gain over the sequential pipeline, and what it is."""
    batch = BATCH[model][-1]
    base = step_of(rival, model, _DEVICES, batch)
    if isinstance(base, str):
        yield "graphpipe", None, base
        return
    for what, size in (("parallel stages alone", base.micro_batch_size), ("with larger micro-batches", None)):
        step = step_of("graphpipe", model, _DEVICES, batch, PAPER, size)
        if isinstance(step, str):
            yield what, None, step
        else:
            yield what, step.throughput / base.throughput, f"{decision(step)}; against {decision(base)}"
