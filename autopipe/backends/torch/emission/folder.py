"""Writing a program folder: all files or none."""

from __future__ import annotations

import ast
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from autopipe.backends.torch.emission.manifest import FORMAT, Provenance, manifest_of
from autopipe.backends.torch.emission.rank import emit_rank, rank_module, stage_module
from autopipe.backends.torch.emission.stage import emit_stage
from autopipe.ir.errors import CodegenError, ConfigurationError
from autopipe.ir.program import Program, RankCode, StageCode

_ENTRY = '''"""Runs the rank that the environment names; started on every process by torch elastic, torchrun or SLURM."""

import os
import runpy
import sys
from pathlib import Path

folder = Path(__file__).resolve().parent
sys.path.insert(0, str(folder))
rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
runpy.run_path(str(folder / f"rank_{rank:03d}.py"), run_name="__main__")
'''


def write_program(
    program: Program,
    provenance: Provenance,
    folder: Path,
    *,
    stage_title: Callable[[StageCode], str],
    rank_title: Callable[[RankCode], str],
) -> None:
    """Write the files of `program` into `folder`, replacing an earlier program there, or leave everything as it was.

    Raises CodegenError where the text would not be valid Python, ConfigurationError where the folder cannot be written.
    """
    files = {f"{stage_module(stage.stage)}.py": emit_stage(stage, stage_title(stage)) for stage in program.stages}
    files |= {f"{rank_module(rank.rank)}.py": emit_rank(program, rank, rank_title(rank)) for rank in program.ranks}
    files["run.py"] = _ENTRY
    for name, text in files.items():
        _check(name, text)
    files["manifest.json"] = json.dumps(manifest_of(program, provenance), indent=1) + "\n"
    constants = {f"c{index}": constant.array for stage in program.stages for index, constant in stage.constants}
    replace_folder(folder, lambda target: _write(target, files, constants))


def _check(name: str, text: str) -> None:
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise CodegenError(f"generated code is not valid Python: {error}", where=name) from error


def _write(folder: Path, files: dict[str, str], constants: dict[str, np.ndarray]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    np.savez(folder / "constants.npz", allow_pickle=False, **constants)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a new folder beside `folder` with `write`, then put it in its place by renaming.

    Raises ConfigurationError where that cannot be done, or where `folder` holds something that is not a program.
    """
    folder = folder.absolute()
    if folder.exists() and not _is_program(folder):
        raise ConfigurationError(f"{folder} exists and is not a program folder", hint="choose another with -o")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ConfigurationError(
            f"{folder} cannot be written: {error.strerror}", hint="choose another with -o"
        ) from error
    try:
        write(scratch)
        scratch.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(scratch, folder)
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_program(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    manifest = folder / "manifest.json"
    if not manifest.exists():
        return not any(folder.iterdir())
    try:
        return bool(json.loads(manifest.read_text(encoding="utf-8")).get("format") == FORMAT)
    except (OSError, ValueError, AttributeError):
        return False
