"""Every file that a command writes: it replaces a file of its own kind that the command does not
read, and no other.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import numpy as np
import onnx
import pytest
import safetensors.numpy

from autopipe.cli.main import COMMANDS, autopipe, main
from autopipe.ir.measured_costs import Costs, DeviceCosts, costs_text
from autopipe.ir.output_kinds import (
    COSTS,
    NPY,
    NPZ,
    ONNX,
    ORDER,
    PICTURE,
    REPORT,
    SAFETENSORS,
    SCHEDULE,
    TOKENS,
    TRACE,
    ZOO_MODEL,
    FileKind,
    OutputFile,
)
from tests.cli.command_line import CommandLine
from tests.cli.test_bad_requests import MODEL, perceptron
from tests.cli.test_checkpoint import WEIGHT, write_checkpoint
from tests.full_disk import small_files
from tests.passes.frontend.building import floats, model, node, saved

PLAN = f"{MODEL}.plan"
BLOCKS = """
format: autopipe.placement/1
devices: 2
blocks:
  - {name: F, devices: [0], time: 1, memory: 1}
  - {name: B, devices: [1], time: 2, memory: -1, after: [F]}
"""
OUT = "OUT"
FACTORY = """
import torch


def factory():
    return torch.nn.Linear(2, 3), torch.zeros(4, 2)
"""
"""A Python file whose function returns a module and an example of its input."""
CASES: Mapping[str, tuple[str, str]] = {
    "show --html": (f"show {PLAN} --html OUT", f"{PLAN}/plan.json"),
    "show --trace": (f"show {PLAN} --trace OUT", f"{PLAN}/schedule.json"),
    "show --csv": (f"show {PLAN} --csv OUT", f"{PLAN}/config.yaml"),
    "show --svg": (f"show {PLAN} --svg OUT", f"{PLAN}/placement.yaml"),
    "compare --html": (f"compare {PLAN} {PLAN} --html OUT", f"{PLAN}/plan.json"),
    "schedule --output": ("schedule blocks.yaml --micro-batches 2 -o OUT", "blocks.yaml"),
    "plan --annotate": (f"plan {MODEL} --gpus 1 --annotate OUT", MODEL),
    "zoo build --output": ("zoo build dlrm --set rows=24 -o OUT", MODEL),
    "checkpoint export --output": (
        "checkpoint export saved -o OUT",
        "saved/step_00000003/manifest.json",
    ),
    "checkpoint export --output x": (
        "checkpoint export saved -o OUT.safetensors",
        "saved/step_00000003/rank_00000.safetensors",
    ),
    "checkpoint import --output": (
        "checkpoint import given.safetensors --model product.onnx -o OUT",
        "product.onnx",
    ),
    "profile --merge --output": ("profile --merge one.costs other.costs -o OUT", "one.costs"),
}
"""Commands by the option that names their output, and a file that each reads or that is part of a
plan.
"""
REFUSED: Mapping[str, tuple[str, str]] = {
    "export --output": ("export linear.py:factory -o OUT", "linear.py"),
    "profile --output": (f"profile {MODEL} --seconds 1 -o OUT", MODEL),
    "launch --trace": (
        f"launch {PLAN}/program --device cpu --trace OUT",
        f"{PLAN}/program/manifest.json",
    ),
    "launch --outputs": (
        "launch infer/program --device cpu --data data.npz --outputs OUT.npz",
        "data.npz",
    ),
    "generate --output": ("generate infer --prompts 1,2 -o OUT.npy", "infer/plan.json"),
}
"""Commands that take seconds, or measure or run ranks: they are only refused here."""
INPUTS = {
    *(f"{command} --model" for command in ("show", "explain", "generate", "codegen", "launch", "verify")),
    "launch --checkpoint", "launch --log", "show --measured", "checkpoint export --model", "checkpoint import --model",
    "plan --from", "plan --output", "codegen --output",
}  # fmt: skip
"""Options with the path of an input, or of a folder whose files have rules of their own
(`test_plan_folder.py`).
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the inputs of all commands."""
    folder = tmp_path_factory.mktemp("made")
    path = saved(perceptron(trains=True), folder)
    for words in (
        f"plan {path} --gpus 1 --strategy data_parallel -o {folder / PLAN}",
        f"codegen {folder / PLAN}",
    ):
        assert main([*words.split(), "-q"]) == 0
    (folder / "inferred").mkdir()
    saved(perceptron(), folder / "inferred")
    infer = f"plan {folder}/inferred/{MODEL} --gpus 1 --strategy data_parallel -o {folder}/infer"
    for words in (infer, f"codegen {folder}/infer"):
        assert main([*words.split(), "-q"]) == 0
    (folder / "blocks.yaml").write_text(BLOCKS)
    (folder / "linear.py").write_text(FACTORY)
    for name in ("one.costs", "other.costs"):
        (folder / name).write_text(costs_text(Costs((DeviceCosts("core", ("by hand",)),))))
    product = model([node("MatMul", "x w", "y")], {"x": [2, 6]}, "y", {"w": floats(6, 4)})
    onnx.save(product, folder / "product.onnx")
    safetensors.numpy.save_file({"w": WEIGHT}, folder / "given.safetensors")
    np.savez(folder / "data.npz", x=np.zeros((2, 4), np.float32))
    return folder


@pytest.fixture
def here(made: Path, command_line: CommandLine) -> CommandLine:
    """The command line in a copy of `made`, with a checkpoint of its `product.onnx`."""
    shutil.copytree(made, command_line.folder, dirs_exist_ok=True)
    write_checkpoint(Path("saved"), Path("product.onnx").absolute(), 3, WEIGHT)
    return command_line


def target_of(words: str) -> Path:
    """The path of a command's output."""
    return Path(next(word for word in words.split() if word.startswith(OUT)))


def options() -> Iterator[str]:
    """Every option of a command whose value is a path, as `COMMAND --OPTION`."""

    def walk(command: click.Command, name: str) -> Iterator[str]:
        if isinstance(command, click.Group):
            for below in command.list_commands(click.Context(command)):
                found = command.get_command(click.Context(command), below)
                assert found is not None
                yield from walk(found, f"{name} {below}".strip())
        for each in command.params:
            if isinstance(each, click.Option) and isinstance(each.type, click.Path):
                yield f"{name} {max(each.opts, key=len)}"

    yield from walk(autopipe, "")


def test_every_option_with_a_path_is_known() -> None:
    assert set(COMMANDS) >= {name.split()[0] for name in options()}
    known = {name.removesuffix(" x") for name in (*CASES, *REFUSED)} - {"profile --merge --output"}
    assert set(options()) == known | INPUTS


@pytest.mark.parametrize("name", [*CASES, *REFUSED])
@pytest.mark.parametrize(
    "content", ["my notes\n", "{}", "<html></html>", "PK\x03\x04", "\x08\x07\x12\x03abc"]
)
def test_a_file_of_another_kind_is_kept(here: CommandLine, name: str, content: str) -> None:
    words = {**CASES, **REFUSED}[name][0]
    target_of(words).write_text(content)
    here.refuses(2, tuple(words.split()), f"{target_of(words)} exists and is not ", "--force")


@pytest.mark.parametrize("name", [*CASES, *REFUSED])
def test_an_input_and_a_part_of_a_plan_are_kept(here: CommandLine, name: str) -> None:
    words, read = {**CASES, **REFUSED}[name]
    link = target_of(words)
    link.symlink_to(read)
    here.refuses(2, tuple(words.split()), f"{link} exists and ", "--force")
    if link.name == OUT:
        here.refuses(2, tuple(words.replace(OUT, read).split()), f"{read} exists and ", "--force")


@pytest.mark.parametrize("name", CASES)
def test_an_output_replaces_an_earlier_one_by_force_another_file_and_follows_links(
    here: CommandLine, name: str
) -> None:
    words = CASES[name][0].split()
    target = target_of(CASES[name][0])
    first = target.with_name(f"first {target.name}")
    target.touch()
    here.done(*words)
    target.rename(first)
    shutil.copy(first, target)
    before = target.stat().st_ino
    here.done(*words)
    assert target.stat().st_ino != before
    target.write_text("my notes")
    here.done(*words, "--force")
    assert target.read_bytes()[:8] == first.read_bytes()[:8]
    real = Path("below", target.name)
    real.parent.mkdir(exist_ok=True)
    if name != "plan --annotate":
        # Weights next to the model would not be found from another folder.
        target.unlink()
        target.symlink_to(real)
        here.done(*words)
        assert target.is_symlink() and real.read_bytes()[:8] == first.read_bytes()[:8]


@pytest.mark.parametrize("name", CASES)
def test_a_device_and_a_pipe_are_written_to(here: CommandLine, name: str) -> None:
    words = CASES[name][0].split()
    target = target_of(CASES[name][0])
    target.symlink_to(os.devnull)
    here.done(*words)
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode) and target.is_symlink()
    target.unlink()
    os.mkfifo(target)
    with subprocess.Popen(["cat", target], stdout=subprocess.PIPE) as reader:
        here.done(*words)
        content = reader.communicate()[0]
    assert content and stat.S_ISFIFO(target.stat().st_mode)
    target.unlink()
    target.symlink_to("/dev/full")
    shown = here.run(*words)
    assert shown.code == 2, shown.err
    assert (
        f"{target}" in shown.err
        and "No space left on device" in shown.err
        and "internal error" not in shown.err
    )


@pytest.mark.parametrize("name", CASES)
def test_a_full_disk_is_told_in_one_line_with_the_files_name(here: CommandLine, name: str) -> None:
    words = CASES[name][0]
    with small_files(4):
        here.refuses(2, tuple(words.split()), str(target_of(words)), "File too large")
    target_of(words).touch()
    with small_files(4):
        here.refuses(2, tuple(words.split()), str(target_of(words)), "File too large")


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (f"plan {MODEL} --gpus 1 --strategy data_parallel", f"{PLAN}/config.yaml"),
        (f"plan {MODEL} --gpus 1 --strategy data_parallel -o new", "new/config.yaml"),
        (f"codegen {PLAN}", f"{PLAN}/program/run.py"),
        (f"codegen {PLAN} -o new", "new/run.py"),
    ],
)
def test_a_full_disk_leaves_a_plan_and_a_program_as_they_were(
    here: CommandLine, words: str, file: str
) -> None:
    with small_files(64):
        here.refuses(2, tuple(words.split()), file, "File too large")


def test_a_files_weights_do_not_replace_another_file(here: CommandLine) -> None:
    from autopipe.configs import zoo

    built = zoo.build(zoo.configure("dlrm", {"rows": "24"}))
    Path("m.onnx.data").write_text("mine")
    with pytest.raises(Exception, match="exists and does not contain the weights of"):
        built.save(Path("m.onnx"), inline_limit=0)
    assert Path("m.onnx.data").read_text() == "mine" and not Path("m.onnx").exists()
    built.save(Path("m.onnx"), inline_limit=0, force=True)
    built.save(Path("m.onnx"), inline_limit=0)


KINDS: Mapping[str, FileKind] = {
    "show --html": REPORT, "show --trace": TRACE, "show --csv": ORDER, "show --svg": PICTURE, "compare --html": REPORT,
    "schedule --output": SCHEDULE, "plan --annotate": ONNX, "zoo build --output": ZOO_MODEL,
    "checkpoint export --output": ONNX, "checkpoint export --output x": SAFETENSORS,
    "checkpoint import --output": ONNX, "profile --merge --output": COSTS,
}  # fmt: skip


def test_kinds_are_told_by_content(here: CommandLine) -> None:
    found: dict[str, Path] = {}
    for name, (words, _) in CASES.items():
        here.done(*words.split())
        found[name] = target_of(words).rename(name.replace(" ", "_"))
    np.save("a.npy", np.zeros(3))
    Path("t.json").write_text("[[1, 2], []]")
    files = {
        **{path: KINDS[name] for name, path in found.items()},
        Path("data.npz"): NPZ,
        Path("a.npy"): NPY,
    }
    files[Path("t.json")] = TOKENS
    for path, kind in files.items():
        recognised = {
            each.words for each in {*KINDS.values(), NPZ, NPY, TOKENS} if each.recognises(path)
        }
        assert recognised == (
            {ONNX.words, ZOO_MODEL.words} if kind is ZOO_MODEL else {kind.words}
        ), path


def test_a_socket_and_a_folder_are_refused(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path, says in (
            (tmp_path / "socket", "is not a regular file"),
            (tmp_path, "is a folder"),
        ):
            with pytest.raises(Exception, match=says):
                OutputFile(path, TRACE).check()
