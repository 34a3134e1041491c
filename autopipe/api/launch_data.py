"""The data of a launch: checks of the training and validation data, the number of steps that they
give, and the position in the data at which a resumed run continues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from autopipe.api.launch_settings import LaunchSettings
from autopipe.backends.torch.checkpoint import checkpoint_path, committed_steps, read_checkpoint
from autopipe.backends.torch.runtime.data.sample_order import START_OF_RUN, RunProgress
from autopipe.backends.torch.runtime.data.sources import check_data
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.training import DataSettings

UNKNOWN_STEPS: Final = 2**40
"""Number of steps that ranks get if the run ends with its data, whose number of samples is unknown.
"""


def check_training_data(
    manifest: Manifest, settings: LaunchSettings, note: Callable[[str], None]
) -> tuple[int, int | None]:
    """Check the data that the steps read, and return (steps, epochs).

    steps: the number of the step at which the run ends. `UNKNOWN_STEPS` if the run ends with its
    data and the number of their samples is unknown.
    epochs: the number of passes through the data after which the run ends if `steps` is
    `UNKNOWN_STEPS`, otherwise None.

    `note` receives notes for the user. Raises ConfigurationError for data that do not fit the
    program or the settings.
    """
    planned = manifest.data
    data = planned.path if settings.data is None else settings.data
    if data is None and (settings.epochs is not None or settings.shuffle):
        flag = "--shuffle" if settings.epochs is None else "--epochs"
        raise ConfigurationError(
            f"{flag} requires data with an order and an end, but the data are random",
            hint="set the data with --data",
        )
    if data is None:
        note("the data are random; set other data with --data")
    epochs = settings.epochs
    if epochs is None and settings.steps is None and manifest.train and data is not None:
        epochs = planned.epochs
    shuffle = planned.shuffle if settings.shuffle is None else settings.shuffle
    steps = settings.steps
    if steps is None and manifest.train and epochs is None:
        steps = 1
    source, unchecked = check_data(
        manifest,
        data,
        None if settings.resume else steps,
        replace(planned, epochs=epochs, shuffle=shuffle),
        start_position(settings),
    )
    if source is None:
        if epochs and manifest.lr_scheduler.needs_steps:
            raise ConfigurationError(
                "the learning rate decays over the number of steps, which is unknown before the "
                "data end",
                hint="set --steps, or plan with lr_scheduler.total_steps",
            )
        return steps or (UNKNOWN_STEPS if epochs else 1), epochs
    steps = steps or source.steps_until_end or 1
    for line in filter(None, (*source.notes(steps), unchecked)):
        note(line)
    return steps, None


def check_validation_data(
    manifest: Manifest, settings: LaunchSettings, note: Callable[[str], None]
) -> None:
    """Check all samples of the validation data, if there are any.

    `note` receives a note for the user. Raises ConfigurationError for data that do not fit the
    program.
    """
    held_out = manifest.evaluation.data if settings.eval_data is None else settings.eval_data
    read_once = replace(manifest, train=False)
    data = DataSettings(sequence_length=manifest.data.sequence_length)
    if unchecked := check_data(read_once, held_out, None, data)[1]:
        note(unchecked)


def start_position(settings: LaunchSettings) -> RunProgress:
    """Return the position in the data at which the run starts: after the newest checkpoint if it
    resumes from one, otherwise the start.
    """
    if (
        not settings.resume
        or settings.checkpoint is None
        or not (saved := committed_steps(settings.checkpoint))
    ):
        return START_OF_RUN
    newest = read_checkpoint(checkpoint_path(settings.checkpoint, saved[-1]))
    return RunProgress(newest.step, newest.samples)
