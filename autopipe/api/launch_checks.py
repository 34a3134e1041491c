"""Checks of a launch before its ranks start: settings that contradict each other or the program,
and the files that the launch writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autopipe.api.launch_settings import LaunchSettings, SettingError
from autopipe.backends.torch.checkpoint import (
    check_can_save,
    check_has_no_checkpoints,
    check_not_in_use,
)
from autopipe.backends.torch.codegen.rank import rank_module
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.output_kinds import NPY, NPZ, TRACE, OutputFile
from autopipe.ir.words import plural

_CHECKPOINT_SETTINGS = ("resume", "checkpoint_every", "keep_latest_k", "keep_every")
"""Settings that require a checkpoint folder."""


def check_dry_run_settings(settings: LaunchSettings) -> None:
    """Raise SettingError if settings contradict `settings.dry_run`."""
    if settings.dry_run and (settings.blocking or settings.compile):
        raise SettingError(
            f"--dry-run measures no times: omit --{'blocking' if settings.blocking else 'compile'}"
        )
    if settings.device == "meta" and not settings.dry_run:
        raise SettingError("--device meta computes no values and requires --dry-run")
    if settings.rank is not None and not settings.dry_run:
        raise SettingError("--rank requires --dry-run")


def check_mode(manifest: Manifest, mode: str | None) -> None:
    """Raise ConfigurationError if the program does not have the mode, unless `mode` is None."""
    if mode not in (None, "train" if manifest.train else "infer"):
        other = "train" if mode == "infer" else "infer"
        hint = f"plan with autopipe plan MODEL --mode {mode}, then run autopipe codegen"
        raise ConfigurationError(
            f"the program is for mode {other}, but --mode is {mode}", hint, f"--mode {mode}"
        )


def has_rank(manifest: Manifest, rank: int) -> bool:
    """Return True if the program folder contains the program of `rank`. `codegen --ranks` omits
    some ranks.
    """
    return (manifest.folder / f"{rank_module(rank)}.py").is_file()


def check_launch(manifest: Manifest, settings: LaunchSettings) -> None:
    """Raise an error if the settings do not fit the program, if programs of ranks are missing, or
    if an output file cannot be written.

    Raises SettingError for settings that contradict each other, otherwise ConfigurationError.
    """
    if settings.epochs is not None and (settings.steps is not None or not manifest.train):
        why = "--steps already sets the end" if manifest.train else "inference reads its data once"
        raise SettingError(f"--epochs: {why}")
    missing = [rank for rank in range(manifest.world_size) if not has_rank(manifest, rank)]
    if missing:
        raise ConfigurationError(
            f"{len(missing)} of {manifest.world_size} {plural(manifest.world_size, 'rank')} were "
            f"not generated, the first is {missing[0]}",
            hint="write all ranks with autopipe codegen PLAN, without --ranks",
        )
    _check_checkpoint(manifest, settings)
    _check_validation(manifest, settings)
    _check_outputs(manifest, settings)
    for each in output_files(manifest, settings):
        each.check()


def _check_checkpoint(manifest: Manifest, settings: LaunchSettings) -> None:
    checkpoint = settings.checkpoint
    if checkpoint is None:
        given = [
            name for name in _CHECKPOINT_SETTINGS if getattr(settings, name) not in (None, False)
        ]
        if given:
            raise ConfigurationError(
                f"--{given[0].replace('_', '-')} requires a checkpoint folder",
                hint="set the folder with --checkpoint DIR",
            )
        return
    if not manifest.train:
        raise ConfigurationError(
            "a program for inference has no state to save", hint="omit --checkpoint"
        )
    check_can_save(checkpoint)
    if not settings.resume:
        check_not_in_use(checkpoint)
        check_has_no_checkpoints(checkpoint)


def _check_validation(manifest: Manifest, settings: LaunchSettings) -> None:
    if (settings.eval_data or settings.eval_interval) and not manifest.train:
        raise ConfigurationError(
            "a program for inference has no loss", hint="omit --eval-data and --eval-interval"
        )
    if settings.eval_interval and (settings.eval_data or manifest.evaluation.data) is None:
        raise ConfigurationError(
            "--eval-interval requires validation data", hint="set the data with --eval-data FILE"
        )


def _check_outputs(manifest: Manifest, settings: LaunchSettings) -> None:
    outputs = settings.outputs
    if outputs is None:
        return
    if manifest.train:
        raise ConfigurationError(
            "a program for training cannot write outputs",
            hint="plan with --mode infer, or omit --outputs",
        )
    if outputs.suffix not in (".npz", ".npy"):
        raise ConfigurationError(
            f"the outputs file is {outputs}, expected .npz or .npy",
            hint="choose a .npz file, or a .npy file",
        )
    if outputs.suffix == ".npy" and len(manifest.outputs) > 1:
        names = ", ".join(output.value.name for output in manifest.outputs)
        raise ConfigurationError(
            f"the program has several outputs: {names}", hint="choose a .npz file"
        )


def output_files(manifest: Manifest, settings: LaunchSettings) -> Iterator[OutputFile]:
    """Yield the files that the launch writes at its end: the trace first, if there is one."""
    sources = (settings.data, settings.eval_data, manifest.data.path, manifest.evaluation.data)
    paths = tuple(Path(each) for each in sources if each is not None)
    inputs = (manifest.folder, manifest.model, *paths)
    if settings.trace is not None:
        yield OutputFile(settings.trace, TRACE, inputs, settings.force)
    if settings.outputs is not None:
        kind = NPY if settings.outputs.suffix == ".npy" else NPZ
        yield OutputFile(settings.outputs, kind, inputs, settings.force)
