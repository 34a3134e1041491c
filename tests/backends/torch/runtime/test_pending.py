"""Messages under way are waited for once, and what is sent stays as it is until it is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from autopipe.backends.torch.runtime.pending import Arrival, Departure


@dataclass
class CountingWork:
    """A work handle that, like gloo's, must be waited for once only."""

    waits: int = 0
    completed: bool = False

    def wait(self) -> None:
        self.waits += 1
        self.completed = True

    def is_completed(self) -> bool:
        return self.completed


def test_what_arrives_is_waited_for_once() -> None:
    work, buffer = CountingWork(), torch.ones(2)
    arrival = Arrival(cast(Any, work), buffer, torch.device("cpu"))
    assert arrival.wait() is buffer
    assert arrival.wait() is buffer
    assert work.waits == 1


def test_what_leaves_is_held_until_it_is_gone() -> None:
    work = CountingWork()
    departure = Departure(cast(Any, work), torch.ones(2))
    assert not departure.is_gone()
    departure.wait()
    departure.wait()
    assert departure.is_gone()
    assert work.waits == 1
