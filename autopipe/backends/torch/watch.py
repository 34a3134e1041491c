"""Which of a node's ranks hangs: told from their pulses, by no more than looking at them.

A rank that waits for others is not to blame, however long it waits. One is that does not get on with something of its
own (an endless loop, a call that never returns), or gives no sign of life at all (stopped, or stuck while it holds
Python's lock), or never began. Where all wait for one another, the one that has waited longest is named.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autopipe.backends.torch.runtime.pulse import ENDED, HeartbeatRecord, Timeouts, heartbeat_file, read_heartbeat

_LOOKS_S = 0.25
_ABSENCE_S = 5.0
"""A watcher that has not looked for so long was stopped itself, and the ranks perhaps with it."""


@dataclass(frozen=True, slots=True)
class HungRank:
    """A rank that has hung in a task for `seconds`."""

    rank: int
    task: str
    """Empty where the rank has not even begun."""
    seconds: float
    waits: bool = False
    """For others, as they all do."""

    def message(self) -> str:
        """In one line."""
        where = f"task {self.task}" if self.task[:1].isdigit() else f"its {self.task or 'start'}"
        if self.waits:
            return f"rank {self.rank} waits in {where} for {self.seconds:.0f} s, and so do all others"
        return f"rank {self.rank} hangs in {where} for {self.seconds:.0f} s"


def find_hung_rank(
    beats: Mapping[int, HeartbeatRecord | None], began: float, now: float, timeouts: Timeouts, nodes: int
) -> HungRank | None:
    """The rank that hangs, of those that began at `began`, by rank; of several the one that has done so longest.

    Where other nodes have ranks too, all of this one's may wait twice as long, for theirs to be found there.
    """
    running = {rank: beat for rank, beat in beats.items() if beat is None or beat.task != ENDED}
    found = []
    for rank, beat in running.items():
        if beat is None:
            hang, limit = HungRank(rank, "", now - began), timeouts.start_s
        else:
            last = beat.at if beat.waits else min(beat.at, beat.since)
            hang, limit = HungRank(rank, beat.task, now - last), timeouts.of(beat.task)
        if hang.seconds > limit:
            found.append(hang)
    if not found:
        found = _all_waiting(running, now, timeouts, nodes)
    return max(found, key=lambda hang: hang.seconds, default=None)


def _all_waiting(
    running: Mapping[int, HeartbeatRecord | None], now: float, timeouts: Timeouts, nodes: int
) -> list[HungRank]:
    """All ranks, where each of them waits and has done so for too long."""
    patience = 1 if nodes == 1 else 2
    found = []
    for rank, beat in running.items():
        if beat is None or not beat.waits or now - beat.since <= patience * timeouts.of(beat.task):
            return []
        found.append(HungRank(rank, beat.task, now - beat.since, waits=True))
    return found


@dataclass(slots=True)
class Watchdog:
    """Looks at the pulses of ranks, from when they were started."""

    folder: Path
    ranks: tuple[int, ...]
    timeouts: Timeouts
    nodes: int
    _began: float = field(default_factory=time.monotonic)
    _looked: float = field(default_factory=time.monotonic)

    def look(self) -> HungRank | None:
        """The rank that hangs, if one does."""
        now = time.monotonic()
        if now - self._looked < _LOOKS_S:
            return None
        if now - self._looked > _ABSENCE_S:
            self._began = now
        self._looked = now
        beats = {rank: self._beat(rank) for rank in self.ranks}
        return find_hung_rank(beats, self._began, now, self.timeouts, self.nodes)

    def _beat(self, rank: int) -> HeartbeatRecord | None:
        """Latest record of a rank; nothing in it counts as older than the time since watching began."""
        beat = read_heartbeat(heartbeat_file(self.folder, rank))
        if beat is None:
            return None
        return HeartbeatRecord(max(beat.at, self._began), max(beat.since, self._began), beat.waits, beat.task)
