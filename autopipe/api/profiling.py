"""Command `profile`: measure the operators of a model and the communication between ranks on this
machine, and write a cost file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopipe.api.events import Events, SilentEvents
from autopipe.api.profile_settings import ProfileSettings
from autopipe.configs.configuration import Configuration
from autopipe.ir.measured_costs import Costs, costs_text, merge_costs, read_costs
from autopipe.ir.output_kinds import COSTS, OutputFile, write_texts


@dataclass(frozen=True, slots=True)
class Profiled:
    """Costs that were written to a file."""

    path: Path
    costs: Costs
    refused: tuple[str, ...] = ()
    """Reasons why operators could not be measured."""


def profile(
    model: Path,
    configuration: Configuration,
    settings: ProfileSettings,
    path: Path | None = None,
    *,
    force: bool = False,
    events: Events | None = None,
) -> Profiled:
    """Measure the operators of the ONNX file `model` and write their costs to `path`, `MODEL.costs`
    if it is None.

    `force` replaces a file at `path` that is no cost file. Raises ConfigurationError if the device
    is not available or the file cannot be written, and AutopipeError if the model cannot be read.
    """
    from autopipe.api.profile_session import Profiling
    from autopipe.api.request import make_request

    target = path or Path(f"{model}.costs")
    file = OutputFile(target, COSTS, (model,), force)
    file.check()
    profiling = Profiling(make_request(configuration, model), settings)
    profiling.check_ranks()
    with (events or SilentEvents()).progress("measuring", total=settings.seconds) as bar:
        measured, refused = profiling.run(bar)
    costs = Costs((measured,))
    write_texts({file: costs_text(costs)})
    return Profiled(target, costs, refused)


def merge_cost_files(files: Sequence[Path], path: Path, *, force: bool = False) -> Profiled:
    """Write the costs of several cost files to `path`. Costs of later files replace those of
    earlier files. Raises ConfigurationError if a file is no cost file or cannot be written.
    """
    file = OutputFile(path, COSTS, tuple(files), force)
    file.check()
    costs = merge_costs(map(read_costs, files))
    write_texts({file: costs_text(costs)})
    return Profiled(path, costs)
