"""Chrome's trace events: what chrome://tracing and Perfetto ask of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict

from autopipe.api.timeline_figure import block_picture, plan_picture
from autopipe.api.timeline_files import MeasuredTask, chrome_trace
from autopipe.ir.schedule import Phase, Task
from autopipe.ir.timeline import Transfer
from tests.cli.drawing.examples import chain_plan, split_embedding


def events_of(*arguments):
    document = json.loads(chrome_trace(*arguments))
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    return document["traceEvents"]


def check_format(events):
    """Each kind of event with what it must have; slices of one thread one after the other, each
    thread with a name.
    """
    needs = {"X": {"ts", "dur", "tid"}, "C": {"ts", "args"}, "M": {"args"}}
    named = {(each["pid"], each["tid"]) for each in events if each["name"] == "thread_name"}
    threads = defaultdict(list)
    for each in events:
        assert needs[each["ph"]] | {"ph", "pid", "name"} <= set(each)
        if each["ph"] == "X":
            assert each["dur"] >= 0
            threads[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
        elif each["ph"] == "C":
            assert all(isinstance(value, int) for value in each["args"].values())
    assert set(threads) <= named
    for slices in threads.values():
        slices.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(slices))


def test_messages_of_one_rank_to_two_others_have_a_thread_each():
    picture = plan_picture(*chain_plan(3, 2))
    task = Task(0, Phase.FORWARD, 0)
    sent = tuple(Transfer(0, target, task, 8, 1.0, 2.5) for target in (1, 2))
    events = events_of(dataclasses.replace(picture, transfers=sent))
    check_format(events)
    names = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert names == {"rank 0", "rank 1", "rank 2", "rank 0 to 1", "rank 0 to 2"}


def test_blocks_and_measured_tasks_keep_the_format():
    check_format(events_of(block_picture(split_embedding(), "")))
    measured = [
        MeasuredTask(rank, step, "0F0", 100.0 * step, 50.0) for step in (3, 4) for rank in (0, 1)
    ]
    events = events_of(plan_picture(*chain_plan(2, 2)), measured)
    check_format(events)
    predicted = [each["ts"] for each in events if each["pid"] == 1 and "ts" in each]
    assert min(predicted) == 400.0
