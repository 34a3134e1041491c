"""`autopipe bench tepdist`: the experiments of Alibaba PAI, "TePDist" (2023)."""

from __future__ import annotations

from autopipe.cli.bench.row import Case
from autopipe.cli.bench.tepdist.scaling import scalings
from autopipe.cli.bench.tepdist.search_times import search_times
from autopipe.cli.bench.tepdist.weak_scaling import weak_scalings


def cases() -> list[Case]:
    """All parts, in the paper's order."""
    return [*scalings(), *weak_scalings(), *search_times()]
