"""`autopipe bench graphpipe`: the tables and figures of Jeon et al., "GraphPipe" (ASPLOS 2025)."""

from __future__ import annotations

from autopipe.cli.bench.graphpipe.ablation import ablations
from autopipe.cli.bench.graphpipe.branches import by_branches, by_micro_batch
from autopipe.cli.bench.graphpipe.case_study import case_study
from autopipe.cli.bench.graphpipe.in_flight import in_flight
from autopipe.cli.bench.graphpipe.search_times import search_times
from autopipe.cli.bench.graphpipe.sequential_model import sequential_model
from autopipe.cli.bench.graphpipe.throughput import throughputs
from autopipe.cli.bench.row import Case


def cases() -> list[Case]:
    """All parts, in the paper's order."""
    return [
        *in_flight(),
        *throughputs(),
        *search_times(),
        *by_branches(),
        *by_micro_batch(),
        *ablations(),
        *case_study(),
        *sequential_model(),
    ]
