"""The program folder that a command reads, by itself or in a plan folder, and the ONNX file of its
weights.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from autopipe.backends.torch.runtime.manifest import Manifest, read_manifest
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import FileSlice, VarintSlice
from autopipe.ir.plan import PLAN_FILE, plan_digest, read_plan


def program_in(folder: Path) -> Path:
    """Return the program folder in the plan folder `folder`, or `folder` itself if it is no plan
    folder with a program.

    Raises ConfigurationError if the plan cannot be read, or if the program is of an earlier plan.
    """
    from autopipe.api.plan_folder import stale_program

    program = folder / "program"
    is_plan = (folder / PLAN_FILE).is_file() and not (folder / "manifest.json").is_file()
    if not is_plan or not program.is_dir():
        return folder
    if stale_program(folder, plan_digest(read_plan(folder))) is not None:
        raise other_plan(program, folder)
    return program


def other_plan(program: Path, folder: Path) -> ConfigurationError:
    """Return the error that `program` is not the program of the plan in `folder`."""
    hint = f"autopipe codegen {shlex.quote(str(folder))} writes it again"
    return ConfigurationError(f"{program} is not the program of the plan in {folder}", hint)


def open_program(folder: Path, model: Path | None, with_values: bool = True) -> Manifest:
    """Return the manifest of the program in `folder`, with the file `model` in place of the planned
    one if it is given.

    Raises ConfigurationError if there is no program, or if the model is missing or is not the one
    that was planned. The planned file is checked only if parameters are read from it, so not for a
    run without values.
    """
    manifest = read_manifest(folder.absolute(), model)
    is_read = with_values and any(
        isinstance(each.storage, FileSlice | VarintSlice) for each in manifest.parameters
    )
    if model is not None or is_read:
        check_model(manifest)
    return manifest


def check_model(manifest: Manifest) -> None:
    """Raise ConfigurationError unless the manifest's model file is the one that was planned; its
    weights may differ.
    """
    from autopipe.passes.frontend.load import file_digest

    if not manifest.model.is_file():
        raise ConfigurationError(
            "the model is not there", "name another file with --model FILE", str(manifest.model)
        )
    found = file_digest(manifest.model)
    if found != manifest.model_digest:
        digests = (
            f"its digest is {found[:_DIGITS]}, the program's {manifest.model_digest[:_DIGITS]}"
        )
        raise ConfigurationError(
            f"this is not the model that was planned: {digests}",
            "name the planned file with --model FILE, or plan again",
            str(manifest.model),
        )


_DIGITS = 12
"""Digits of a digest that a message shows."""


def flag_words(**flags: object) -> list[str]:
    """Return the command line of a rank's program: `--name value` for each flag, `--name` alone if
    the value is True, and nothing if it is None or False.
    """
    words = []
    for name, value in flags.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words
