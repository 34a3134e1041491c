"""Who of several ranks hangs, by their pulses; and that the launcher's agent ends them all."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import click
import pytest

from autopipe.backends.torch.elastic_agent import (
    HungRank,
    Watchdog,
    find_hung_rank,
    run_agent,
    wait_chain_text,
)
from autopipe.backends.torch.rendezvous import RendezvousConfig
from autopipe.backends.torch.runtime.watch.heartbeat import (
    DEFAULT_TIMEOUTS,
    ENDED_TASK,
    Heartbeat,
    HeartbeatRecord,
    Timeouts,
    heartbeat_file,
    read_heartbeat,
)
from autopipe.cli.launch import launch

SHORT = Timeouts(start_s=20.0, step_s=10.0, checkpoint_s=50.0)


def waits(since: float, task: str = "1F2", at: float = 100.0) -> HeartbeatRecord:
    return HeartbeatRecord(at, since, True, task)


def works(since: float, task: str = "1F2", at: float = 100.0) -> HeartbeatRecord:
    return HeartbeatRecord(at, since, False, task)


CASES: dict[str, tuple[dict[int, HeartbeatRecord | None], int, HungRank | None]] = {
    "others may wait for long": ({0: waits(1), 1: works(91)}, 1, None),
    "an endless loop": ({0: waits(1), 1: works(89), 2: waits(3)}, 1, HungRank(1, "1F2", 11)),
    "stopped while it waits": ({0: waits(1), 1: waits(80, at=85)}, 1, HungRank(1, "1F2", 15)),
    "the one that hangs longest": (
        {0: works(60), 1: waits(50, at=50), 2: works(70)},
        1,
        HungRank(1, "1F2", 50),
    ),
    "a checkpoint may take longer": ({0: works(60, "checkpoint"), 1: works(80, "start")}, 1, None),
    "a checkpoint that hangs": (
        {0: works(45, "restore"), 1: waits(30)},
        1,
        HungRank(0, "restore", 55),
    ),
    "a start that hangs": (
        {0: works(75, "start"), 1: waits(30, "start")},
        1,
        HungRank(0, "start", 25),
    ),
    "one that never began": ({0: waits(1, "start"), 1: None}, 1, HungRank(1, "", 70)),
    "one that has ended": ({0: works(1, ENDED_TASK, at=1), 1: works(95)}, 1, None),
    "all for one another": (
        {0: waits(70), 1: waits(65, "1B0"), 2: waits(80)},
        1,
        HungRank(1, "1B0", 35, waits=True),
    ),
    "all but one not yet for long": ({0: waits(70), 1: waits(92)}, 1, None),
    "for ranks of another node": ({0: waits(85), 1: waits(85)}, 2, None),
    "for ranks of another node too long": (
        {0: waits(75), 1: waits(79)},
        2,
        HungRank(0, "1F2", 25, waits=True),
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_the_rank_that_hangs_is_told_from_those_that_wait_for_it(case: str) -> None:
    beats, nodes, expected = CASES[case]
    assert find_hung_rank(beats, 30.0, 100.0, SHORT, nodes) == expected


def test_messages() -> None:
    assert HungRank(2, "3F1", 31.2).message() == "rank 2 hangs in task 3F1 for 31 s"
    assert HungRank(2, "checkpoint", 31.2).message() == "rank 2 hangs in its checkpoint for 31 s"
    assert HungRank(2, "", 31.2).message() == "rank 2 hangs in its start for 31 s"
    assert (
        HungRank(2, "3F1", 31.2, True).message()
        == "rank 2 waits in task 3F1 for 31 s, and so do all others"
    )


def test_for_whom_each_waits() -> None:
    def on(peer: int, task: str, channel: int = 7) -> HeartbeatRecord:
        return HeartbeatRecord(100.0, 60.0, True, task, peer, channel)

    circle = {0: on(1, "0B1", 3), 1: on(0, "1F2", 2)}
    hang = find_hung_rank(circle, 30.0, 100.0, SHORT, 1)
    assert hang is not None and hang.message() == (
        "rank 0 waits in task 0B1 for 40 s, and so do all others: for rank 1 (channel 3), which "
        "waits in task 1F2 for rank 0 (channel 2), which waits in task 0B1"
    )
    assert wait_chain_text({0: on(1, "0B1"), 1: on(4, "1B1")}, 0) == (
        "for rank 1 (channel 7), which waits in task 1B1 for rank 4 (channel 7), of another node"
    )
    group = {0: on(1, "0B1"), 1: on(-1, "update", -1)}
    assert (
        wait_chain_text(group, 0)
        == "for rank 1 (channel 7), which waits in its update for its group"
    )
    assert wait_chain_text(group, 1) == ""


def test_a_heartbeat_says_for_whom_its_rank_waits(tmp_path: Path) -> None:
    file = heartbeat_file(tmp_path, 3)
    heartbeat = Heartbeat(file)

    def awaited() -> tuple[int, int]:
        record = read_heartbeat(file)
        assert record is not None
        return record.peer, record.channel

    with heartbeat.record_wait(4, 17):
        assert awaited() == heartbeat.awaited == (4, 17)
    assert awaited() == heartbeat.awaited == (-1, -1)
    with pytest.raises(RuntimeError), heartbeat.record_wait(4, 17):
        raise RuntimeError
    assert awaited() == (-1, -1) and heartbeat.awaited == (4, 17), (
        "an error is told with what it ended"
    )
    with heartbeat.record_wait():
        assert awaited() == heartbeat.awaited == (-1, -1)


def test_a_pulse_says_what_its_rank_does(tmp_path: Path) -> None:
    file = heartbeat_file(tmp_path, 3)
    assert read_heartbeat(file) is None
    before = time.monotonic()
    heartbeat = Heartbeat(file)
    sign_of_life = read_heartbeat(file)
    assert (
        sign_of_life is not None
        and (sign_of_life.task, sign_of_life.waits) == ("start", False)
        and sign_of_life.since >= before
    )
    heartbeat.task = "12W345"
    with heartbeat.record_wait():
        inside = read_heartbeat(file)
    after = read_heartbeat(file)
    assert inside is not None and (inside.task, inside.waits) == ("12W345", True)
    assert (
        after is not None
        and (after.task, after.waits) == ("12W345", False)
        and after.since >= inside.since
    )
    heartbeat.record_alive()
    last = read_heartbeat(file)
    assert last is not None and last.at > after.at and last.since == after.since


def test_a_watcher_that_was_stopped_blames_nobody_for_that_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Heartbeat(heartbeat_file(tmp_path, 0))
    watch = Watchdog(tmp_path, (0,), SHORT, 1)
    now = time.monotonic()
    hangs = []
    for later in (1, 1000, 1004, 1008, 1012, 1016, 1021):
        monkeypatch.setattr(time, "monotonic", lambda at=now + later: at)
        hangs.append(watch.check() is not None)
    assert hangs == [False] * 6 + [True]


def test_the_launch_has_the_defaults_of_a_rank() -> None:
    given = {
        option.name: option.default for option in launch.params if isinstance(option, click.Option)
    }
    phases = ("start", "step", "checkpoint")
    assert {each: given[f"{each}_timeout"] for each in phases} == {
        each: getattr(DEFAULT_TIMEOUTS, f"{each}_s") for each in phases
    }


NEVER_STARTS = """
import os, shutil, time
if os.environ["RANK"] == "0":
    shutil.copy({heartbeat!r}, os.environ["AUTOPIPE_PULSES"] + "/rank_000.pulse")
time.sleep(10**6)
"""


def test_a_rank_that_never_starts_is_named_and_all_are_stopped(tmp_path: Path) -> None:
    """Rank 0 waits, as its pulse says for ever after; rank 1 is as good as dead."""
    heartbeat = Heartbeat(tmp_path / "waiting.pulse")
    assert isinstance(heartbeat._record, mmap.mmap)
    with pytest.MonkeyPatch.context() as patch, heartbeat.record_wait():
        far = time.monotonic() + 10**6
        patch.setattr(time, "monotonic", lambda: far)
        heartbeat.record_alive()
    script = tmp_path / "rank.py"
    script.write_text(NEVER_STARTS.format(heartbeat=str(tmp_path / "waiting.pulse")))
    logs = tmp_path / "logs"
    logs.mkdir()
    notes: list[str] = []
    times = Timeouts(start_s=4.0)
    failure = run_agent((str(script),), 2, RendezvousConfig(), 1, times, logs, False, notes.append)
    assert failure is not None
    error = failure.error()
    assert error.exit_code == 5
    assert error.message.startswith("rank 1 hangs in its start for ")
    assert "--start-timeout" in error.hint
    (note,) = notes
    assert (
        "rank 1 hangs in its start" in note and "starting all ranks again, 0 restarts left" in note
    )
