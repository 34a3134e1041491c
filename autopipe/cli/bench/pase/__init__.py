"""`autopipe bench pase`: the tables and figures of Elango, "PaSE" (IPDPS 2021), section IV."""

from __future__ import annotations

from autopipe.cli.bench.pase.methods import methods
from autopipe.cli.bench.pase.overlap import overlapped
from autopipe.cli.bench.pase.search_times import search_times
from autopipe.cli.bench.pase.speedups import speedups
from autopipe.cli.bench.pase.strategies import strategies
from autopipe.cli.bench.row import Case


def cases() -> list[Case]:
    """All parts, in the paper's order, and the methods on the tables of Table I after it."""
    return [*search_times(), *methods(), *strategies(), *speedups(), *overlapped()]
