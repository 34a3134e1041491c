"""The runner: the order of checks, times, and failures that name the pass and those before it."""

from __future__ import annotations

import pytest

from autopipe.ir.errors import AutopipeError, InfeasibleError, ModelError
from autopipe.passes.pipeline import Runner


class Recorder:
    def __init__(self):
        self.heard = []

    def started(self, name):
        self.heard.append(("started", name))

    def finished(self, name, value, seconds):
        self.heard.append(("finished", name, value))


def test_requirements_then_the_pass_then_the_check():
    heard = []
    runner = Runner()
    result = runner.run(
        "place", lambda: heard.append("run") or 7, lambda: heard.append("requires"), heard.append
    )
    assert result == 7
    assert heard == ["requires", "run", 7]


def test_an_observer_hears_of_every_pass():
    recorder = Recorder()
    runner = Runner(recorder)
    runner.run("read", lambda: "graph")
    runner.run("place", lambda: "placement")
    assert recorder.heard == [
        ("started", "read"), ("finished", "read", "graph"), ("started", "place"), ("finished", "place", "placement"),
    ]  # fmt: skip
    assert [name for name, seconds in runner.seconds.items() if seconds >= 0] == ["read", "place"]


def test_a_refusal_names_the_pass_and_those_before_it():
    runner = Runner()
    runner.run("read", lambda: 1)
    runner.run("cost", lambda: 2)
    with pytest.raises(InfeasibleError) as caught:
        runner.run("place", lambda: 3, requires=lambda: refuse(InfeasibleError("too much")))
    assert str(caught.value) == "pass place, after read, cost: too much"


def test_a_place_that_is_known_is_kept():
    with pytest.raises(ModelError) as caught:
        Runner().run("read", lambda: refuse(ModelError("unknown operator", where="gpt.onnx: 'x'")))
    assert caught.value.where == "gpt.onnx: 'x'"


def test_a_mistake_of_ours_names_the_pass_too():
    with pytest.raises(AutopipeError) as caught:
        Runner().run("place", lambda: 1 // 0)
    assert caught.value.exit_code == 70
    assert caught.value.where == "pass place"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_result_that_does_not_verify_is_refused():
    recorder = Recorder()
    with pytest.raises(InfeasibleError):
        Runner(recorder).run(
            "place", lambda: 1, verify=lambda value: refuse(InfeasibleError(f"{value} is wrong"))
        )
    assert recorder.heard == [("started", "place")]


def refuse(error):
    raise error
