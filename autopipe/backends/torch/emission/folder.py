"""Writing a program folder: all files or none."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autopipe.backends.torch.emission.manifest import FORMAT, Provenance, manifest_of
from autopipe.backends.torch.emission.rank import emit_rank, rank_module, stage_module
from autopipe.backends.torch.emission.stage import emit_stage
from autopipe.ir.errors import CodegenError, ConfigurationError
from autopipe.ir.graph import Constant, DType
from autopipe.ir.program import Program

_ENTRY = '''"""Runs the rank that the environment names; torch elastic, torchrun or SLURM start it on every process."""

import os
import runpy
import sys
from pathlib import Path

folder = Path(__file__).resolve().parent
sys.path.insert(0, str(folder))
rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
runpy.run_path(str(folder / f"rank_{rank:03d}.py"), run_name="__main__")

# Done: the process ends here. Torch's threads may still ask for the interpreter while it is being taken down, and
# then the whole process aborts.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
'''


@dataclass(frozen=True, slots=True)
class ProgramFiles:
    """A program, the folder inside the written one where it goes, and the docstrings of its stages and ranks.

    A rank whose docstring is None is not written.
    """

    name: str
    program: Program
    stage_titles: tuple[str, ...]
    rank_titles: tuple[str | None, ...]


def write_program(programs: Sequence[ProgramFiles], provenance: Provenance, folder: Path) -> None:
    """Write the files of `programs` into `folder`, replacing an earlier program there, or leave everything as it was.

    Raises CodegenError where the text would not be valid Python, ConfigurationError where the folder cannot be written.
    """
    rendered = [(each, _files(each, provenance)) for each in programs]

    def write(target: Path) -> None:
        for each, files in rendered:
            _write(target / each.name, files, each.program)

    replace_folder(folder, write)


def _files(files: ProgramFiles, provenance: Provenance) -> dict[str, str]:
    """Text by file name; every Python file is checked to parse."""
    program = files.program
    found = {
        f"{stage_module(stage.stage)}.py": emit_stage(stage, title)
        for stage, title in zip(program.stages, files.stage_titles, strict=True)
    }
    for rank, rank_title in zip(program.ranks, files.rank_titles, strict=True):
        if rank_title is not None:
            found[f"{rank_module(rank.rank)}.py"] = emit_rank(program, rank, rank_title)
    found["run.py"] = _ENTRY
    for name, text in found.items():
        _check(name, text)
    found["manifest.json"] = json.dumps(manifest_of(program, provenance), indent=1) + "\n"
    return found


def _check(name: str, text: str) -> None:
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise CodegenError(f"generated code is not valid Python: {error}", where=name) from error


def _write(folder: Path, files: dict[str, str], program: Program) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    constants = {f"c{index}": _stored(constant) for stage in program.stages for index, constant in stage.constants}
    np.savez(folder / "constants.npz", **constants)  # type: ignore[arg-type]


def _stored(constant: Constant) -> np.ndarray:
    """The numbers as numpy stores them: of bfloat16, which it does not know, the two bytes."""
    return constant.array.view("V2") if constant.value.dtype is DType.BFLOAT16 else constant.array


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a new folder beside `folder` with `write`, then put it in its place by renaming.

    Raises ConfigurationError where that cannot be done, or where `folder` holds something that is not a program; what
    was there is then still there.
    """
    folder = folder.absolute()
    if folder.exists() and not _is_replaceable(folder):
        raise ConfigurationError(
            f"{folder} holds something that is not part of a program", hint="choose another with -o"
        )
    absent = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
        ) as scratch:
            made = Path(scratch, "made")
            made.mkdir()
            write(made)
            _put(made, folder, Path(scratch, "former"))
    except OSError as error:
        raise ConfigurationError(
            f"{folder} cannot be written: {error.strerror}", hint="choose another with -o"
        ) from error
    finally:
        if not folder.exists():
            for parent in absent:
                with contextlib.suppress(OSError):  # somebody else has put something there meanwhile
                    parent.rmdir()


def _put(made: Path, folder: Path, former: Path) -> None:
    """Rename `made` to `folder`; what stood there becomes `former`, or stays where the renaming fails."""
    if not folder.exists():
        made.rename(folder)
        return
    folder.rename(former)
    try:
        made.rename(folder)
    except OSError:
        former.rename(folder)
        raise


_OURS = re.compile(r"rank_\d+\.py|stage_\d+\.py|run\.py|manifest\.json|constants\.npz|__pycache__")


def _is_replaceable(folder: Path) -> bool:
    """True if a folder is empty or holds a program and nothing else: a user's own files are never removed."""
    if not folder.is_dir():
        return False
    entries = list(folder.iterdir())
    return not entries or (
        _has_manifest(folder)
        and all(_OURS.fullmatch(entry.name) or (entry.is_dir() and _is_replaceable(entry)) for entry in entries)
    )


def _has_manifest(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "manifest.json").read_text(encoding="utf-8")).get("format") == FORMAT)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
