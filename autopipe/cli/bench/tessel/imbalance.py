"""Figure 2: what a large embedding does to the balance of 1F1B's placement."""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.cli.bench.row import Case, Row
from autopipe.cli.bench.tessel.chain import device_seconds, with_tables_apart
from autopipe.cli.bench.tessel.published import FIGURE_2_IMBALANCE
from autopipe.cli.bench.tessel.v100 import problem_on_v100
from autopipe.configs.zoo.settings import Setting

_DEVICES = 4
_TABLE_DEVICES = 2
_LAYERS = (24, 32, 40)
_PUBLISHED_AT = 40


def imbalance() -> list[Case]:
    """One case: a GPT of more and more layers."""
    return [Case(f"gpt-tessel-figure-2/p={_DEVICES}", "Figure 2", _rows)]


def _rows() -> Iterator[Row]:
    for layers in _LAYERS:
        settings: dict[str, Setting] = {"size": "tessel-figure-2", "layers": layers, "loss": True}
        problem = problem_on_v100("gpt", settings, _DEVICES, batch_size=128, micro_batch_size=1)
        placement = with_tables_apart(problem, _TABLE_DEVICES, shares=0)
        seconds = device_seconds(problem, placement)
        yield Row(
            f"gpt-tessel-figure-2/p={_DEVICES}",
            "imbalance",
            FIGURE_2_IMBALANCE if layers == _PUBLISHED_AT else None,
            max(seconds) / min(seconds),
            "slowest / fastest device",
            f"1f1b, layers={layers}",
            f"roofline: table and tied head on {_TABLE_DEVICES} of {_DEVICES} devices, layers on the others, "
            "2048 tokens, one sample a micro-batch, layers recomputed; memory not asked",
        )
