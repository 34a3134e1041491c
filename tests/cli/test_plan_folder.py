"""A plan folder with files of a user: `plan` and `codegen` replace their own files unless edited,
and no others.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from autopipe.api.plan_folder import open_plan, open_prediction
from autopipe.cli.main import main
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.output_files import edited_files, read_digests
from tests.cli.command_line import CommandLine
from tests.cli.test_bad_requests import MODEL, perceptron
from tests.passes.frontend.building import saved

PLAN = Path(f"{MODEL}.plan")
OWNED = ("config.yaml", "graph.json", "placement.yaml", "plan.json", "schedule.json")
USERS: Mapping[str, str] = {
    "saved/step_00000002/rank_00000.safetensors": "weeks of training",
    "logs/metrics.jsonl": '{"step": 1}\n',
    "notes.txt": "what I tried",
    "own/stage_00.py": "# my own program",
    "plan.json.orig": "{}",
    ".autopipe-plan-of-mine/plan.json": "{}",
    ".notes": "hidden",
}
"""Files that a user keeps in a plan folder."""
FLAGS = (
    "--strategy",
    "manual",
    "--schedule",
    "1f1b",
    "--gpus",
    "2",
    "--micro-batches",
    "2",
    "--set",
)
STAGES = (
    "constraints=[{match: '*_[ab]', stage: 0, devices: [0]}, {match: '*_[cy]*', stage: 1, devices: "
    "[1]}]"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that trains, its plan for two devices with the program, and files of a
    user in the plan.
    """
    folder = tmp_path_factory.mktemp("made")
    path = saved(perceptron(trains=True), folder)
    assert main(["plan", str(path), *FLAGS, STAGES, "-q"]) == 0
    assert main(["codegen", str(folder / PLAN), "-q"]) == 0
    for name, text in USERS.items():
        (folder / PLAN / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / PLAN / name).write_text(text)
    return folder


@pytest.fixture
def here(made: Path, command_line: CommandLine) -> CommandLine:
    """The command line in a copy of `made`."""
    shutil.copytree(made, command_line.folder, dirs_exist_ok=True)
    return command_line


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def without_owned(found: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in found.items() if name not in OWNED}


@pytest.mark.parametrize(
    "words",
    [
        ("plan", MODEL, "--gpus", 1),
        ("plan", "--from", PLAN),
        ("plan", "--from", PLAN, "--schedule", "gpipe"),
    ],
)
def test_a_plan_over_a_plan_touches_its_own_files_alone(
    here: CommandLine, words: tuple[object, ...]
) -> None:
    before = contents(PLAN)
    here.done(*words)
    after = contents(PLAN)
    assert without_owned(after) == without_owned(before)
    assert after["plan.json"] != before["plan.json"]
    summary = open_plan(PLAN).plan.summary
    assert (summary.devices, summary.schedule == "gpipe") == (
        1 if MODEL in words else 2,
        "gpipe" in words,
    )


def test_a_program_of_an_earlier_plan_is_told(here: CommandLine) -> None:
    assert "earlier plan" not in here.done("plan", MODEL, *FLAGS, STAGES).err
    assert (
        f"{PLAN}/program belongs to an earlier plan"
        in here.done("plan", "--from", PLAN, "--schedule", "gpipe").err
    )
    here.done("codegen", PLAN)
    assert "earlier plan" not in here.done("plan", "--from", PLAN).err


@pytest.mark.parametrize("name", OWNED)
def test_an_edited_file_of_a_plan_is_not_replaced(here: CommandLine, name: str) -> None:
    path = PLAN / name
    path.write_text(path.read_text() + "\n")
    edited = path.read_text()
    here.refuses(2, ("plan", MODEL, *FLAGS, STAGES), f"{path} was edited", "--force", "-o")
    before = without_owned(contents(PLAN))
    here.done("plan", MODEL, *FLAGS, STAGES, "--force")
    assert path.read_text() != edited
    assert without_owned(contents(PLAN)) == before


def test_a_plan_of_an_earlier_version_is_not_replaced(here: CommandLine) -> None:
    text = (PLAN / "plan.json").read_text()
    (PLAN / "plan.json").write_text(text.partition(',\n "sha256"')[0] + "}\n")
    assert open_plan(PLAN).plan.summary.devices == 2
    here.refuses(
        2,
        ("plan", MODEL),
        f"{PLAN}/config.yaml was edited, or an earlier version of autopipe wrote it",
    )


def test_an_edited_placement_that_is_planned_stays_to_the_byte(here: CommandLine) -> None:
    path = PLAN / "placement.yaml"
    path.write_text(
        "# My notes on this placement.\n"
        + path.read_text().replace("recompute: false", "recompute: true")
    )
    edited = path.read_bytes()
    for words in ((), (), ("--schedule", "gpipe")):
        here.done("plan", "--from", PLAN, *words)
        assert path.read_bytes() == edited
        assert open_plan(PLAN).plan.placement.stages[0].recompute
    here.refuses(2, ("plan", MODEL), f"{path} was edited")


def test_an_edited_configuration_that_is_planned_stays_or_is_copied(here: CommandLine) -> None:
    path = PLAN / "config.yaml"
    copy = PLAN / "config.edited.yaml"
    path.write_text("# My notes.\n" + path.read_text().replace("seed: 0", "seed: 7"))
    edited = path.read_bytes()
    here.done("plan", "--from", PLAN)
    assert path.read_bytes() == edited and not copy.exists()
    assert (
        f"the edited file is now {PLAN.absolute() / copy.name}"
        in here.done("plan", "--from", PLAN, "--schedule", "gpipe").err
    )
    assert copy.read_bytes() == edited
    assert "seed: 7\n" in path.read_text() and "name: gpipe\n" in path.read_text()
    path.write_text("# Other notes.\n" + path.read_text())
    again = path.read_bytes()
    here.done("plan", "--from", PLAN, "--schedule", "1f1b")
    assert (copy.read_bytes(), (PLAN / "config.edited-2.yaml").read_bytes()) == (edited, again)


def test_a_folder_that_is_no_plan_needs_force(here: CommandLine) -> None:
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("seed: 3\n")
    Path("mine/notes.txt").write_text("keep me")
    here.refuses(2, ("plan", MODEL, "-o", "mine"), "mine exists and is not a plan folder")
    here.done("plan", MODEL, "-o", "mine", "--force")
    assert Path("mine/notes.txt").read_text() == "keep me"
    open_plan(Path("mine"))


@pytest.mark.parametrize(
    "file", ["program/stage_00.py", "program/rank_001.py", "program/reference/run.py"]
)
def test_an_edited_program_is_not_replaced(here: CommandLine, file: str) -> None:
    path = PLAN / file
    path.write_text(path.read_text() + "\n# faster\n")
    here.refuses(2, ("codegen", PLAN), f"{path} was edited", "--force")
    before = contents(PLAN)
    here.done("plan", "--from", PLAN)
    assert without_owned(contents(PLAN)) == without_owned(before)
    here.done("codegen", PLAN, "--force")
    assert "# faster" not in path.read_text()


def test_codegen_keeps_what_lies_in_the_program_folder(here: CommandLine) -> None:
    for name in USERS:
        path = PLAN / "program" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        here.refuses(
            2, ("codegen", PLAN), f"{PLAN}/program contains a file that is not part of a program"
        )
        here.refuses(
            2,
            ("codegen", PLAN, "--force"),
            f"{PLAN}/program contains a file that is not part of a program",
        )
        shutil.rmtree(path.parent) if path.parent != PLAN / "program" else path.unlink()
        shutil.rmtree(PLAN / "program" / name.partition("/")[0], ignore_errors=True)
    here.done("codegen", PLAN)


KILLED = """
import os, signal, sys
from autopipe.cli.main import main

left = int(sys.argv[1])
replace = os.replace

def killing(source, target):
    global left
    if ".autopipe-plan-" in str(source):
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
    replace(source, target)

os.replace = killing
sys.exit(main(sys.argv[2:]))
"""


def test_a_kill_while_a_plan_is_written_leaves_the_old_plan_the_new_one_or_a_mixture_that_is_named(
    here: CommandLine,
) -> None:
    users = without_owned(contents(PLAN))
    named = []
    for number in itertools.count():
        shutil.rmtree("plan", ignore_errors=True)
        shutil.copytree(PLAN, "plan")
        words = ("plan", MODEL, "--gpus", "1", "-o", "plan", "-q")
        done = subprocess.run([sys.executable, "-c", KILLED, str(number), *words], check=False)
        assert done.returncode in (0, -signal.SIGKILL)
        try:
            assert open_prediction(Path("plan"))[0].summary.devices == (
                1 if done.returncode == 0 else 2
            )
            named.append("")
        except ConfigurationError as error:
            named.append(error.message.partition(" ")[0])
            assert "of a later plan, whose writing was interrupted, than plan.json" in error.message
            here.refuses(2, ("plan", "--from", "plan"), "whose writing was interrupted")
        assert users.items() <= contents(Path("plan")).items()
        here.done("plan", MODEL, "--gpus", "1", "-o", "plan")
        assert open_plan(Path("plan")).plan.summary.devices == 1
        assert without_owned(contents(Path("plan"))) == users
        if done.returncode == 0:
            break
    assert named == ["", *["plan/config.yaml"] * 4, ""]


def test_a_schedule_of_another_plan_is_named(here: CommandLine) -> None:
    here.done("plan", "--from", PLAN, "--schedule", "gpipe", "-o", "other")
    shutil.copy("other/schedule.json", PLAN)
    for words in (("show", PLAN), ("codegen", PLAN), ("compare", PLAN, "other")):
        here.refuses(
            2, words, f"{PLAN}/schedule.json was edited, or is of another plan than plan.json"
        )


def test_every_file_that_plan_writes_has_its_digest(here: CommandLine) -> None:
    found = read_digests(PLAN / "plan.json")
    assert found is not None and sorted(found.digests) == sorted(OWNED)
    assert edited_files([PLAN / name for name in OWNED], [found]) == []


WITHOUT_MODEL = (
    ("codegen", PLAN),
    ("show", PLAN),
    ("show", PLAN, "--tasks"),
    ("show", PLAN, "--html", "page.html"),
    ("explain", PLAN),
    ("explain", PLAN, "--stage", "1"),
    ("verify", PLAN / "program", "--static"),
)
"""Commands that read a plan folder without the ONNX file."""


def test_the_onnx_file_is_needed_for_weights_only(here: CommandLine) -> None:
    with_model = {words: here.done(*words, "--json").out for words in WITHOUT_MODEL[1:4]}
    Path(MODEL).rename("elsewhere.onnx")
    for words in WITHOUT_MODEL:
        shown = here.done(*words, "--json")
        assert shown.out == with_model.get(words, shown.out)
    here.done("compare", PLAN, PLAN)


def test_the_graph_is_not_read_from_the_onnx_file(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the ONNX file was read")

    monkeypatch.setattr("autopipe.passes.pipeline.reading.read_model", fail)
    for words in (("codegen", PLAN), ("show", PLAN, "--tasks"), ("explain", PLAN, "--stage", "1")):
        here.done(*words)


def test_a_folder_without_a_graph_is_read_from_the_onnx_file(here: CommandLine) -> None:
    """As an earlier version wrote it: `plan.json` has no digest of `graph.json`."""
    before = open_plan(PLAN)
    (PLAN / "graph.json").unlink()
    text = (PLAN / "plan.json").read_text()
    assert open_plan(PLAN).digest == before.digest
    (PLAN / "plan.json").write_text(text.partition(',\n "sha256"')[0] + "}\n")
    found = open_plan(PLAN)
    assert found.digest == before.digest
    assert found.problem == before.problem


def test_a_graph_that_was_edited_is_rejected(here: CommandLine) -> None:
    path = PLAN / "graph.json"
    path.write_text(path.read_text().replace('"loss": "', '"loss": "other '))
    for words in (("codegen", PLAN), ("explain", PLAN), ("show", PLAN, "--tasks")):
        here.refuses(2, words, "graph.json was edited", "plan again")


def test_an_edited_configuration_is_not_ignored(here: CommandLine) -> None:
    path = PLAN / "config.yaml"
    path.write_text(path.read_text().replace("mode: train", "mode: infer"))
    here.refuses(
        2, ("codegen", PLAN), "the plan is for mode train, but its configuration is for mode infer"
    )
