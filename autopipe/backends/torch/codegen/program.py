"""Writing of a program folder: Python modules, and a manifest for data that must not be in code,
such as names from the model. A folder is written completely or not at all.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from autopipe.backends.torch.codegen.archive import write_arrays
from autopipe.backends.torch.codegen.rank import emit_rank, rank_module, stage_module
from autopipe.backends.torch.codegen.stage import Style
from autopipe.backends.torch.codegen.stage_file import emit_stage
from autopipe.ir.codec import encode
from autopipe.ir.errors import CodegenError, ConfigurationError
from autopipe.ir.graph import Constant, DType
from autopipe.ir.layout import MeshAxis
from autopipe.ir.movable_paths import movable_path, relative_path
from autopipe.ir.output_files import (
    FolderDigests,
    add_digests,
    add_path_to_errors,
    open_replacement_folder,
    read_digests,
)
from autopipe.ir.problem import Optimizer
from autopipe.ir.program import FORMAT, Program, StageCode
from autopipe.ir.rounding import Rounding
from autopipe.ir.training import DataSettings, Evaluation, LRScheduler, Training, change_data_path


@dataclass(frozen=True, slots=True)
class Provenance:
    """Origin of a program (model and plan), its predicted metrics, and the settings of its
    steps.
    """

    model: str
    """Path of the ONNX file that contains the weights."""
    model_digest: str
    plan_digest: str
    optimizer: Optimizer
    precision: str
    seed: int
    predicted_step_s: float
    predicted_bubble: float
    rounding: Rounding = field(default_factory=Rounding)
    data: DataSettings = field(default_factory=DataSettings)
    evaluation: Evaluation = field(default_factory=Evaluation)
    model_flops: float | None = None
    peak_flops: float | None = None
    predicted_memory_bytes: int | None = None
    lr_scheduler: LRScheduler = field(default=LRScheduler())
    training: Training = field(default=Training())
    matrices: frozenset[str] = frozenset()
    """Names of the parameters that the optimizer `muon` updates as matrices."""
    training_graph: bool | None = None
    """Value of `model.training` in the configuration."""
    fixed_inputs: tuple[tuple[str, bool | int | float], ...] = ()
    """Value of `model.inputs` in the configuration."""


def program_manifest(
    program: Program,
    provenance: Provenance,
    home: Path,
    memory_limits: tuple[int, ...] = (),
    host_bound: frozenset[int] = frozenset(),
    style: Style = "flat",
) -> dict[str, Any]:
    """Return the manifest of a program as a JSON object. `home` is the folder of the program.
    `memory_limits` has the maximum GPU memory of each rank in bytes, () for no limits. `host_bound`
    has the stages whose host, according to the plan, needs more time than their device. `style` is
    the form of the generated code. The module `autopipe.backends.torch.runtime.manifest` reads the
    manifest.

    Paths in the manifest are relative to `home` where possible, so that they remain valid if the
    program, its plan and the model are moved together.
    """
    move = partial(movable_path, home=home, model=provenance.model)
    data = replace(provenance.data, path=change_data_path(provenance.data.path, move))
    evaluation = replace(
        provenance.evaluation, data=change_data_path(provenance.evaluation.data, move)
    )
    optimizer = provenance.optimizer
    settings = {}
    names = frozenset(provenance.matrices)
    indices = [index for index, each in enumerate(program.parameters) if each.value.name in names]
    matrices = {"matrices": indices} if indices else {}
    if program.train:
        settings = {
            name: encode(getattr(provenance, name)) for name in ("lr_scheduler", "training")
        }
    return {
        "format": FORMAT,
        "model": {
            "path": relative_path(provenance.model, home),
            "sha256": provenance.model_digest,
            **(
                {} if provenance.training_graph is None else {"training": provenance.training_graph}
            ),
            **({"inputs": dict(provenance.fixed_inputs)} if provenance.fixed_inputs else {}),
        },
        "plan": provenance.plan_digest,
        "world_size": program.world_size,
        "mode": "train" if program.train else "infer",
        "micro_batches": program.micro_batches,
        "micro_batch_size": program.micro_batch_size,
        "loss": program.loss,
        "precision": provenance.precision,
        "seed": provenance.seed,
        "optimizer": encode(optimizer) | {"shard": program.shard} | matrices,
        **{name: form for name, form in settings.items() if form},
        "predicted": {"step_s": provenance.predicted_step_s, "bubble": provenance.predicted_bubble},
        "rounding": encode(provenance.rounding),
        "inputs": [encode(each) for each in program.inputs],
        "outputs": [encode(each) for each in program.outputs],
        "parameters": [encode(each) for each in program.parameters],
        "stages": [_stage_entry(each, each.stage in host_bound) for each in program.stages],
        "channels": [encode(each) for each in program.channels],
        "ranks": [
            {
                "rank": rank.rank,
                "stages": [each.stage for each in rank.stages],
                "shards": [*map(encode, rank.shards)],
            }
            for rank in program.ranks
        ],
        **({"loss_division": division} if (division := encode(program.loss_division)) else {}),
        **({"eval": encode(evaluation)} if evaluation != Evaluation() else {}),
        **({"memory_limits": memory_limits} if memory_limits else {}),
        **({} if style == "flat" else {"style": style}),
        **({} if data == DataSettings() else {"data": encode(data)}),
        **({"metrics": metrics} if (metrics := _predicted_metrics(provenance)) else {}),
        **(
            {"running_calls": [*map(encode, program.running_calls)]}
            if program.running_calls
            else {}
        ),
        **({"low_precision": program.low_precision} if program.low_precision else {}),
    }


def _predicted_metrics(provenance: Provenance) -> dict[str, float]:
    """Return the predicted metrics, by name, that a launch compares with measured metrics. Metrics
    that are not known are omitted.
    """
    figures = {
        "model_flops": provenance.model_flops,
        "peak_flops": provenance.peak_flops,
        "memory_bytes": provenance.predicted_memory_bytes,
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _stage_entry(stage: StageCode, host_bound: bool) -> dict[str, Any]:
    """Return the manifest entry of a stage. Its key `meshes` lists the process groups in which
    ranks of the stage communicate and which do not contain all its ranks, each as mesh axes.
    `host_bound` is True if, according to the plan, the stage's host needs more time than its
    device.
    """
    meshes = stage.meshes()
    whole = (MeshAxis(len(stage.devices), 1),)
    parts = tuple(axes for axes in meshes if axes != whole)
    found: dict[str, Any] = {"ranks": stage.devices, "pipeline": stage.pipeline, "meshes": parts}
    if len(stage.devices) > 1 and whole not in meshes:
        found["whole"] = False
    if host_bound:
        found["host_bound"] = True
    return found if stage.ratio == 1 else found | {"turns": stage.ratio}


_RUN_FILE_TEXT = '''\
"""Runs the rank that the environment names; torch elastic, torchrun or SLURM start it on every \
process."""

import os
import runpy
import sys
import time
from pathlib import Path

RANKS = {ranks}

folder = Path(__file__).resolve().parent
sys.path.insert(0, str(folder))
rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
started = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS") or 1)
if started != RANKS:
    if rank == 0:
        start = f"torchrun --nproc-per-node {{RANKS}}" if RANKS > 1 else "python"
        counts = f"ranks started: {{started}}, ranks of the program: {{RANKS}}"
        print(f"error: {{counts}}; start it by {{start}} {{sys.argv[0]}}", file=sys.stderr, \
flush=True)
    else:
        time.sleep(3)  # torchrun ends all ranks when the first one has ended: rank 0 says why.
    sys.exit(2)
runpy.run_path(str(folder / f"rank_{{rank:03d}}.py"), run_name="__main__")

# Done: the process ends here. Torch's threads may still ask for the interpreter while it is being \
taken down, and
# then the whole process aborts.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
'''


@dataclass(frozen=True, slots=True)
class ProgramFiles:
    """A program and what is needed to write its files: the subfolder `name` of the written folder,
    and the docstrings of the stage and rank modules. The module of a rank whose docstring is None
    is not written.
    """

    name: str
    program: Program
    stage_titles: tuple[str, ...]
    rank_titles: tuple[str | None, ...]
    memory_limits: tuple[int, ...] = ()
    """Maximum GPU memory of each rank in bytes; () for no limits."""
    host_bound: frozenset[int] = frozenset()
    """Stages whose host, according to the plan, needs more time than their device."""
    style: Style = "layers"


def write_program(
    programs: Sequence[ProgramFiles],
    provenance: Provenance,
    folder: Path,
    force: bool = False,
    home: Path | None = None,
) -> None:
    """Write the files of `programs` into `folder`, in place of an earlier program there. If writing
    fails, the folder remains unchanged.

    An earlier program with edited files is replaced only with `force`. Paths in the manifests are
    relative to `home`, the final folder of the program (default: `folder`). Raise CodegenError if
    the generated code is not valid Python, and ConfigurationError if the folder cannot be written
    or replaced.
    """
    home = (home or folder).absolute()
    rendered = [(each, _file_texts(each, provenance, home / each.name)) for each in programs]

    def write(target: Path) -> None:
        for each, files in rendered:
            inside = target / each.name
            inside.mkdir(exist_ok=True)
            for name, text in files.items():
                with add_path_to_errors(folder / each.name / name):
                    (inside / name).write_text(text, encoding="utf-8")
            stored: dict[str, np.ndarray] = {}
            for index, constant in (
                pair for stage in each.program.stages for pair in stage.constants
            ):
                stored[f"c{index}"] = _as_numpy_storable(constant)
            write_arrays(inside / "constants.npz", stored)
            add_digests(inside, MANIFEST_FILE)

    replace_folder(folder, write, force)


def _as_numpy_storable(constant: Constant) -> np.ndarray:
    """Return the data of a constant in a type that numpy can write. Elements of other types are
    returned as their bits; for bfloat16 and 8-bit floating-point types, the array has one field
    with the name of the type.
    """
    dtype = constant.value.dtype
    array = constant.array
    if dtype is DType.FLOAT4E2M1:
        return array.view(np.uint8)
    if dtype.packed_bits:
        return array.astype(dtype.torch_name)
    if dtype is DType.BFLOAT16 or dtype.is_float8:
        return array.view([(dtype.value, dtype.storage_type)])
    return array


def _file_texts(files: ProgramFiles, provenance: Provenance, home: Path) -> dict[str, str]:
    """Return the texts of a program's files by file name. `home` is the folder of the program, to
    which paths are relative. Raise CodegenError if a Python file does not parse.
    """
    program = files.program
    found = {"run.py": _RUN_FILE_TEXT.format(ranks=files.program.world_size)}
    attributes: dict[str, str] = {}
    arguments = []
    for stage, title in zip(program.stages, files.stage_titles, strict=True):
        source = emit_stage(stage, title, files.style, program.train)
        name = stage_module(stage.stage)
        found[f"{name}.py"] = source.text
        arguments.append(source.arguments)
        if source.attributes is not None:
            attributes[f"{name}.json"] = json.dumps(encode(source.attributes), indent=1) + "\n"
    for rank, rank_title in zip(program.ranks, files.rank_titles, strict=True):
        if rank_title is not None:
            found[f"{rank_module(rank.rank)}.py"] = emit_rank(program, rank, rank_title, arguments)
    for name, text in found.items():
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise CodegenError(
                f"the generated code is not valid Python: {error}", where=name
            ) from error
    manifest = program_manifest(
        program, provenance, home, files.memory_limits, files.host_bound, files.style
    )
    found["manifest.json"] = json.dumps(manifest, indent=1) + "\n"
    return found | attributes


MANIFEST_FILE: Final = "manifest.json"


def replace_folder(folder: Path, write: Callable[[Path], None], force: bool = False) -> None:
    """Replace `folder` atomically with a new folder that the function `write` fills.

    Raise ConfigurationError if `check_program_folder` raises it or if the folder cannot be written.
    `folder` is unchanged in that case.
    """
    folder = folder.absolute()
    hint = "choose another with -o"
    check_program_folder(folder, force)
    missing = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open_replacement_folder(folder, MANIFEST_FILE) as made:
            write(made)
    except OSError as error:
        where = str(error.filename or "")
        raise ConfigurationError(
            f"the program folder {folder} cannot be written: {error.strerror}", hint, where
        ) from error
    finally:
        if not folder.exists():
            for parent in missing:
                # `rmdir` raises OSError if another process has written into the new parent folder.
                # The folder is then not empty and must remain.
                with contextlib.suppress(OSError):
                    parent.rmdir()


_PROGRAM_FILE_PATTERN = re.compile(
    r"rank_\d+\.py|stage_\d+\.(py|json)|run\.py|manifest\.json|constants\.npz"
)


def check_program_folder(folder: Path, force: bool = False) -> None:
    """Raise ConfigurationError if `folder` must not be replaced by a program: it contains a file
    that is not part of a program or, without `force`, a program file that was edited. A folder that
    does not exist is valid.
    """
    if not folder.exists():
        return
    foreign = folder if not folder.is_dir() else next(_foreign_entries(folder), None)
    if foreign is not None:
        message = f"folder {folder} contains a file that is not part of a program: {foreign}"
        raise ConfigurationError(message, hint="choose another folder with -o, or move the file")
    edited = None if force else next(_edited_files(folder), None)
    if edited is not None:
        path, holder = edited
        what = "was edited" if holder else "was edited, or an earlier version of autopipe wrote it"
        raise ConfigurationError(
            f"the program file {path} {what}",
            hint="choose another folder with -o, or replace the program with --force",
        )


def _foreign_entries(folder: Path) -> Iterator[Path]:
    """Yield the entries of a program folder that are neither part of a program nor bytecode of its
    modules. Yield also the first entry of a folder without a program's manifest.
    """
    entries = sorted(folder.iterdir())
    if entries and not _is_program(folder):
        yield entries[0]
    for entry in entries:
        if entry.is_symlink():
            yield entry
        elif entry.is_dir():
            is_bytecode = entry.name == "__pycache__"
            yield from (
                (each for each in entry.iterdir() if each.suffix != ".pyc")
                if is_bytecode
                else _foreign_entries(entry)
            )
        elif _PROGRAM_FILE_PATTERN.fullmatch(entry.name) is None:
            yield entry


def _is_program(folder: Path) -> bool:
    """Return True if `folder` contains the manifest of a program."""
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def _edited_files(folder: Path) -> Iterator[tuple[Path, FolderDigests | None]]:
    """Yield (file, digests) for each file of a program that was changed after autopipe wrote it.
    `digests` are the digests in the manifest of its folder, or None if there are none; all files of
    such a folder are yielded.
    """
    holder = read_digests(folder / MANIFEST_FILE)
    for path in sorted(folder.iterdir()):
        if path.is_file() and (holder is None or not holder.holds(path)):
            yield path, holder
        elif path.is_dir() and path.name != "__pycache__":
            yield from _edited_files(path)
