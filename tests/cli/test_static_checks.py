"""`verify --static`, and all of the way to a program, where there is no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure

WITHOUT_TORCH = """
import sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Nowhere())
from autopipe.cli.main import main
for command in sys.argv[1].split(";"):
    assert main(command.split()) == 0, command
"""
PLAN = (
    "--gpus 2 --cluster cpu-local --batch-size 4 --micro-batches 4 --strategy pipedream --schedule "
    "1f1b -q"
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan with its program, made without torch, that was verified so, too."""
    folder = tmp_path_factory.mktemp("static")
    small = {
        "loss": "true",
        "layers": "2",
        "hidden": "32",
        "heads": "2",
        "vocabulary": "64",
        "sequence": "8",
    }
    build(configure("gpt", small)).save(folder / "gpt.onnx")
    plan = folder / "gpt.plan"
    commands = (
        f"plan {folder}/gpt.onnx {PLAN} -o {plan};codegen {plan} -q;verify {plan}/program --static"
    )
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, commands], check=True)
    return plan


def checked(plan: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object], str]:
    code = main(["verify", str(plan / "program"), "--static", "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_what_is_proven(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = checked(plan, capsys)
    files = sum(path.is_file() for path in (plan / "program").rglob("*"))
    assert code == 0
    assert found == {"tasks": 16, "channels": found["channels"], "files": files, "edited": []}


def test_a_plan_folder_stands_for_its_program(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, of_program, _ = checked(plan, capsys)
    assert main(["verify", str(plan), "--static", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == of_program


def test_a_plan_folder_with_the_program_of_an_earlier_plan(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan / "program" / "manifest.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(json.dumps({**json.loads(text), "plan": "0" * 64}), encoding="utf-8")
    for words in (("--static",), ("--device", "cpu")):
        assert main(["verify", str(plan), *words]) == 2
        error, hint = capsys.readouterr().err.splitlines()
        assert f"{plan / 'program'} is not a program of the plan in {plan}" in error
        assert f"again with autopipe codegen {plan}" in hint
    path.write_text(text, encoding="utf-8")


def test_edited_files_are_named(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = plan / "program" / "stage_00.py"
    text = stage.read_text(encoding="utf-8")
    stage.write_text(text + "# mine\n", encoding="utf-8")
    code, found, err = checked(plan, capsys)
    stage.write_text(text, encoding="utf-8")
    assert code == 0 and found["edited"] == ["stage_00.py"]
    assert f"{stage} was edited" in err


def test_a_schedule_that_breaks_a_dependency_is_refused(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan / "schedule.json"
    text = path.read_text(encoding="utf-8")
    data = json.loads(text)
    first = data["tasks"][0]
    first[0]["block"], first[2]["block"] = first[2]["block"], first[0]["block"]
    path.write_text(json.dumps(data), encoding="utf-8")
    code, found, _ = checked(plan, capsys)
    path.write_text(text, encoding="utf-8")
    assert code == 2 and "error" in found


def test_the_program_of_another_plan_is_refused(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = plan / "program" / "manifest.json"
    text = manifest.read_text(encoding="utf-8")
    data = json.loads(text) | {"plan": "0" * 64}
    manifest.write_text(json.dumps(data), encoding="utf-8")
    code, found, _ = checked(plan, capsys)
    manifest.write_text(text, encoding="utf-8")
    assert code == 2 and "is not a program of the plan" in str(found["error"])
