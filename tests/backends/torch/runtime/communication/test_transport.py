"""Messages under way are waited for once, and what is sent stays as it is until it is gone."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from autopipe.backends.torch.runtime.communication.transport import (
    PendingRecv,
    PendingSend,
    SendQueue,
)


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
    work = CountingWork()
    buffer = torch.ones(2)
    arrival = PendingRecv(cast(Any, work), buffer, torch.device("cpu"))
    assert arrival.wait() is buffer
    assert arrival.wait() is buffer
    assert work.waits == 1


def test_what_leaves_is_held_until_it_is_gone() -> None:
    work = CountingWork()
    departure = PendingSend(cast(Any, work), torch.ones(2))
    assert not departure.has_been_sent()
    departure.wait()
    departure.wait()
    assert departure.has_been_sent()
    assert work.waits == 1


@dataclass
class GlooWork:
    """A handle of gloo's: who does not wait for it never learns that the message is gone."""

    sent: threading.Event
    fails: bool = False

    def wait(self) -> None:
        assert self.sent.wait(60)
        if self.fails:
            raise RuntimeError("Connection closed by peer")

    def is_completed(self) -> bool:
        return False


def test_a_message_is_let_go_as_soon_as_it_is_gone() -> None:
    departures = SendQueue(watched=True, most_bytes=0)
    sent = [threading.Event() for _ in range(3)]
    tensors = [torch.ones(4) for _ in sent]
    held = [weakref.ref(each) for each in tensors]
    for tensor, event in zip(tensors, sent, strict=True):
        departures.add(PendingSend(cast(Any, GlooWork(event)), tensor))
    del tensors, tensor
    sent[0].set()
    deadline = time.monotonic() + 60
    while held[0]() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [each() is None for each in held] == [True, False, False]
    sent[1].set()
    sent[2].set()
    departures.finish()
    departures.close()
    assert [each() is None for each in held] == [True, True, True]


def test_small_messages_are_held_up_to_so_many_bytes() -> None:
    departures = SendQueue(watched=True, most_bytes=2 * torch.ones(4).nbytes)
    sent = [threading.Event() for _ in "123"]
    tensors = [torch.ones(4) for _ in sent]
    held = [weakref.ref(each) for each in tensors]
    for event in sent:
        event.set()
    departures.add(PendingSend(cast(Any, GlooWork(sent[0])), tensors[0]))
    departures.add(PendingSend(cast(Any, GlooWork(sent[1])), tensors[1]))
    assert "departures" not in {thread.name for thread in threading.enumerate()}
    departures.add(PendingSend(cast(Any, GlooWork(sent[2])), tensors[2]))
    tensors.clear()
    deadline = time.monotonic() + 60
    while held[0]() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [each() is None for each in held] == [True, False, False]
    departures.finish()
    departures.close()
    assert [each() is None for each in held] == [True, True, True]


@pytest.mark.parametrize("most_bytes", [0, 2**20])
def test_a_message_that_cannot_be_sent_ends_the_step(most_bytes: int) -> None:
    departures = SendQueue(watched=True, most_bytes=most_bytes)
    sent = threading.Event()
    departures.add(PendingSend(cast(Any, GlooWork(sent, fails=True)), torch.ones(1)))
    sent.set()
    with pytest.raises(RuntimeError, match="closed by peer"):
        departures.finish()
    if not most_bytes:
        with pytest.raises(RuntimeError, match="closed by peer"):
            departures.add(PendingSend(cast(Any, GlooWork(sent)), torch.ones(1)))
    departures.close()


def test_where_handles_tell_they_are_asked_without_waiting() -> None:
    departures = SendQueue(watched=False)
    works = [CountingWork(completed=True), CountingWork()]
    for work in works:
        departures.add(PendingSend(cast(Any, work), torch.ones(1)))
    assert [work.waits for work in works] == [0, 0]
    departures.finish()
    assert [work.waits for work in works] == [0, 1]
