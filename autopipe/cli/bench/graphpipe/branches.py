"""Figure 7: throughput by number of branches, and by micro-batches of a fixed size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopipe.cli.bench.graphpipe.models import PAPER
from autopipe.cli.bench.graphpipe.planned import AS_PUBLISHED, best_pipedream, decision, step_of
from autopipe.cli.bench.graphpipe.published import BATCH, BRANCHES_SPEEDUP, DEVICES
from autopipe.cli.bench.graphpipe.throughput import ASSUMPTIONS
from autopipe.cli.bench.row import Case, Row

BRANCHES = (2, 4, 8, 16)
_DEVICES = (4, 8, 16)
_VARIANT = "graphpipe over pipedream"
SIZES = (1, 2, 4, 8, 16)


def by_branches() -> list[Case]:
    """CANDLE-Uno on 4, 8 and 16 devices, a case a number of branches."""
    return [Case(f"candle-uno-{count}/branches", "Figure 7", partial(_rows, count)) for count in BRANCHES]


def by_micro_batch() -> list[Case]:
    """MMT on 8 devices, a case a size of micro-batches."""
    return [Case(f"mmt/p=8/b={size}", "Figure 7", partial(_fixed, size)) for size in SIZES]


def _rows(branches: int) -> Iterator[Row]:
    gains: list[float] = []
    for devices in _DEVICES:
        case, batch = f"candle-uno-{branches}/p={devices}", BATCH["candle-uno"][DEVICES.index(devices)]
        settings = (*PAPER, ("branches", branches))
        ours = step_of("graphpipe", "candle-uno", devices, batch, settings)
        rival = best_pipedream("candle-uno", devices, batch, settings)
        if isinstance(ours, str) or isinstance(rival, str):
            note = ours if isinstance(ours, str) else str(rival)
            yield Row(case, "speedup", None, None, "times", _VARIANT, note)
            continue
        gains.append(ours.throughput / rival.throughput)
        note = f"{decision(ours)}; against {decision(rival)}"
        yield Row(case, "speedup", None, gains[-1], "times", _VARIANT, note)
    theirs, note = BRANCHES_SPEEDUP.get(branches), f"up to, on 4 to 16 devices; {ASSUMPTIONS}"
    yield Row(f"candle-uno-{branches}/branches", "speedup", theirs, max(gains, default=None), "times", _VARIANT, note)


def _fixed(size: int) -> Iterator[Row]:
    case, devices = f"mmt/p=8/b={size}", 8
    batch = BATCH["mmt"][DEVICES.index(devices)]
    for strategy in ("graphpipe", "pipedream", "pipedream" + AS_PUBLISHED):
        step = step_of(strategy, "mmt", devices, batch, PAPER, size)
        if isinstance(step, str):
            yield Row(case, "throughput", None, None, "samples/s", strategy, step)
        else:
            yield Row(case, "throughput", None, step.throughput, "samples/s", strategy, decision(step))
