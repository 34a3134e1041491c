"""`autopipe show`: plans and schedules of blocks on the screen and in files."""

from __future__ import annotations

import json
import shutil

import pytest

from autopipe.api.plan_folder import open_prediction
from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from autopipe.ir.block_schedule import block_schedule_json
from autopipe.passes.registry import scheduler_names
from tests.cli.drawing.examples import split_embedding


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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
        "pipedream",
        "--schedule",
        "1f1b",
    ]
    words += ["--cluster", "a100-80gb"]
    assert main([*map(str, words), "-q", "-o", str(path / "plan")]) == 0
    return path / "plan"


@pytest.fixture(scope="module")
def lone_folder(folder):
    """The plan with no model."""
    copy = folder.parent.parent / "lone" / "plan"
    shutil.copytree(folder, copy)
    return copy


@pytest.fixture
def blocks(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(block_schedule_json(split_embedding())))
    return path


def test_no_colours_are_piped(lone_folder, capsys):
    assert main(["show", str(lone_folder)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "steady state ×" in out
    assert "█" in out
    assert " of 73.1 GiB" in out


def test_json_says_what_was_decided(folder, capsys):
    assert main(["show", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["summary"]["devices"] == 2
    assert document["tasks"][1][:2] == ["1F0", "1B0"]
    assert document["stages"][0]["predicted"]["forward_s"] > 0


def test_the_trace_holds_every_task_and_message(folder, capsys, tmp_path):
    assert main(["show", str(folder), "--trace", str(tmp_path / "trace.json")]) == 0
    plan, timeline = open_prediction(folder)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(timeline.spans) + len(timeline.transfers)
    assert {event["name"] for event in complete} >= {
        str(task) for order in plan.schedule.tasks for task in order
    }
    assert max(event["ts"] + event["dur"] for event in complete) <= timeline.end * 1e6 * (1 + 1e-9)
    assert sum(event["ph"] == "C" for event in events) == sum(map(len, timeline.memory))


def test_the_page_compares_every_schedule_that_takes_the_placement(folder, capsys, tmp_path):
    page = tmp_path / "page.html"
    assert main(["show", str(folder), "--html", str(page)]) == 0
    assert capsys.readouterr().err == ""
    text = page.read_text()
    assert text.count("(chosen)</td>") == 1
    assert "<td>1f1b (chosen)</td>" in text
    for name in set(scheduler_names()) - {"csv"}:
        assert f"<td>{name}</td>" in text or f"<td>{name} (chosen)</td>" in text


def test_a_page_without_graph_and_model_says_that_nothing_is_compared(
    lone_folder, capsys, tmp_path
):
    page = tmp_path / "page.html"
    (lone_folder / "graph.json").unlink()
    assert main(["show", str(lone_folder), "--html", str(page)]) == 0
    assert capsys.readouterr().err.startswith(
        "warning: the page lacks other schedules: the model of the plan does not exist"
    )
    assert "under every schedule" not in page.read_text()


def test_blocks_on_the_screen_and_as_json(blocks, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["show", str(blocks)]) == 0
    out = capsys.readouterr().out
    assert "period 6 (optimal, proven); makespan 60" in out
    assert "steady state ×6" in out
    assert main(["show", str(blocks), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["file"], document["makespan"]) == (str(blocks), 60)


def test_blocks_in_files(blocks, capsys, tmp_path):
    files = {name: tmp_path / f"blocks.{name}" for name in ("html", "trace", "csv", "svg")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert main(["show", str(blocks), *options]) == 0
    assert capsys.readouterr().out.split("\n")[0] == f"html in {files['html']}"
    page = files["html"].read_text()
    assert "<td>this one (chosen)</td>" in page
    assert "<td>tessel</td>" in page
    assert files["csv"].read_text().split("\n")[1].startswith("0F0,0F1,2F0,2B0,0F2")
    events = json.loads(files["trace"].read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 2 * 8 + 4 * 8
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == 60_000


def test_measured_rows_stand_below_the_predicted_ones(folder, capsys, tmp_path):
    span = {"ph": "X", "pid": 0, "cat": "measured", "dur": 5.0}
    ranks = [{"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "rank 0"}}]
    spans = [
        {**span, "name": "0F0", "tid": rank, "ts": 100.0 * step, "args": {"step": step}}
        for rank in (0, 1)
        for step in (0, 1)
    ]
    (tmp_path / "measured.json").write_text(json.dumps({"traceEvents": [*ranks, *spans]}))
    merged = tmp_path / "merged.json"
    words = ["--trace", str(merged), "--measured", str(tmp_path / "measured.json")]
    assert main(["show", str(folder), *words]) == 0
    events = json.loads(merged.read_text())["traceEvents"]
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert sorted(names.values()) == ["measured", "predicted"]
    starts = {pid: [e["ts"] for e in events if e["ph"] == "X" and e["pid"] == pid] for pid in names}
    assert sorted(starts[2]) == [0, 0, 100, 100]
    # The prediction begins where the last step does.
    assert min(starts[1]) == 100


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "an object"),
        ('{"traceEvents": []}', "the trace contains no tasks"),
        ('{"traceEvents": [{"ph": "X", "tid": -1}]}', "traceEvents[0]"),
    ],
)
def test_what_is_no_measured_trace_is_refused(folder, capsys, tmp_path, text, says):
    (tmp_path / "measured.json").write_text(text)
    words = ["--trace", str(tmp_path / "out.json"), "--measured", str(tmp_path / "measured.json")]
    assert main(["show", str(folder), *words]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_measured_without_trace_is_refused(folder, capsys, tmp_path):
    assert main(["show", str(folder), "--measured", str(tmp_path / "measured.json")]) == 2
    assert "--measured requires --trace" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--html", "--svg", "--trace", "--csv"])
def test_files_that_cannot_be_written_are_refused(folder, capsys, tmp_path, option):
    for target in (tmp_path, tmp_path / "absent/file"):
        assert main(["show", str(folder), option, str(target)]) == 2
        assert capsys.readouterr().err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


def test_a_plan_follows_the_order_that_another_one_wrote(folder, capsys, tmp_path):
    order = tmp_path / "order.csv"
    assert main(["show", str(folder), "--csv", str(order)]) == 0
    model = str(folder.parent / "gpt.onnx")
    words = ["plan", model, "--gpus", "2", "--strategy", "pipedream", "--schedule", "csv"]
    words += ["--cluster", "a100-80gb"]
    following = [*words, "--set", f"schedule.file={order}", "--micro-batches"]
    assert main([*following, "8", "-q", "-o", str(tmp_path / "again")]) == 0
    first = open_prediction(folder)
    again = open_prediction(tmp_path / "again")
    assert again[0].schedule.tasks == first[0].schedule.tasks
    assert again[1].end == first[1].end
    capsys.readouterr()
    assert main([*following, "4", "-q", "-o", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {order}:1:")
    assert "the file has 8 micro-batches, but the step has 4" in error
    assert main([*words, "-q", "-o", str(tmp_path / "none")]) == 2
    assert "schedule csv requires a file, but schedule.file is empty" in capsys.readouterr().err
