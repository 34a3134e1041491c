"""Damaged files of every kind that a command reads: any exit code is right but that of an internal
error.

Each case changes one file at random, by bytes or by the values of its JSON and YAML, and runs the
commands that read the file. The numbers come from the number of the case, so that a failure is
repeated by its name.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from autopipe.cli.main import main
from tests.cli.command_line import CommandLine
from tests.cli.test_bad_folders import MODEL, PLAN, PROGRAM, made
from tests.cli.test_checkpoint import WEIGHT, write_checkpoint
from tests.passes.frontend.building import INT64, floats, model, node, saved

__all__ = ["made"]

INTERNAL = 70
"""Exit code of an internal error."""
FEW = 2
"""Changes of each file in the default suite."""
MANY = 400
"""Changes of each file under the marker `sweep`."""
ODD_NUMBERS = (-1, 0, -1.5, 1e308, 2**31, 2**63, -(2**63), 2**70, float("nan"), float("inf"))
ODD_VALUES = (
    *ODD_NUMBERS,
    None,
    True,
    "",
    "x",
    "\0",
    "\ud800",
    "a" * 5000,
    [],
    {},
    [[]],
    {"x": 1},
    [None],
)
CONFIGURATION = Path("c.yaml")


def _changed_bytes(content: bytes, source: random.Random) -> bytes:
    """Cut, replace, repeat or insert a few bytes."""
    found = bytearray(content)
    for _ in range(source.choice((1, 1, 2, 8))):
        place = source.randrange(len(found) + 1)
        length = source.choice((1, 1, 4, 32))
        match source.randrange(5):
            case 0:
                del found[place:]
            case 1:
                found[place : place + length] = source.randbytes(length)
            case 2:
                del found[place : place + length]
            case 3:
                found[place:place] = found[place : place + length]
            case _:
                found[place:place] = source.choice(
                    (b"\xff", b"\0", b"-", b"9" * 30, b"[", b"{", b'"', b": ")
                )
    return bytes(found)


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) in a document of mappings and lists."""
    found = []
    if isinstance(document, dict | list):
        for key in list(document) if isinstance(document, dict) else range(len(document)):
            found += [(document, key), *_places(document[key])]
    return found


def _changed_values(content: bytes, source: random.Random) -> bytes:
    """Replace, negate or remove a value of a JSON document."""
    document = json.loads(content)
    container, key = source.choice(_places(document))
    old = container[key]
    match source.randrange(4):
        case 0:
            del container[key]
        case 1 if isinstance(old, int | float):
            container[key] = -old
        case 2 if isinstance(container, list):
            container.append(old)
        case _:
            container[key] = source.choice(ODD_VALUES)
    return json.dumps(document).encode()


def _changed_header(content: bytes, source: random.Random) -> bytes:
    """Replace, negate or remove a value in the JSON header of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    header = _changed_values(content[8 : 8 + length], source)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def _changed_text_header(content: bytes, source: random.Random) -> bytes:
    """Change bytes of the header of an `.npy` file, which is Python text."""
    length = int.from_bytes(content[8:10], "little")
    header = _changed_bytes(content[10 : 10 + length], source)
    return content[:8] + len(header).to_bytes(2, "little") + header + content[10 + length :]


Change = Callable[[bytes, random.Random], bytes]
PLAN_AGAIN = ("plan", MODEL, "--gpus", 2, "--strategy", "pipedream", "-o", "p", "-q")
CODEGEN = ("codegen", PLAN, "-q", "--force")
LAUNCH = ("launch", PROGRAM, "--device", "cpu", "--dry-run", "-q")
TOKENS = Path("tokens.onnx.plan/program")
READ_TOKENS = ("launch", TOKENS, "--device", "cpu", "--dry-run", "-q", "--data", "tokens.bin")
"""The first samples of a file of tokens go through a dry run."""
STEP = Path("saved/step_00000003")
CHECKPOINT: tuple[tuple[object, ...], ...] = (
    ("checkpoint", "inspect", "saved"),
    ("checkpoint", "verify", "saved"),
    ("checkpoint", "export", "saved", "-o", "exported.safetensors", "--force"),
)
IMPORT = (
    "checkpoint",
    "import",
    "w.safetensors",
    "--model",
    "w.onnx",
    "-o",
    "imported.onnx",
    "--force",
)
IMPORT_INDEX = ("checkpoint", "import", "w.safetensors.index.json", *IMPORT[3:])
CASES: dict[str, tuple[Path, Change, tuple[tuple[object, ...], ...]]] = {
    "model": (Path(MODEL), _changed_bytes, (("inspect", MODEL), PLAN_AGAIN)),
    "plan": (
        PLAN / "plan.json",
        _changed_values,
        (("show", PLAN), ("compare", PLAN, PLAN), CODEGEN),
    ),
    "plan's bytes": (PLAN / "plan.json", _changed_bytes, (("show", PLAN), CODEGEN)),
    "schedule": (
        PLAN / "schedule.json",
        _changed_values,
        (("show", PLAN / "schedule.json"), ("show", PLAN)),
    ),
    "plan's configuration": (
        PLAN / "config.yaml",
        _changed_bytes,
        (CODEGEN, ("plan", "--from", PLAN, "-q")),
    ),
    "plan's placement": (
        PLAN / "placement.yaml",
        _changed_bytes,
        (("plan", "--from", PLAN, "-q"),),
    ),
    "configuration": (CONFIGURATION, _changed_bytes, (("config", "check", CONFIGURATION),)),
    "manifest": (PROGRAM / "manifest.json", _changed_values, (LAUNCH,)),
    "checkpoint": (STEP / "manifest.json", _changed_values, CHECKPOINT),
    "checkpoint's bytes": (STEP / "manifest.json", _changed_bytes, CHECKPOINT),
    "shard": (STEP / "rank_00000.safetensors", _changed_bytes, CHECKPOINT),
    "shard's header": (STEP / "rank_00000.safetensors", _changed_header, CHECKPOINT),
    "safetensors": (Path("w.safetensors"), _changed_bytes, (IMPORT,)),
    "safetensors' header": (Path("w.safetensors"), _changed_header, (IMPORT,)),
    "index of safetensors": (Path("w.safetensors.index.json"), _changed_values, (IMPORT_INDEX,)),
    "weights in ONNX": (
        Path("other.onnx"),
        _changed_bytes,
        (("checkpoint", "import", "other.onnx", *IMPORT[3:]),),
    ),
    "npz": (Path("data.npz"), _changed_bytes, ((*LAUNCH, "--data", "data.npz"),)),
    "npy": (Path("arrays/x.npy"), _changed_bytes, ((*LAUNCH, "--data", "arrays"),)),
    "npy's header": (Path("arrays/x.npy"), _changed_text_header, ((*LAUNCH, "--data", "arrays"),)),
    "tokens": (Path("tokens.bin"), _changed_bytes, (READ_TOKENS,)),
    "index of tokens": (Path("tokens.idx"), _changed_bytes, (READ_TOKENS,)),
}
"""The file that is changed, how, and the commands that read it."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, files of weights and of data, and the program of a model that
    reads tokens.
    """
    folder = tmp_path_factory.mktemp("stored")
    product = saved(
        model([node("MatMul", "x w", "y")], {"x": [2, 6]}, "y", {"w": WEIGHT}), folder, "w.onnx"
    )
    shutil.copy(product, folder / "other.onnx")
    write_checkpoint(folder / "saved", product, 3, WEIGHT)
    safetensors.numpy.save_file({"w": WEIGHT}, folder / "w.safetensors")
    (folder / "w.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {"w": "w.safetensors"}}'
    )
    np.savez(folder / "data.npz", x=floats(8, 8))
    (folder / "arrays").mkdir()
    np.save(folder / "arrays" / "x.npy", floats(8, 8))
    (np.arange(64, dtype=np.uint16) % 16).tofile(folder / "tokens.bin")
    # The index of Megatron-LM: magic, version, type 8 (uint16), sequences, documents, then lengths,
    # offsets, documents.
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1, 2)
    (folder / "tokens.idx").write_bytes(head + struct.pack("<iqqq", 64, 0, 0, 1))
    lookup = [node("Gather", "table tokens", "rows"), node("MatMul", "rows w", "y")]
    held = {"table": floats(16, 8), "w": floats(8, 4)}
    tokens = saved(
        model(lookup, {"tokens": (INT64, ["batch", 4])}, "y", held), folder, "tokens.onnx"
    )
    assert (
        main(
            [
                "plan",
                str(tokens),
                "--gpus",
                "1",
                "--strategy",
                "data_parallel",
                "--batch-size",
                "4",
                "-q",
            ]
        )
        == 0
    )
    assert main(["codegen", f"{tokens}.plan", "-q"]) == 0
    return folder


@pytest.fixture
def here(made: Path, stored: Path, command_line: CommandLine) -> CommandLine:
    """The command line in a copy of `made` and `stored`, with a configuration."""
    shutil.copytree(made, command_line.folder, dirs_exist_ok=True)
    shutil.copytree(stored, command_line.folder, dirs_exist_ok=True)
    text = "strategy: {name: pipedream}\nmicro_batches: 2\noptimizer: {name: adamw, lr: 0.1}\n"
    CONFIGURATION.write_text(f"{text}cluster: {{preset: a100-80gb}}\n")
    return command_line


def _run(here: CommandLine, name: str, numbers: range) -> None:
    path, change, commands = CASES[name]
    pristine = here.folder.parent / "pristine"
    shutil.copytree(here.folder, pristine, symlinks=True)
    content = path.read_bytes()
    failures = []
    for number in numbers:
        changed = change(content, random.Random(f"{name} {number}"))
        for words in commands:
            shutil.rmtree(here.folder / PLAN)
            shutil.copytree(pristine / PLAN, here.folder / PLAN)
            path.write_bytes(changed)
            shown = here.run(*words)
            if shown.code == INTERNAL or "internal error" in shown.err:
                failures.append(
                    f"{name} {number}, {' '.join(map(str, words))}: {shown.err.strip()[:300]}"
                )
    assert not failures, "\n".join(failures)


def test_files_that_are_not_damaged(here: CommandLine) -> None:
    """Every command but one ends well on the files as they are, so that changes reach all of its
    reading.
    """
    every = dict.fromkeys(words for _, _, commands in CASES.values() for words in commands)
    # A schedule of a plan, which `show` refuses by its content.
    del every["show", PLAN / "schedule.json"]
    for words in every:
        here.done(*words)


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_no_internal_error(here: CommandLine, name: str) -> None:
    _run(here, name, range(FEW))


@pytest.mark.sweep
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", CASES)
def test_many_damaged_files_are_no_internal_errors(here: CommandLine, name: str) -> None:
    _run(here, name, range(FEW, MANY))
