"""Plan and program folders that are damaged, do not belong to their model or cannot be written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopipe.cli.main import main
from tests.cli.command_line import CommandLine
from tests.cli.test_bad_requests import MODEL, perceptron
from tests.passes.frontend.building import saved

PLAN = Path(f"{MODEL}.plan")
PROGRAM = PLAN / "program"
DAMAGED = (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": NaN}', b"[" * 100000)
READERS = (("show", PLAN), ("compare", PLAN, PLAN), ("codegen", PLAN))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that trains, its plan for two devices and the plan's program."""
    folder = tmp_path_factory.mktemp("made")
    path = saved(perceptron(trains=True), folder)
    stages = (
        "constraints=[{match: '*_[ab]', stage: 0, devices: [0]}, {match: '*_[cy]*', stage: 1, "
        "devices: [1]}]"
    )
    words = (
        "--strategy",
        "manual",
        "--schedule",
        "1f1b",
        "--gpus",
        "2",
        "--micro-batches",
        "2",
        "--set",
        stages,
        "-q",
    )
    assert main(["plan", str(path), *words]) == 0
    assert main(["codegen", str(folder / PLAN), "-q"]) == 0
    return folder


@pytest.fixture
def here(made: Path, command_line: CommandLine) -> CommandLine:
    """The command line in a copy of `made`."""
    shutil.copytree(made, command_line.folder, dirs_exist_ok=True)
    return command_line


def _edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change the object in a JSON file."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def _without_task(schedule: Any) -> None:
    del schedule["tasks"][1][2]


def _swapped(schedule: Any) -> None:
    first = schedule["tasks"][0]
    first[0], first[-1] = first[-1], first[0]


def _moved_node(plan: Any) -> None:
    stages = plan["placement"]["stages"]
    stages[1]["nodes"] = [[stages[1]["nodes"][0][0] + 1, stages[1]["nodes"][-1][1]]]


def _beyond(plan: Any) -> None:
    plan["placement"]["stages"][1]["nodes"].append([90, 91])


def _of_more_micro_batches(plan: Any) -> None:
    plan["summary"]["micro_batches"] = 1024
    plan["batch_size"] = 1024 * plan["summary"]["micro_batch_size"]


BROKEN_PLANS: dict[str, tuple[str, Callable[[Any], object], tuple[str, ...]]] = {
    "format": ("plan.json",
        lambda plan: plan.update(format="autopipe.plan/9"), ("'autopipe.plan/9'", "autopipe.plan/1")),
    "no format": ("plan.json", lambda plan: plan.pop("format"), ("format is missing",)),
    "no placement": ("plan.json", lambda plan: plan.pop("placement"), ("placement is missing",)),
    "no stages": ("plan.json", lambda plan: plan["placement"].update(stages=[]), ("placement.stages",)),
    "placement": ("plan.json", lambda plan: plan.update(placement=[1]), ("placement is [1]", "a mapping")),
    "stage": ("plan.json",
        lambda plan: plan["placement"]["stages"][1].update(devices=["a"]), ("stages[1].devices[0]",)),
    "mode": ("plan.json", lambda plan: plan.update(mode="learn"), ('mode is "learn"', "train or infer")),
    "batch": ("plan.json", lambda plan: plan.update(batch_size=0), ("batch_size is 0", "at least 1")),
    "batch of other micro-batches": ("plan.json",
        lambda plan: plan.update(batch_size=2**43), ("batch_size is 8796093022208", "micro-batches of")),
    "model": ("plan.json", lambda plan: plan.update(model=3), ("model is 3", "expected text")),
    "summary": ("plan.json",
        lambda plan: plan["summary"].update(step_time_s="soon"), ('summary.step_time_s is "soon"',)),
    "messages": ("plan.json", lambda plan: plan["predictions"].update(messages=[[1]]), ("predictions.messages[0]",)),
    "schedule's format": ("schedule.json",
        lambda schedule: schedule.update(format="x"), ("'x'", "autopipe.schedule/1")),
    "task missing": ("schedule.json", _without_task, ("stage 1 runs B on micro-batch 1", "1F0 1B0 [1B1]")),
    "tasks in a circle": ("schedule.json", _swapped, ("0B1 waits for 0F1", "[0B1] 0F1 0B0 0F0")),
    "task of no block": ("schedule.json",
        lambda schedule: schedule["tasks"][0][0].update(block=9), ("tasks[0][0].block",)),
    "unit": ("schedule.json", lambda schedule: schedule.update(units=0), ("units is 0",)),
    "device": ("schedule.json", lambda schedule: schedule["tasks"].pop(), ("tasks is", "2 devices")),
}  # fmt: skip
"""A file of a plan folder, what is changed in it, and what is said."""


@pytest.mark.parametrize("name", BROKEN_PLANS)
def test_a_plan_that_was_edited(here: CommandLine, name: str) -> None:
    file, change, says = BROKEN_PLANS[name]
    _edit(PLAN / file, change)
    for words in READERS:
        assert here.refuses(2, words, *says).startswith(f"{PLAN / file}: ")


def test_a_plan_with_the_micro_batches_of_another_schedule(here: CommandLine) -> None:
    _edit(PLAN / "plan.json", _of_more_micro_batches)
    for words in READERS:
        error = here.refuses(
            2, words, "the schedule is for 2 micro-batches, but its plan is for 1024"
        )
        assert error.startswith(f"{PLAN / 'schedule.json'}: units: ")


@pytest.mark.parametrize("file", ["plan.json", "schedule.json"])
@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: repr(content[:4]))
def test_a_file_of_a_plan_that_is_damaged(here: CommandLine, file: str, content: bytes) -> None:
    (PLAN / file).write_bytes(content)
    assert here.refuses(2, ("show", PLAN)).startswith(f"{PLAN / file}: ")


def test_a_plan_that_was_cut_or_lost(here: CommandLine) -> None:
    whole = (PLAN / "schedule.json").read_bytes()
    (PLAN / "schedule.json").write_bytes(whole[: len(whole) // 2])
    here.refuses(2, ("codegen", PLAN), "schedule.json: the file is not valid JSON")
    (PLAN / "schedule.json").unlink()
    here.refuses(2, ("codegen", PLAN), "schedule.json: the file cannot be read: No such file")
    (PLAN / "plan.json").unlink()
    here.refuses(2, ("codegen", PLAN), f"{PLAN} contains no plan", "autopipe plan")
    for words in (("codegen", "gone"), ("show", "gone"), ("compare", "gone")):
        here.refuses(2, words, "gone does not exist")
    here.refuses(2, ("show", MODEL), f"{MODEL} is neither a plan folder nor a schedule of blocks")
    here.refuses(2, ("compare",), "DIR")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_moved_node, ("in no stage",)),
        (_beyond, ("nodes that do not exist in the graph",)),
        (lambda plan: plan.update(graph_digest="0" * 64), ("was made for another model", MODEL)),
        (
            lambda plan: plan.update(model="../gone.onnx"),
            ("the model of the plan does not exist", "gone.onnx"),
        ),
    ],
    ids=["node in no stage", "node that is not there", "digest", "model's path"],
)
def test_a_plan_that_does_not_fit_its_model(
    here: CommandLine, change: Callable[[Any], object], says: tuple[str, ...]
) -> None:
    _edit(PLAN / "plan.json", change)
    here.refuses(2, ("codegen", PLAN), *says)


def test_a_model_that_changed_or_moved(here: CommandLine) -> None:
    saved(perceptron(width=9, trains=True), here.folder)
    here.refuses(2, ("codegen", PLAN), "was made for another model", MODEL, "plan again")
    Path(MODEL).write_bytes(b"no model")
    here.refuses(3, ("codegen", PLAN), MODEL, "not an ONNX")
    Path(MODEL).rename("elsewhere.onnx")
    (PLAN / "graph.json").unlink()
    here.refuses(2, ("codegen", PLAN), "the model of the plan does not exist", "restore the file")


def test_a_configuration_of_a_plan_that_was_edited(here: CommandLine) -> None:
    path = PLAN / "config.yaml"
    whole = path.read_text()
    for before, after, says in (
        (
            "mode: train",
            "mode: infer",
            "the plan is for mode train, but its configuration is for mode infer",
        ),
        ("gpus: 2", "gpus: 4", "the plan is for 2 devices, but its configuration is for 4"),
        ("name: manual", "name: manula", "strategy 'manula' is unknown"),
        ("seed: 0", "sed: 0", "unknown key 'sed'"),
    ):
        assert before in whole
        path.write_text(whole.replace(before, after))
        here.refuses(2, ("codegen", PLAN), says)
    path.unlink()
    here.refuses(2, ("codegen", PLAN), f"{path}: the file cannot be read: No such file")


def test_targets_that_cannot_be_written(here: CommandLine) -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("keep me")
    Path("linked").symlink_to(PLAN, target_is_directory=True)
    for target in ("mine", MODEL, "linked", "gone/plan", f"{MODEL}/plan", "/proc/plan", "n" * 300):
        line = here.refuses(2, ("plan", MODEL, "-o", target))
        assert Path(target).name in line or Path(target).parent.name in line
    for target in (
        "mine",
        MODEL,
        f"{MODEL}/program",
        "/proc/program",
        "/proc/gone/program",
        "n" * 300,
    ):
        assert Path(target).name in here.refuses(2, ("codegen", PLAN, "-o", target))
    for flag in ("--html", "--trace", "--svg"):
        for target in ("mine", "gone/report", f"{MODEL}/report", "/proc/report", "n" * 300):
            assert Path(target).name in here.refuses(2, ("show", PLAN, flag, target))


def test_a_report_is_not_left_where_the_next_file_fails(here: CommandLine) -> None:
    here.refuses(
        2, ("show", PLAN, "--html", "report.html", "--trace", "gone/trace.json"), "gone/trace.json"
    )


def test_a_disk_that_is_full(here: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_text", full)
    for words in (("plan", MODEL), ("plan", MODEL, "-o", "new"), ("codegen", PLAN)):
        here.refuses(2, words, "No space left on device")
    for target in ("new", "new/in/new"):
        here.refuses(2, ("codegen", PLAN, "-o", target), target, "No space left on device")
    monkeypatch.setattr(os, "replace", full)
    here.refuses(2, ("show", PLAN, "--html", "new.html"), "new.html", "No space left on device")
    here.refuses(
        2, ("zoo", "build", "dlrm", "-o", "new.onnx"), "new.onnx", "No space left on device"
    )


BROKEN_PROGRAMS: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "format": (
        lambda manifest: manifest.update(format="autopipe.program/9"),
        ("autopipe.program/1", "codegen again"),
    ),
    "world": (lambda manifest: manifest.pop("world_size"), ("damaged", "world_size")),
    "more ranks": (
        lambda manifest: manifest.update(world_size=3),
        ("world_size is 3", "number of ranks, which is 2"),
    ),
    "ranks": (lambda manifest: manifest.update(ranks=3), ("damaged",)),
    "shapes": (lambda manifest: manifest["inputs"][0].update(shape=None), ("damaged",)),
    "storage": (
        lambda manifest: manifest["parameters"][0].update(storage={"where": 1}),
        ("damaged",),
    ),
    "model": (lambda manifest: manifest.update(model="here"), ("damaged",)),
    "channel": (lambda manifest: manifest.update(channels=[[1]]), ("damaged",)),
    "stages": (lambda manifest: manifest.update(stages=[1]), ("damaged",)),
    "output": (lambda manifest: manifest.update(outputs=["y"]), ("damaged",)),
    "count": (lambda manifest: manifest.update(micro_batches=0), ("micro_batches",)),
}
"""What is changed in the manifest of a program, and what is said."""


@pytest.mark.parametrize("name", BROKEN_PROGRAMS)
def test_a_program_whose_manifest_was_edited(here: CommandLine, name: str) -> None:
    change, says = BROKEN_PROGRAMS[name]
    _edit(PROGRAM / "manifest.json", change)
    for command in ("launch", "verify"):
        here.refuses(2, (command, PROGRAM, "--device", "cpu"), "manifest.json", *says)


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: repr(content[:4]))
def test_a_program_whose_manifest_is_damaged(here: CommandLine, content: bytes) -> None:
    (PROGRAM / "manifest.json").write_bytes(content)
    for command in ("launch", "verify"):
        here.refuses(2, (command, PROGRAM, "--device", "cpu"), "manifest.json")


def test_programs_that_are_none(here: CommandLine) -> None:
    def refused(command: str, *folders: object) -> None:
        for folder in folders:
            here.refuses(
                2, (command, folder), str(folder), "is not a program folder", "autopipe codegen"
            )

    refused("launch", "gone", MODEL, PLAN)
    refused("verify", "gone", MODEL)
    shutil.rmtree(PROGRAM)
    refused("verify", PLAN)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--steps", "0"), ("--steps", "0")),
        (("--steps", "many"), ("--steps", "many")),
        (("--device", "tpu"), ("--device", "tpu", "cpu")),
        (("--nnodes", "0"), ("--nnodes", "at least 1")),
        (("--nnodes", "3:2"), ("--nnodes", "MIN at most MAX")),
        (("--nnodes", "two"), ("--nnodes", "neither")),
        (("--nnodes", "2"), ("several nodes", "--rdzv-endpoint")),
        (("--nnodes", "3"), ("2 ranks", "3 nodes")),
        (("--nproc-per-node", "3"), ("2 ranks", "3 ranks each")),
        (("--max-restarts", "-1"), ("--max-restarts",)),
        (("--resume",), ("--resume requires a checkpoint folder", "--checkpoint DIR")),
        (("--checkpoint-every", "2"), ("--checkpoint-every requires a checkpoint folder",)),
        (("--checkpoint", MODEL), ("checkpoints cannot be written", f"{MODEL} is a file")),
        (
            ("--checkpoint", f"{MODEL}/here"),
            ("checkpoints cannot be written", f"{MODEL} is a file"),
        ),
        (
            ("--checkpoint", "/dev/null", "--resume"),
            ("checkpoints cannot be written", "/dev/null is a device"),
        ),
        (
            ("--checkpoint", "/dev/null/here"),
            ("checkpoints cannot be written", "/dev/null is a device"),
        ),
        (
            ("--checkpoint", "/proc/here"),
            ("checkpoints cannot be written", "/proc cannot be written to"),
        ),
        (
            ("--checkpoint", f"gone/{'x' * 300}"),
            ("checkpoints cannot be written", "File name too long"),
        ),
        (("--outputs", "y.npz"), ("cannot write outputs", "--mode infer")),
        (
            ("--trace", "gone/trace.json"),
            ("gone/trace.json cannot be written", "folder does not exist"),
        ),
        (("--trace", PLAN), (f"{PLAN} is a folder", "choose the path of a file")),
        (("--rank", "1"), ("--rank", "--dry-run")),
        (("--dry-run", "--rank", "2"), ("rank 2 does not exist", "ranks 0 to 1")),
        (("--seed", "x"), ("--seed",)),
        (("--step", "3"), ("--step", "--steps")),
    ],
    ids=str,
)
def test_flags_of_a_launch(
    here: CommandLine, words: tuple[str, ...], says: tuple[str, ...]
) -> None:
    here.refuses(2, ("launch", PROGRAM, "--device", "cpu", *words), *says)


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("keys", "name"),
    [
        (("predictions", "stages", 0, "forward_s"), "predictions.stages[0].forward_s"),
        (("predictions", "stages", 1, "update_s"), "predictions.stages[1].update_s"),
        (("summary", "step_time_s"), "summary.step_time_s"),
    ],
)
def test_a_predicted_time_that_is_no_time(
    here: CommandLine, keys: tuple[str | int, ...], name: str, number: float
) -> None:
    def change(document: Any) -> None:
        *path, last = keys
        for key in path:
            document = document[key]
        document[last] = number

    _edit(PLAN / "plan.json", change)
    here.refuses(2, ("show", PLAN), name if number == -1.0 else "is not a valid number")


def test_a_configuration_that_was_cut_short(here: CommandLine) -> None:
    """Every beginning of the file is refused: keys that are missing would have their defaults."""
    path = PLAN / "config.yaml"
    whole = path.read_bytes()
    ends = [0, *(place for place, byte in enumerate(whole) if byte == ord("\n")), len(whole) - 1]
    for end in ends:
        for content in (whole[:end], whole[:end] + b"\n")[: 1 if end == len(whole) - 1 else 2]:
            path.write_bytes(content)
            shown = here.run("codegen", PLAN, "-q")
            assert (shown.code, shown.err.count("\n") <= 2) == (2, True), (content[-40:], shown.err)


def test_an_edited_configuration_that_was_cut_short_is_not_planned(here: CommandLine) -> None:
    path = PLAN / "config.yaml"
    before, _, _ = path.read_text().partition("  lr: ")
    path.write_text(f"{before}  lr: 0.")
    here.refuses(2, ("plan", "--from", PLAN, "-q"), f"{path} is truncated", "restore the file")
    path.write_text(f"{before}  lr: 0.1\n")
    here.refuses(2, ("plan", "--from", PLAN, "-q"), f"{path} is truncated", "`seed`")
