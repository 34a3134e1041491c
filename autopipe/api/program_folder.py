"""Program folders: the program of a plan, its manifest, the check of its ONNX file, and the flags
of its ranks.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from autopipe.backends.torch.runtime.manifest import Manifest, read_manifest
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import FileSlice, VarintSlice
from autopipe.ir.plan import PLAN_FILE, plan_digest, read_plan


def find_program_folder(folder: Path) -> Path:
    """Return the program folder in `folder` if `folder` is a plan folder with a program, otherwise
    `folder`.

    Raises ConfigurationError if the plan cannot be read, or if the program is of an earlier plan.
    """
    from autopipe.api.plan_folder import stale_program

    program = folder / "program"
    is_plan = (folder / PLAN_FILE).is_file() and not (folder / "manifest.json").is_file()
    if not is_plan or not program.is_dir():
        return folder
    if stale_program(folder, plan_digest(read_plan(folder))) is not None:
        raise other_plan_error(program, folder)
    return program


def other_plan_error(program: Path, folder: Path) -> ConfigurationError:
    """Return the error for a folder `program` that holds the program of another plan than
    `folder`.
    """
    hint = f"generate the program again with autopipe codegen {shlex.quote(str(folder))}"
    return ConfigurationError(f"{program} is not a program of the plan in {folder}", hint)


def open_program(folder: Path, model: Path | None, with_values: bool = True) -> Manifest:
    """Return the manifest of the program in `folder`. `model` is the ONNX file if it is not where
    it was planned.

    Raises ConfigurationError if there is no program, or if the ONNX file is missing or is not the
    file that was planned. Without `model`, the file is checked only if the program reads
    parameters from it and `with_values` is True.
    """
    manifest = read_manifest(folder.absolute(), model)
    is_read = with_values and any(
        isinstance(each.storage, FileSlice | VarintSlice) for each in manifest.parameters
    )
    if model is not None or is_read:
        check_model(manifest)
    return manifest


def check_model(manifest: Manifest) -> None:
    """Raise ConfigurationError if the ONNX file of the manifest is missing or differs from the file
    that was planned in anything but its weights.
    """
    from autopipe.passes.frontend.load import file_digest

    if not manifest.model.is_file():
        raise ConfigurationError(
            "the model file does not exist",
            "set the path of the model with --model FILE",
            str(manifest.model),
        )
    found = file_digest(manifest.model)
    if found != manifest.model_digest:
        digests = (
            f"the digest of the file is {found[:_DIGEST_DIGITS]}, "
            f"the digest of the planned model is {manifest.model_digest[:_DIGEST_DIGITS]}"
        )
        raise ConfigurationError(
            f"the file is not the planned model: {digests}",
            "set the path of the planned model with --model FILE, or plan again",
            str(manifest.model),
        )


_DIGEST_DIGITS = 12
"""Number of hexadecimal digits of a digest in a message."""


def rank_arguments(**flags: object) -> list[str]:
    """Return the command line of a rank's program: `--name value` for each flag, `--name` alone if
    the value is True, and nothing if it is None or False.
    """
    words = []
    for name, value in flags.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words
