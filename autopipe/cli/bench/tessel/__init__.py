"""`autopipe bench tessel`: the tables and figures of Lin et al., "Tessel" (HPCA 2024), section VI."""

from __future__ import annotations

from autopipe.cli.bench.row import Case
from autopipe.cli.bench.tessel.bubble_rates import bubble_rates
from autopipe.cli.bench.tessel.imbalance import imbalance
from autopipe.cli.bench.tessel.inference import inference
from autopipe.cli.bench.tessel.memory import bubble_by_memory
from autopipe.cli.bench.tessel.search_times import search_times
from autopipe.cli.bench.tessel.time_optimal import time_optimal
from autopipe.cli.bench.tessel.training import training
from autopipe.cli.bench.tessel.units_in_flight import bubble_by_units


def cases() -> list[Case]:
    """All parts, in the paper's order but for Table II, which comes first."""
    blocks = [*bubble_rates(), *search_times(), *time_optimal(), *bubble_by_units(), *bubble_by_memory()]
    return [*blocks, *imbalance(), *training(), *inference()]
