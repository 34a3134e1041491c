"""Plans and programs in other folders than those in which they were made, with their model or
without it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.ir.graph import FileSlice
from tests.cli.command_line import CommandLine
from tests.cli.test_bad_requests import perceptron
from tests.passes.frontend.building import saved

pytestmark = pytest.mark.distributed
PLAN = "made/model.plan"
ON_CPU = ("--device", "cpu")
STAGES = (
    "constraints=[{match: '*_[ab]', stage: 0, devices: [0]}, {match: '*_[cy]*', stage: 1, devices: "
    "[1]}]"
)
MANUAL = (
    "--strategy",
    "manual",
    "--schedule",
    "1f1b",
    "--gpus",
    2,
    "--micro-batches",
    2,
    "--set",
    STAGES,
)


@pytest.fixture
def made(command_line: CommandLine) -> CommandLine:
    """The command line in a folder where `made` has a model with stored weights, data, and a plan
    with a program.
    """
    folder = Path("made")
    folder.mkdir()
    saved(perceptron(trains=True), folder)
    np.savez(folder / "data.npz", x=np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8))
    data = ("--set", f"data.path={folder}/data.npz", "--set", f"eval.data={folder}/data.npz")
    command_line.done("plan", folder / "model.onnx", *MANUAL, "--batch-size", 4, *data, "-o", PLAN)
    command_line.done("codegen", PLAN)
    manifest = read_manifest(folder.absolute() / "model.plan/program")
    assert all(isinstance(parameter.storage, FileSlice) for parameter in manifest.parameters)
    return command_line


def losses(here: CommandLine, program: str, *flags: object) -> list[float]:
    """Return the losses of two steps of a program."""
    shown = here.done("launch", program, *ON_CPU, "--steps", 2, *flags, "--json")
    return [step["loss"] for step in json.loads(shown.out.splitlines()[-1])["steps"]]


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change the object in a JSON file."""
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def test_no_file_of_a_plan_has_the_path_of_its_folder(made: CommandLine) -> None:
    files = [path for path in Path(PLAN).rglob("*") if path.is_file()]
    assert {"plan.json", "config.yaml", "manifest.json"} <= {path.name for path in files}
    assert [path for path in files if str(made.folder).encode() in path.read_bytes()] == []


def test_a_plan_moved_with_its_model_and_data(made: CommandLine) -> None:
    before = losses(made, f"{PLAN}/program")
    Path("deep/down").mkdir(parents=True)
    shutil.move("made", "deep/down/moved")
    moved = "deep/down/moved/model.plan"
    assert losses(made, f"{moved}/program") == before
    made.done("verify", f"{moved}/program", *ON_CPU)
    made.done("verify", f"{moved}/program", "--static")
    made.done("explain", moved)
    made.done("codegen", moved)
    assert losses(made, f"{moved}/program") == before


def test_a_program_moved_without_its_model(made: CommandLine) -> None:
    before = losses(made, f"{PLAN}/program")
    Path("models").mkdir()
    shutil.move("made/model.onnx", "models/other name.onnx")
    Path("plans").mkdir()
    shutil.move(PLAN, "plans/p")
    shutil.move("made/data.npz", "data.npz")
    elsewhere = ("--model", "models/other name.onnx")
    data = ("--data", "data.npz", "--eval-data", "data.npz")
    assert losses(made, "plans/p/program", *elsewhere, *data) == before
    made.done("verify", "plans/p/program", *ON_CPU, *elsewhere, "--data", "data.npz")
    made.done("verify", "plans/p/program", "--static", *elsewhere)
    made.done("launch", "plans/p/program", "--dry-run", *ON_CPU, *elsewhere, "--data", "data.npz")
    for words in (("explain", "plans/p"), ("show", "plans/p", "--tasks"), ("codegen", "plans/p")):
        made.done(*words)
        made.done(*words, *elsewhere)
    gone = ("codegen", "plans/p", "--model", "nowhere.onnx")
    made.refuses(2, gone, "the model of the plan does not exist", "--model FILE")
    # The program was generated again, with the model where it is now.
    assert losses(made, "plans/p/program", *data) == before


def test_a_program_without_its_model_names_the_flag(made: CommandLine) -> None:
    Path("made/model.onnx").unlink()
    made.refuses(2, ("launch", f"{PLAN}/program", *ON_CPU), "does not exist", "--model FILE")
    made.refuses(2, ("verify", f"{PLAN}/program", *ON_CPU), "does not exist", "--model FILE")


@pytest.mark.parametrize("command", ["launch", "verify"])
def test_another_model_is_refused_by_its_digest(made: CommandLine, command: str) -> None:
    Path("wider").mkdir()
    other = saved(perceptron(width=9, trains=True), Path("wider"))
    program = f"{PLAN}/program"
    digest = json.loads(Path(program, "manifest.json").read_text(encoding="utf-8"))["model"][
        "sha256"
    ]
    says = ("the file is not the planned model", digest[:12], str(other))
    made.refuses(2, (command, program, *ON_CPU, "--model", other), *says)
    shutil.copy(other, "made/model.onnx")
    made.refuses(2, (command, program, *ON_CPU), *says[:2], "made/model.onnx")


def test_weights_that_are_not_small_may_differ(made: CommandLine) -> None:
    path = saved(perceptron(width=64, trains=True), made.folder)
    made.done("plan", path, *MANUAL, "--batch-size", 4, "-o", "wide.plan")
    made.done("codegen", "wide.plan")
    before = losses(made, "wide.plan/program")
    manifest = read_manifest(made.folder / "wide.plan/program")
    (first,) = (each.storage for each in manifest.parameters if each.value.name == "w0")
    assert isinstance(first, FileSlice)
    content = bytearray(path.read_bytes())
    content[first.offset : first.offset + first.length] = bytes(first.length)
    Path("zeros.onnx").write_bytes(content)
    after = losses(made, "wide.plan/program", "--model", "zeros.onnx")
    assert after[0] == 0.0 != before[0]


def test_programs_with_absolute_paths_are_read(made: CommandLine) -> None:
    before = losses(made, f"{PLAN}/program")
    manifests = list(Path(PLAN).rglob("manifest.json"))
    assert len(manifests) == 3
    for path in manifests:
        edit(
            path,
            lambda manifest: manifest["model"].update(path=str(made.folder / "made/model.onnx")),
        )
    edit(
        Path(PLAN, "plan.json"),
        lambda plan: plan.update(model=str(made.folder / "made/model.onnx")),
    )
    configuration = Path(PLAN, "config.yaml")
    text = configuration.read_text(encoding="utf-8")
    assert "path: ../model.onnx" in text
    configuration.write_text(
        text.replace("../model.onnx", f"{made.folder}/made/model.onnx"), encoding="utf-8"
    )
    shutil.move(PLAN, "elsewhere")
    made.done("explain", "elsewhere")
    assert (
        losses(made, "elsewhere/program", "--data", "made/data.npz", "--eval-data", "made/data.npz")
        == before
    )


def test_data_beside_the_model_moves_and_other_data_stays(made: CommandLine) -> None:
    shutil.copy("made/data.npz", "shared.npz")
    words = ("--set", "data.path=shared.npz", "--set", "eval.data=made/data.npz", "--batch-size", 4)
    made.done("plan", "made/model.onnx", *MANUAL, *words, "-o", "made/other.plan")
    made.done("codegen", "made/other.plan")
    shutil.move("made", "moved")
    manifest = read_manifest(made.folder / "moved/other.plan/program")
    assert manifest.data.path == str(made.folder / "shared.npz")
    assert manifest.evaluation.data == str(made.folder / "moved/data.npz")
    assert manifest.model == made.folder / "moved/model.onnx"


def test_a_plan_behind_a_link(made: CommandLine) -> None:
    Path("disk/plans").mkdir(parents=True)
    Path("linked").symlink_to(made.folder / "disk/plans", target_is_directory=True)
    made.done("plan", "made/model.onnx", *MANUAL, "--batch-size", 4, "-o", "linked/p")
    made.done("codegen", "linked/p")
    assert losses(made, "linked/p/program") == losses(made, "disk/plans/p/program")
