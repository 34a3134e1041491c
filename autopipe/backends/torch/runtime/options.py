"""Options of a rank's process. Each field of `RankOptions` is a flag of the generated files
`rank_NNN.py`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

from autopipe.backends.torch.checkpoint import DEFAULT_KEPT_CHECKPOINTS
from autopipe.backends.torch.runtime.watch.heartbeat import DEFAULT_TIMEOUTS


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Options of one rank. None means that the program's manifest provides the value, unless the
    description of the field gives None another meaning.
    """

    steps: int = 1
    device: str = "auto"
    model: Path | None = None
    """The ONNX file from which the rank reads weights."""
    data: str | None = None
    """The training data, or in inference the inputs; for formats see `DataSettings.path`."""
    shuffle: bool | None = None
    epochs: int | None = None
    eval_data: str | None = None
    """The validation data; formats as for `data`."""
    eval_interval: int | None = None
    """Number of steps from one validation to the next."""
    seed: int | None = None
    """Seed of initial parameters, random data, shuffling, and random operators such as dropout."""
    checkpoint: Path | None = None
    """Folder in which checkpoints are saved; None to save none."""
    checkpoint_every: int = 0
    """Save a checkpoint after multiples of this number of steps; 0 to save after the last step
    only.
    """
    checkpoint_minutes: float = 0.0
    """Also save a checkpoint each time this number of minutes has passed; 0 for never."""
    keep_latest_k: int = DEFAULT_KEPT_CHECKPOINTS
    """Number of latest checkpoints that are not removed; 0 to keep all."""
    keep_every: int = 0
    """Also keep checkpoints after multiples of this number of steps; 0 for none."""
    resume: bool = False
    run: str | None = None
    """Name of the launch, if it starts from the beginning and saves checkpoints, otherwise None. If
    the ranks are restarted after a failure, the name stays equal.
    """
    trace: Path | None = None
    """Folder to which the times of all tasks of all steps are written; None to write none."""
    profile: Path | None = None
    """Folder to which torch's profile of the profiled steps is written; None to write none."""
    profile_times: Path | None = None
    """Folder to which the times of the tasks in the profiled steps are written; None to write
    none.
    """
    profile_from: int = 0
    """Index of the first profiled step."""
    profile_to: int = -1
    """Index of the last profiled step; -1 to profile none."""
    record: Path | None = None
    """Folder to which gradients and parameters of the first steps are written, for `autopipe
    verify`; None to write none.
    """
    values: Path | None = None
    """Folder to which the values of all variables in the first forward of each stage are written,
    for `autopipe verify`; None to write none.
    """
    replay: Path | None = None
    """Folder with recorded gradients of full parameters, by step, for `autopipe verify`. Updates
    use them instead of computed gradients. None to use computed gradients.
    """
    perturb: float = 0.0
    """Relative change of each floating-point number in inputs and parameters, for `autopipe
    verify`; 0 for none.
    """
    report: Path | None = None
    """File to which rank 0 writes one JSON line per step; None to print one line of text per
    step.
    """
    outputs: Path | None = None
    """File to which the outputs of inference are written; None to write none."""
    generate: Path | None = None
    """Folder with a request to generate tokens. The rank then generates tokens instead of running
    steps on data. None for steps on data.
    """
    blocking: bool = False
    """True to use blocking sends and receives, which do not overlap with computation."""
    compile: bool = False
    """True to compile stages with torch.compile."""
    cuda_graphs: bool | None = None
    """True to capture all stages as CUDA graphs after the first step, False to capture none. None
    to capture the stages for which the plan predicts that launching operators takes longer than
    running them.
    """
    dry_run: bool = False
    """True to run one step of this rank without the other ranks, and to report it. With device
    `meta`, tensors have no values.
    """
    start_timeout: float = DEFAULT_TIMEOUTS.start_s
    step_timeout: float = DEFAULT_TIMEOUTS.step_s
    checkpoint_timeout: float = DEFAULT_TIMEOUTS.checkpoint_s

    @property
    def profiled_steps(self) -> range:
        """Indices of the profiled steps."""
        return range(self.profile_from, self.profile_to + 1)


_PARSER_BY_TYPE = {
    "int": int,
    "int | None": int,
    "float": float,
    "str": str,
    "str | None": str,
    "Path | None": Path,
}


def parse_options(arguments: list[str]) -> RankOptions:
    """Return the options in the command-line arguments of a rank. Print a usage message and exit if
    they are invalid.
    """
    parser = argparse.ArgumentParser(
        description="Runs one rank of a program generated by autopipe."
    )
    for each in fields(RankOptions):
        flag = f"--{each.name.replace('_', '-')}"
        if each.type == "bool":
            parser.add_argument(flag, action="store_true")
        elif each.type == "bool | None":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction)
        else:
            choices = ("auto", "cuda", "cpu", "meta") if each.name == "device" else None
            parser.add_argument(
                flag, type=_PARSER_BY_TYPE[str(each.type)], default=each.default, choices=choices
            )
    found = RankOptions(**vars(parser.parse_args(arguments)))
    if found.device == "meta" and not found.dry_run:
        parser.error("--device meta needs --dry-run: its tensors have no values")
    return found
