"""`autopipe show --tasks`: what is printed and what --json holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from autopipe.api.plan_folder import open_prediction
from autopipe.cli.main import main
from autopipe.cli.show import selected_ranks, task_screen
from autopipe.configs.zoo import build, configure
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.timeline import StagePrediction
from autopipe.passes.lower.lower import lower
from autopipe.passes.lower.task_graph import TaskSource
from tests.distributed.support.builder import mlp
from tests.distributed.support.running import schedule_of

KIB = 2**10
COST = StagePrediction(1.0, static_bytes=100 * KIB, kept_bytes=10 * KIB, transient_bytes=KIB)


@pytest.mark.parametrize(("micro_batches", "rank"), [(8, 1), (500, 1), (8, 2)])
def test_a_rank_on_the_screen(
    golden: Callable[[str, str], None], micro_batches: int, rank: int
) -> None:
    """Three stages, the last one on two ranks that split the columns of its product."""
    graph, loss = mlp(3)
    last = Stage((4, 5, 6, 7), (2, 3), 4, ((4, (Split("n", 2),)),))
    placement = Placement((Stage((0, 1), (0,), 4), Stage((2, 3), (1,), 4), last))
    program = lower(graph, placement, schedule_of(graph, placement, micro_batches), loss)
    source = TaskSource(program, graph, placement, (COST,) * 3)
    text = "\n".join(str(line) for line in task_screen(source.graph(rank), "")) + "\n"
    golden(text, f"show/tasks_{micro_batches}_of_rank_{rank}.txt")


def test_of_many_ranks_the_first_and_the_last_are_shown() -> None:
    assert selected_ranks(4) == (0, 1, 2, 3)
    assert selected_ranks(512) == (*range(8), *range(504, 512))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans")
    settings = {
        "layers": "2",
        "hidden": "32",
        "heads": "2",
        "sequence": "16",
        "vocabulary": "64",
        "loss": "true",
    }
    build(configure("gpt", settings)).save(path / "gpt.onnx")
    words = [
        "plan",
        path / "gpt.onnx",
        "--gpus",
        "2",
        "--strategy",
        "graphpipe",
        "--schedule",
        "1f1b",
        "-q",
    ]
    assert main([str(word) for word in (*words, "--micro-batches", 4, "-o", path / "plan")]) == 0
    return path / "plan"


def test_json_has_the_whole_graph_of_every_rank(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["show", str(folder), "--tasks", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    plan, timeline = open_prediction(folder)
    assert [rank["peak_memory_bytes"] for rank in document["ranks"]] == list(timeline.peak_memory)
    for rank, order in zip(document["ranks"], plan.schedule.tasks, strict=True):
        names = [task["name"] for task in rank["tasks"] if task["kind"] in ("forward", "backward")]
        assert names == [str(task) for task in order]
        assert {task["kind"] for task in rank["tasks"]} >= {
            "send",
            "receive",
            "accumulate",
            "update",
            "free",
        }
        (message,) = next(task["messages"] for task in rank["tasks"] if task["kind"] == "send")
        assert message["peer"] == 1 - rank["rank"]


def test_a_table_of_the_ranks_and_the_tasks_of_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["show", str(folder), "--tasks"]) == 0
    both = capsys.readouterr().out
    assert main(["show", str(folder), "--tasks", "--rank", "1"]) == 0
    one = capsys.readouterr().out
    assert both.startswith("rank  stages  tasks") and "rank 0: " in both and "  0SEND_F0 " in both
    assert one.startswith("rank 1: ") and "  1RECV_F0 " in one and "0SEND_F0" in one


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--tasks", "--rank", "2"), "rank 2 does not exist"),
        (("--rank", "1"), "--rank requires --tasks"),
        (("--tasks", "--csv", "order.csv"), "omit --csv"),
    ],
)
def test_what_cannot_be_shown(
    folder: Path, words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(folder), *words]) == 2
    assert says in capsys.readouterr().err
