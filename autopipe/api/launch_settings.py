"""The settings of a launch, each declared once: type, default, help text, and the flag of `autopipe
launch` that sets it.
"""

# ruff: noqa: RUF009  (`_setting_field` returns `dataclasses.field`)
from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from autopipe.ir.errors import ConfigurationError, similar_name_hint

_FOR_RANKS_KEY: Final = "rank"
_FLAG_KEY: Final = "flag"


class SettingError(ConfigurationError):
    """An invalid value of a launch setting, or settings that contradict each other."""

    def __init__(self, message: str, setting: str = "") -> None:
        """`setting` is the name of the setting with the invalid value, "" for a contradiction."""
        super().__init__(message, where=f"--{setting.replace('_', '-')}" if setting else "")


@dataclass(frozen=True, slots=True)
class Flag:
    """The flag of a setting. Its name is the name of the setting with dashes."""

    help: str
    metavar: str | None = None
    minimum: float | None = None
    """Smallest value of an integer; the exclusive lower bound of a number of seconds."""
    choices: tuple[str, ...] = ()
    environment: str | None = None
    """Environment variable that sets the flag if the command line does not."""
    shows_default: bool = False
    """True if the help text shows the default."""


def _setting_field(
    default: Any,
    help_text: str,
    metavar: str | None = None,
    *,
    minimum: float | None = None,
    choices: tuple[str, ...] = (),
    environment: str | None = None,
    shows_default: bool = False,
    for_ranks: bool = False,
) -> Any:
    """Return a field of `LaunchSettings`. With `for_ranks`, each rank gets the flag with the same
    value.
    """
    flag = Flag(help_text, metavar, minimum, choices, environment, shows_default)
    return dataclasses.field(default=default, metadata={_FLAG_KEY: flag, _FOR_RANKS_KEY: for_ranks})


DATA_SOURCES_HELP: Final = (
    "Source of the data: FILE.npz, FILE.bin with tokens, a table or a folder "
    "(docs/guides/data.md), "
    "or a Python function as module:function [data.path of the plan, otherwise random data]."
)
"""Help text of `--data`."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """The settings of a launch, in the order of the help text. None is an open setting, whose value
    the plan or the data decide.
    """

    device: str = _setting_field(
        "auto",
        "Device of the ranks. With --dry-run, meta checks shapes and types only, and cuda needs no "
        "GPU.",
        choices=("auto", "cuda", "cpu", "meta"),
        for_ranks=True,
    )
    steps: int | None = _setting_field(
        None, "Number of steps [1; in inference, all samples of the data file].", minimum=1
    )
    epochs: int | None = _setting_field(
        None, "Number of passes through the data. Excludes --steps.", minimum=1
    )
    model: Path | None = _setting_field(None, "Path of the ONNX file [as planned].", "FILE")
    shuffle: bool | None = _setting_field(
        None,
        "Read the samples of each epoch in a random order that depends on the seed "
        "[data.shuffle of the plan].",
        for_ranks=True,
    )
    data: str | None = _setting_field(None, DATA_SOURCES_HELP, "SOURCE", for_ranks=True)
    eval_data: str | None = _setting_field(
        None,
        "Source of the validation data, as for --data [eval.data of the plan].",
        for_ranks=True,
    )
    eval_interval: int | None = _setting_field(
        None,
        "Number of steps between two validations [only after the last step].",
        minimum=1,
        for_ranks=True,
    )
    seed: int | None = _setting_field(
        None,
        "Seed of random data, of Dropout, and of weights that the model does not store [seed of "
        "the plan].",
        minimum=0,
        for_ranks=True,
    )
    nnodes: str | None = _setting_field(
        None,
        "Number of machines [1; under srun or in a PyTorchJob, its number of machines].",
        "N|MIN:MAX",
    )
    node_rank: int | None = _setting_field(
        None, "Index of this machine, which determines its ranks [by address].", minimum=0
    )
    nproc_per_node: int | None = _setting_field(
        None, "Number of ranks on each machine [equal for all machines].", minimum=1
    )
    rdzv_endpoint: str = _setting_field(
        "", "Address of the rendezvous of several machines; equal on all machines.", "HOST:PORT"
    )
    local_addr: str = _setting_field(
        "",
        "Address on which the ranks of this machine listen [that of the interface to "
        "--rdzv-endpoint].",
        "ADDRESS",
    )
    rdzv_id: str = _setting_field("", "Name of the run; equal on all machines [from the plan].")
    rdzv_key: str | None = _setting_field(
        None,
        "File with the secret key of the run, at least 32 bytes; equal on all machines, and "
        "readable by its owner only.",
        "FILE",
    )
    max_restarts: int | None = _setting_field(
        None,
        "Maximum number of restarts after a failure [3 with --checkpoint, otherwise 0].",
        minimum=0,
    )
    checkpoint: Path | None = _setting_field(
        None, "Folder for checkpoints of the training state.", "DIR"
    )
    checkpoint_every: tuple[int, float] | None = _setting_field(
        None,
        "Steps between two checkpoints, or minutes, such as 30m [only after the last step].",
        "K|Km",
    )
    """(steps, minutes) between two checkpoints, one of which is 0."""
    keep_latest_k: int | None = _setting_field(
        None,
        "Number of newest checkpoints to keep; 0 keeps all [2].",
        "K",
        minimum=0,
        for_ranks=True,
    )
    keep_every: int | None = _setting_field(
        None, "Also keep checkpoints at multiples of N steps.", "N", minimum=1, for_ranks=True
    )
    resume: bool = _setting_field(
        False, "Resume from the newest intact checkpoint in the folder of --checkpoint."
    )
    start_timeout: float = _setting_field(
        1800,
        "Maximum seconds for the rendezvous and for loading the weights.",
        minimum=0,
        shows_default=True,
    )
    step_timeout: float = _setting_field(
        600, "Maximum seconds for one task of a step.", minimum=0, shows_default=True
    )
    checkpoint_timeout: float = _setting_field(
        7200, "Maximum seconds to write or read a checkpoint.", minimum=0, shows_default=True
    )
    log: Path | None = _setting_field(
        None, "Write the metrics of each step to DIR/metrics.jsonl.", "DIR"
    )
    log_every: int = _setting_field(
        1, "Number of steps per line of output.", minimum=1, shows_default=True
    )
    wandb: str | None = _setting_field(
        None,
        "With --log, also send the metrics to this project of Weights & Biases [WANDB_PROJECT].",
        "PROJECT",
        environment="WANDB_PROJECT",
    )
    profile: str | None = _setting_field(
        None, "With --log, profile step K, or steps K to L, with torch.profiler.", "K|K-L"
    )
    trace: Path | None = _setting_field(
        None, "Write a Chrome trace of the ranks of this machine.", "FILE"
    )
    outputs: Path | None = _setting_field(
        None, "Write the outputs of inference by name; .npy for one output.", "FILE.npz|.npy"
    )
    force: bool = _setting_field(
        False, "Replace files that were edited, are inputs, or are of another kind."
    )
    mode: str | None = _setting_field(
        None, "Fail if the program has another mode.", choices=("train", "infer")
    )
    compile: bool = _setting_field(
        False, "Compile the stages with torch.compile before the first step.", for_ranks=True
    )
    cuda_graphs: bool | None = _setting_field(
        None,
        "Replay stages as CUDA graphs from the second step on [on CUDA, stages whose time the host "
        "determines].",
        for_ranks=True,
    )
    blocking: bool = _setting_field(
        False, "Disable communication overlap, to measure its gain.", for_ranks=True
    )
    dry_run: bool = _setting_field(
        False, "Run one step of one rank without the other ranks, and report its tasks."
    )
    rank: int | None = _setting_field(None, "Rank that --dry-run runs [0].", minimum=0)

    def for_ranks(self) -> Mapping[str, object]:
        """Return the settings that each rank gets with the same name and value."""
        own = (each.name for each in dataclasses.fields(self) if each.metadata[_FOR_RANKS_KEY])
        return {name: getattr(self, name) for name in own}


def launch_flags() -> Mapping[str, tuple[dataclasses.Field[Any], Flag]]:
    """Return the field and the flag of each setting by its name, in the order of the help text."""
    return {
        each.name: (each, each.metadata[_FLAG_KEY]) for each in dataclasses.fields(LaunchSettings)
    }


def interval(text: str) -> tuple[int, float]:
    """Parse a text such as `50` (steps) or `30m` (minutes). Return (steps, minutes), of which one
    is 0. Raises SettingError for any other text.
    """
    try:
        found = (0, float(text[:-1])) if text.endswith("m") else (int(text), 0.0)
    except ValueError:
        found = (0, 0.0)
    if not 0 < sum(found) < math.inf:
        raise SettingError(
            f"{text!r} is neither a number of steps nor minutes as 30m", "checkpoint_every"
        )
    return found


def launch_settings(values: Mapping[str, object]) -> LaunchSettings:
    """Return the settings with the given values by name. A setting that is absent or None has its
    default, or the value of its environment variable.

    Numbers and paths may be given as text. Raises SettingError for an invalid value, and
    ConfigurationError for an unknown name.
    """
    flags = launch_flags()
    unknown = next((name for name in values if name not in flags), None)
    if unknown is not None:
        raise ConfigurationError(
            f"there is no setting {unknown!r}", similar_name_hint(unknown, flags)
        )
    known: dict[str, Any] = {}
    for name, (field, flag) in flags.items():
        value = values.get(name)
        if value is None and flag.environment is not None:
            value = os.environ.get(flag.environment) or None
        if value is not None:
            known[name] = _converted(name, field, flag, value)
    return LaunchSettings(**known)


def _converted(name: str, field: dataclasses.Field[Any], flag: Flag, value: object) -> object:
    """Return `value` in the type of the setting `name`. Raises SettingError if it is invalid."""
    kind = str(field.type).removesuffix(" | None")
    if name == "checkpoint_every":
        return interval(str(value))
    if kind == "bool":
        if not isinstance(value, bool):
            raise SettingError(f"{value!r} is neither True nor False", name)
        return value
    if kind == "Path":
        return Path(str(value))
    if kind == "str":
        if flag.choices and value not in flag.choices:
            raise SettingError(f"{value!r} is not one of {', '.join(flag.choices)}", name)
        return str(value)
    try:
        number = int(str(value)) if kind == "int" else float(str(value))
    except ValueError:
        raise SettingError(f"{value!r} is not a number", name) from None
    minimum = -math.inf if flag.minimum is None else flag.minimum
    if number < minimum or (kind == "float" and number == minimum):
        bound = "at least" if kind == "int" else "above"
        raise SettingError(f"{value!r} is not {bound} {minimum:g}", name)
    return number
