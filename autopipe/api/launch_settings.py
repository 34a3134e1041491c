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
    "FILE.npz, FILE.bin of tokens, a table or folder (docs/guides/data.md) or module:function; "
    "random data without it"
)
"""The sources of data that `--data` accepts."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """The settings of a launch, in the order of the help text. None is an open setting, whose value
    the plan or the data decide.
    """

    device: str = _setting_field(
        "auto",
        "Where to run; with --dry-run meta is on no device, shapes and types alone, and cuda need "
        "not be there.",
        choices=("auto", "cuda", "cpu", "meta"),
        for_ranks=True,
    )
    steps: int | None = _setting_field(
        None, "Steps in all [1; in inference over a file all of it].", minimum=1
    )
    epochs: int | None = _setting_field(
        None, "Passes through the data, in place of --steps.", minimum=1
    )
    model: Path | None = _setting_field(None, "The ONNX file [where it was planned].", "FILE")
    shuffle: bool | None = _setting_field(None, "Shuffle each epoch by the seed.", for_ranks=True)
    data: str | None = _setting_field(
        None, f"{DATA_SOURCES_HELP} [data.path].", "SOURCE", for_ranks=True
    )
    eval_data: str | None = _setting_field(
        None, "Data to validate on, as --data takes it [eval.data of the plan].", for_ranks=True
    )
    eval_interval: int | None = _setting_field(
        None, "Steps between validations [only one, the last].", minimum=1, for_ranks=True
    )
    seed: int | None = _setting_field(
        None,
        "Seed of random data, of Dropout, and of weights that the model does not store.",
        minimum=0,
        for_ranks=True,
    )
    nnodes: str | None = _setting_field(
        None, "Number of machines [1; under srun and in a PyTorchJob theirs].", "N|MIN:MAX"
    )
    node_rank: int | None = _setting_field(
        None, "Number of this machine, which orders ranks [by address].", minimum=0
    )
    nproc_per_node: int | None = _setting_field(
        None, "Ranks on each machine [an equal share].", minimum=1
    )
    rdzv_endpoint: str = _setting_field(
        "", "Where several machines meet, alike on all.", "HOST:PORT"
    )
    local_addr: str = _setting_field(
        "", "Where ranks listen [the way to --rdzv-endpoint].", "ADDRESS"
    )
    rdzv_id: str = _setting_field("", "Name of the run, alike on all machines [from the plan].")
    rdzv_key: str | None = _setting_field(
        None, "Key of the run, 32 bytes or more, on all machines and for none else.", "FILE"
    )
    max_restarts: int | None = _setting_field(
        None, "Times to start again [3 with --checkpoint, else 0].", minimum=0
    )
    checkpoint: Path | None = _setting_field(None, "Where to save the training state.", "DIR")
    checkpoint_every: tuple[int, float] | None = _setting_field(
        None, "Steps between two, or minutes, as 30m [only the last].", "K|Km"
    )
    """(steps, minutes) between two checkpoints, one of which is 0."""
    keep_latest_k: int | None = _setting_field(
        None, "Checkpoints that stay [2; 0: all].", "K", minimum=0, for_ranks=True
    )
    keep_every: int | None = _setting_field(
        None, "Keep those after each N steps, too.", "N", minimum=1, for_ranks=True
    )
    resume: bool = _setting_field(False, "Go on from the newest checkpoint in --checkpoint DIR.")
    start_timeout: float = _setting_field(
        1800, "Seconds to join and load.", minimum=0, shows_default=True
    )
    step_timeout: float = _setting_field(
        600, "Seconds for a task of a step.", minimum=0, shows_default=True
    )
    checkpoint_timeout: float = _setting_field(
        7200, "Seconds to write or read.", minimum=0, shows_default=True
    )
    log: Path | None = _setting_field(
        None, "Write each step's figures to DIR/metrics.jsonl.", "DIR"
    )
    log_every: int = _setting_field(1, "Steps from line to line.", minimum=1, shows_default=True)
    wandb: str | None = _setting_field(
        None, "With --log: W&B, too [WANDB_PROJECT].", "PROJECT", environment="WANDB_PROJECT"
    )
    profile: str | None = _setting_field(None, "With --log: profile steps K to L.", "K|K-L")
    trace: Path | None = _setting_field(None, "Chrome trace of this node's ranks.", "FILE")
    outputs: Path | None = _setting_field(
        None, "Outputs of inference, under their own names.", "FILE.npz|.npy"
    )
    force: bool = _setting_field(
        False, "Replace files that were edited, are inputs, or are of another kind."
    )
    mode: str | None = _setting_field(
        None, "Refuse a program of another mode.", choices=("train", "infer")
    )
    compile: bool = _setting_field(
        False, "Compile stages with torch.compile, before the first step.", for_ranks=True
    )
    cuda_graphs: bool | None = _setting_field(
        None,
        "Replay stages as CUDA graphs from the second step on [stages that the host bounds, on "
        "CUDA].",
        for_ranks=True,
    )
    blocking: bool = _setting_field(
        False, "Overlap no message with a task, to see what that is worth.", for_ranks=True
    )
    dry_run: bool = _setting_field(
        False, "Run one step of one rank without the others, and say what it does."
    )
    rank: int | None = _setting_field(None, "Which rank --dry-run runs [0].", minimum=0)

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
