"""Work in other processes: its answers, what becomes of it when it fails, and that none is left
behind.
"""

from __future__ import annotations

import os
import time

from autopipe.passes.auto.workers import SpeculativePool


def test_answers_are_those_of_the_work_in_whatever_order_they_are_asked_for():
    with SpeculativePool(2) as ahead:
        for number in range(7):
            ahead.queue(
                {number: lambda number=number: {"square": number**2, "filling": "x" * 200_000}}
            )
        found = [ahead.wait_for(number) for number in (3, 0, 6, 5, 4, 2, 1)]
    assert [each["square"] for each in found if each] == [9, 0, 36, 25, 16, 4, 1]


def test_an_answer_is_given_once():
    with SpeculativePool(2) as ahead:
        ahead.queue({"a": lambda: {"x": 1}})
        assert ahead.is_pending("a")
        assert ahead.wait_for("a") == {"x": 1}
        assert not ahead.is_pending("a")
        assert ahead.wait_for("a") is None
        assert ahead.wait_for("unheard of") is None


def test_nothing_is_begun_without_cores():
    with SpeculativePool(1) as ahead:
        ahead.queue({"a": lambda: {"x": 1}})
        assert not ahead.is_pending("a")
        assert ahead.wait_for("a") is None


def test_a_process_that_fails_has_no_answer(capfd):
    def fail():
        raise ValueError("as it may happen")

    with SpeculativePool(2) as ahead:
        ahead.queue({"error": fail})
        ahead.queue({"end": lambda: os._exit(3)})
        ahead.queue({"fine": lambda: {"x": 1}})
        assert [ahead.wait_for(key) for key in ("error", "end", "fine")] == [None, None, {"x": 1}]
    assert capfd.readouterr() == ("", "")


def test_work_of_one_process_is_answered_piece_by_piece(capfd):
    def last():
        time.sleep(60)
        return {}

    with SpeculativePool(2) as ahead:
        ahead.queue(
            {
                "first": lambda: {"process": os.getpid()},
                "second": lambda: {"process": os.getpid()},
                "last": last,
            }
        )
        found = [ahead.wait_for(key) for key in ("second", "first")]
        assert found[0] == found[1]
        assert ahead.is_pending("last")
        assert ahead.wait_for("last", 0.1) is None


def test_what_follows_a_failure_in_a_process_has_no_answer(capfd):
    with SpeculativePool(2) as ahead:
        ahead.queue(
            {"fine": lambda: {"x": 1}, "end": lambda: os._exit(3), "never": lambda: {"x": 2}}
        )
        assert [ahead.wait_for(key) for key in ("fine", "end", "never")] == [{"x": 1}, None, None]
    assert capfd.readouterr() == ("", "")


def test_none_is_left_when_the_block_ends():
    with SpeculativePool(2) as ahead:
        for number in range(4):
            ahead.queue({number: lambda: time.sleep(60) or {}})
        started = time.monotonic()
        assert ahead.wait_for(0, 0.1) is None, "it takes too long"
    assert time.monotonic() - started < 30
    assert not ahead.is_pending(3)
