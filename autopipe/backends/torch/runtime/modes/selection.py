"""Choice of the execution and the modes of a run, from the options of the rank."""

from __future__ import annotations

from autopipe.backends.torch.runtime.modes.blocking import BlockingExecution
from autopipe.backends.torch.runtime.modes.dry_run import DryExecution
from autopipe.backends.torch.runtime.modes.execution import Execution
from autopipe.backends.torch.runtime.modes.generation import Generate
from autopipe.backends.torch.runtime.modes.verification import (
    Perturb,
    Record,
    RecordValues,
    Replay,
)
from autopipe.backends.torch.runtime.options import RankOptions
from autopipe.backends.torch.runtime.step.stage import Mode


def choose_execution(options: RankOptions) -> Execution:
    """Return the object that runs the rank's stages. `--dry-run` takes precedence over
    `--blocking`.
    """
    if options.dry_run:
        return DryExecution()
    if options.blocking:
        return BlockingExecution()
    return Execution()


def choose_modes(options: RankOptions) -> tuple[Mode, ...]:
    """Return the modes that the options request, in the order in which their hooks are called.
    `Record` precedes `Replay`, because it must write the rank's own gradients before `Replay`
    replaces them.
    """
    found: list[Mode] = []
    if options.perturb:
        found.append(Perturb(options.perturb))
    if options.values is not None:
        found.append(RecordValues(options.values))
    if options.record is not None:
        found.append(Record(options.record))
    if options.replay is not None:
        found.append(Replay(options.replay))
    if options.generate is not None:
        found.append(Generate(options.generate))
    return tuple(found)
