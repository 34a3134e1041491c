"""Plans that are bound by the host say so, in words, in JSON and in the program's manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.configs.zoo import build, configure
from autopipe.ir.measured_costs import Costs, DeviceCosts, costs_text
from tests.cli.command_line import CommandLine

CLUSTER = """\
name: mine
device:
  name: D
  memory: 8GB
  peak: {fp32: 10TFLOP/s}
  bandwidth: 1000GB/s
  launch_latency: 4us
  host_launch: HOST
  efficiency: {matmul: 1, convolution: 1, elementwise: 1, normalization: 1, reduction: 1, memory: 1, recurrent: 1}
levels:
  - {name: node, size: 1, latency: 1us, bandwidth: 10GB/s}
"""
SIZES = {
    "layers": "1",
    "hidden": "16",
    "heads": "2",
    "sequence": "8",
    "vocabulary": "32",
    "loss": "true",
}
WORDS = (
    "plan",
    "m.onnx",
    "--cluster",
    "mine.yaml",
    "--strategy",
    "data_parallel",
    "--schedule",
    "gpipe",
    "-o",
    "p",
)
BATCH = ("--batch-size", 8, "--micro-batches", 4)


def planned(here: CommandLine, host_launch: str, *words: object) -> str:
    """Plan a small GPT on one device of a cluster with this time of the host, into p; return the
    screen.
    """
    build(configure("gpt", SIZES)).save(here.folder / "m.onnx")
    (here.folder / "mine.yaml").write_text(CLUSTER.replace("HOST", host_launch))
    return here.done(*WORDS, *BATCH, *words).out


def test_a_plan_bound_by_the_host_says_what_helps(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    screen = planned(command_line, "10ms")
    (line,) = (line for line in screen.splitlines() if line.startswith("bound by the host"))
    assert line.endswith(
        "% of the step; what helps: fewer, larger micro-batches, or launch --cuda-graphs"
    )
    written = json.loads(Path("p/plan.json").read_text())
    (stage,) = written["predictions"]["stages"]
    assert stage["on_host"]["forward_s"] > stage["on_device"]["forward_s"] > 0
    assert stage["forward_s"] == pytest.approx(stage["on_host"]["forward_s"])
    waits = sum(
        stage["on_host"][way] - stage["on_device"][way] for way in ("forward_s", "backward_s")
    )
    assert written["breakdown"]["host_s"] == pytest.approx(4 * waits)
    assert f"wait {4 * waits / written['summary']['step_time_s']:.0%} of the step" in line
    explained = command_line.done("explain", "p").out
    assert line not in explained.splitlines(), "explain tells the rest"
    assert "bound by the host: a micro-batch takes the host" in explained
    rows = [
        row for row in explained.splitlines() if "half the micro-batches, of twice the size" in row
    ]
    assert rows[0].rstrip().endswith("%")
    assert "it is bound by the host" in command_line.done("explain", "p", "--stage", 0).out
    told = json.loads(command_line.done("explain", "p", "--json").out)
    assert told["host_bound_stages"] == [0]
    rates = {each["what"]: each["samples_per_s"] for each in told["helps"]}
    now = told["summary"]["samples_per_s"]
    assert rates["half the micro-batches, of twice the size"] == pytest.approx(2 * now, rel=0.01)
    assert rates["no time of the host, as with launch --cuda-graphs"] > 10 * now


def test_a_plan_bound_by_the_device_says_nothing_of_the_host(command_line: CommandLine) -> None:
    assert "host" not in planned(command_line, "1ns")
    told = json.loads(command_line.done("explain", "p", "--json").out)
    assert told["host_bound_stages"] == []
    assert not any("host" in each["what"] for each in told["helps"])
    assert "it is bound by the device" in command_line.done("explain", "p", "--stage", 0).out


@pytest.mark.parametrize(("host_launch", "bound"), [("10ms", True), ("1ns", False), ("0", False)])
def test_the_manifest_marks_stages_that_the_host_bounds(
    command_line: CommandLine, host_launch: str, bound: bool
) -> None:
    planned(command_line, host_launch)
    command_line.done("codegen", "p")
    assert [stage.host_bound for stage in read_manifest(Path("p/program")).stages] == [bound]
    for folder in ("reference", "forward"):
        assert not read_manifest(Path("p/program", folder)).stages[0].host_bound, (
            "no plan predicts this program"
        )


def test_measured_costs_say_what_the_host_takes(command_line: CommandLine) -> None:
    costs = Costs((DeviceCosts("D", ("by hand",), host_launch_s=0.01),))
    (command_line.folder / "slow.costs").write_text(costs_text(costs))
    assert "bound by the host" in planned(command_line, "0", "--costs", "slow.costs")
    costs = Costs((DeviceCosts("D", ("by hand",), host_launch_s=0.0),))
    (command_line.folder / "none.costs").write_text(costs_text(costs))
    assert "bound by the host" not in planned(command_line, "10ms", "--costs", "none.costs")
    costs = Costs((DeviceCosts("D", ("by hand",)),))
    (command_line.folder / "unknown.costs").write_text(costs_text(costs))
    assert "bound by the host" in planned(command_line, "10ms", "--costs", "unknown.costs")
