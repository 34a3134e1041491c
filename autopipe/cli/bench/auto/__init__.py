"""`autopipe bench auto`: what other systems' papers show, chosen without a strategy or a schedule being named."""

from __future__ import annotations

from autopipe.cli.bench.auto.headlines import headlines
from autopipe.cli.bench.row import Case


def cases() -> list[Case]:
    """One case a model and number of devices."""
    return headlines()
