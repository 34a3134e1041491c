"""A program folder is written whole or not at all, and never in place of something else."""

from __future__ import annotations

import hashlib
import json
import os
import py_compile
import stat
from pathlib import Path

import numpy as np
import pytest

from autopipe.backends.torch.codegen import program as folder_module
from autopipe.backends.torch.codegen.archive import write_arrays
from autopipe.backends.torch.codegen.program import (
    ProgramFiles,
    Provenance,
    replace_folder,
    write_program,
)
from autopipe.backends.torch.codegen.stage_file import StageSource
from autopipe.ir import output_files
from autopipe.ir.errors import CodegenError, ConfigurationError
from autopipe.ir.problem import Optimizer
from autopipe.ir.program import StageCode
from autopipe.passes.lower.lower import lower
from tests.distributed.support.builder import Builder, mlp
from tests.distributed.support.running import one_device

PROVENANCE = Provenance("model.onnx", "", "", Optimizer(), "fp32", 0, 0.1, 0.2)


def files(name: str = "", layers: int = 1) -> ProgramFiles:
    graph, loss = mlp(layers)
    return ProgramFiles(
        name, lower(graph, *one_device(graph, 2, True, 4), loss), ("A stage.",), ("A rank.",)
    )


def listing(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, hidden files too."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_program_and_its_reference(tmp_path: Path) -> None:
    write_program([files(), files("reference")], PROVENANCE, tmp_path / "deep" / "program")
    found = listing(tmp_path)
    one = {
        "rank_000.py",
        "stage_00.py",
        "stage_00.json",
        "run.py",
        "manifest.json",
        "constants.npz",
    }
    assert set(found) == {f"deep/program/{sub}{name}" for sub in ("", "reference/") for name in one}
    for path in (tmp_path / "deep" / "program").rglob("*.py"):
        py_compile.compile(str(path), doraise=True)


def test_the_same_program_is_the_same_text(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_program([files()], PROVENANCE, tmp_path / name)
    assert listing(tmp_path / "one") == listing(tmp_path / "two")


def test_permissions_follow_the_mask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_program([files()], PROVENANCE, tmp_path / "program")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "program").stat().st_mode) == 0o750


def test_an_earlier_program_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "program"
    write_program([files(layers=3), files("forward")], PROVENANCE, target)
    py_compile.compile(str(target / "stage_00.py"))
    write_program([files()], PROVENANCE, target)
    write_program([files()], PROVENANCE, tmp_path / "fresh")
    assert listing(target) == listing(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "program"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    write_program([files()], PROVENANCE, tmp_path / "program")
    assert (tmp_path / "program" / "manifest.json").exists()


@pytest.mark.parametrize(
    "extra", ["notes.txt", "checkpoints/step_1/weights.safetensors", "reference/mine.txt"]
)
@pytest.mark.parametrize("program", [False, True])
def test_other_peoples_files_are_kept(tmp_path: Path, extra: str, program: bool) -> None:
    target = tmp_path / "program"
    if program:
        write_program([files(), files("reference")], PROVENANCE, target)
    (target / extra).parent.mkdir(parents=True, exist_ok=True)
    (target / extra).write_text("mine", encoding="utf-8")
    before = listing(tmp_path)
    with pytest.raises(ConfigurationError, match="contains a file that is not part of a program"):
        write_program([files()], PROVENANCE, target)
    assert listing(tmp_path) == before


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "program").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="contains a file that is not part of a program"):
        write_program([files()], PROVENANCE, tmp_path / "program")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_program([files()], PROVENANCE, tmp_path / "program" / "below")
    assert (tmp_path / "program").read_text(encoding="utf-8") == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_parent_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_program([files()], PROVENANCE, tmp_path / "closed" / "program")


@pytest.mark.parametrize("exists", [False, True])
def test_a_disk_that_is_full_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    target = tmp_path / "program"
    if exists:
        write_program([files(layers=2)], PROVENANCE, target)
    before = listing(tmp_path)

    def full(*arguments: object, **keywords: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "write_arrays", full)
    with pytest.raises(ConfigurationError, match="cannot be written: No space left on device"):
        write_program([files()], PROVENANCE, target)
    assert listing(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == (["program"] if exists else [])


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_renaming_that_fails_leaves_the_former_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    target = tmp_path / "program"
    write_program([files(layers=2)], PROVENANCE, target)
    before = listing(tmp_path)

    def failing(one: Path, other: Path) -> bool:
        raise OSError(5, "Input/output error", str(other))

    if not can_exchange:
        monkeypatch.setattr(output_files, "exchange_paths", lambda one, other: False)
    monkeypatch.setattr(
        *((output_files, "exchange_paths") if can_exchange else (os, "replace")), failing
    )
    with pytest.raises(ConfigurationError, match="cannot be written: Input/output error"):
        write_program([files()], PROVENANCE, target)
    assert listing(tmp_path) == before


def test_a_system_that_cannot_exchange_folders_replaces_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "program"
    write_program([files(layers=3), files("forward")], PROVENANCE, target)
    write_program([files(), files("reference")], PROVENANCE, tmp_path / "fresh")
    monkeypatch.setattr(output_files, "exchange_paths", lambda one, other: False)
    write_program([files(), files("reference")], PROVENANCE, target)
    assert listing(target) == listing(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "program"]


@pytest.mark.parametrize(
    "name", ["stage_00.py", "run.py", "manifest.json", "constants.npz", "reference/rank_000.py"]
)
def test_edited_files_are_kept_and_named(tmp_path: Path, name: str) -> None:
    target = tmp_path / "program"
    write_program([files(), files("reference")], PROVENANCE, target)
    path = target / name
    path.write_bytes(path.read_bytes() + b"\n")
    before = listing(tmp_path)
    with pytest.raises(ConfigurationError, match=f"{name} was edited"):
        write_program([files(layers=2)], PROVENANCE, target)
    assert listing(tmp_path) == before
    write_program([files(layers=2)], PROVENANCE, target, force=True)
    write_program([files(layers=2)], PROVENANCE, tmp_path / "fresh")
    assert listing(target) == listing(tmp_path / "fresh")


def test_files_of_others_are_kept_by_force_too(tmp_path: Path) -> None:
    target = tmp_path / "program"
    write_program([files()], PROVENANCE, target)
    (target / "__pycache__").mkdir()
    (target / "__pycache__/notes.txt").write_text("mine")
    before = listing(tmp_path)
    with pytest.raises(ConfigurationError, match=r"not part of a program: .*notes\.txt"):
        write_program([files()], PROVENANCE, target, force=True)
    assert listing(tmp_path) == before


def test_a_program_without_digests_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "program"
    write_program([files()], PROVENANCE, target)
    manifest = json.loads((target / "manifest.json").read_text())
    del manifest["sha256"]
    (target / "manifest.json").write_text(json.dumps(manifest))
    before = listing(tmp_path)
    with pytest.raises(
        ConfigurationError, match="edited, or an earlier version of autopipe wrote it"
    ):
        write_program([files()], PROVENANCE, target)
    assert listing(tmp_path) == before


def test_a_link_to_a_program_stays_a_link(tmp_path: Path) -> None:
    write_program([files(layers=2)], PROVENANCE, tmp_path / "there/program")
    (tmp_path / "program").symlink_to("there/program")
    write_program([files()], PROVENANCE, tmp_path / "program")
    write_program([files()], PROVENANCE, tmp_path / "fresh/program")
    assert (tmp_path / "program").is_symlink()
    assert listing(tmp_path / "there/program") == listing(tmp_path / "fresh/program")


def test_an_interruption_while_writing_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "program"
    write_program([files()], PROVENANCE, target)
    before = listing(tmp_path)

    def interrupted(folder: Path) -> None:
        (folder / "half").write_text("half", encoding="utf-8")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_folder(target, interrupted)
    assert listing(tmp_path) == before


def test_text_that_is_no_python_is_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def emit_invalid(stage: StageCode, title: str, style: str, is_training: bool) -> StageSource:
        return StageSource("def forward(:\n", tuple(each.name for each in stage.inputs), None)

    monkeypatch.setattr(folder_module, "emit_stage", emit_invalid)
    with pytest.raises(CodegenError, match="generated code is not valid Python") as caught:
        write_program([files()], PROVENANCE, tmp_path / "program")
    assert "stage_00.py" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_operators_that_torch_lacks_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autopipe.backends.torch.codegen import stage

    monkeypatch.delitem(stage.EMITTERS, "Tanh")
    with pytest.raises(CodegenError, match="operator Tanh is not supported"):
        write_program([files()], PROVENANCE, tmp_path / "program")
    assert not list(tmp_path.iterdir())


def test_constants_without_elements_are_kept(tmp_path: Path) -> None:
    builder = Builder()
    empty = builder.constant([], dtype=builder.dtype)
    value = builder.node("Concat", builder.parameter((4,)), empty, axis=0)
    loss = builder.mean_square(value)
    graph = builder.graph(loss)
    program = lower(graph, *one_device(graph, 1, True, 4), loss)
    write_program(
        [ProgramFiles("", program, ("A stage.",), ("A rank.",))], PROVENANCE, tmp_path / "program"
    )
    with np.load(tmp_path / "program" / "constants.npz") as stored:
        assert stored["c0"].shape == (0,)


def test_constants_have_the_same_bytes_by_every_release_of_python(tmp_path: Path) -> None:
    """Its own header for sizes of eight bytes changed in Python 3.11.4."""
    write_arrays(
        tmp_path / "constants.npz",
        {"c0": np.arange(6).reshape(2, 3), "c3": np.array(1.5, np.float32)},
    )
    assert (
        hashlib.sha256((tmp_path / "constants.npz").read_bytes()).hexdigest()[:12] == "df3925f43314"
    )
    with np.load(tmp_path / "constants.npz", allow_pickle=False) as stored:
        assert stored["c0"].tolist() == [[0, 1, 2], [3, 4, 5]] and stored["c3"] == 1.5
