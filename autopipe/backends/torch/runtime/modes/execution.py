"""How a rank runs its stages and communicates with other ranks. By default, P2P communication
overlaps with computation. Dry runs and blocking communication override methods of `Execution`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

from autopipe.backends.torch.runtime.communication.transport import Transport
from autopipe.backends.torch.runtime.step.ports import Port
from autopipe.backends.torch.runtime.step.stage import RankContext, Stage
from autopipe.backends.torch.runtime.step.update import ParameterUpdate
from autopipe.backends.torch.runtime.watch.heartbeat import Heartbeat, Timeouts
from autopipe.backends.torch.runtime.watch.report import Reporter


class Execution:
    """Runs the stages of a rank so that P2P communication overlaps with computation. A rank has one
    execution.
    """

    probes = False
    """True if the run inspects one step instead of training (see `Mode.probes`)."""
    stage_type: type[Stage] = Stage
    """Class of the rank's stages."""
    has_values = True
    """False if tensors have types and shapes but no values."""
    can_skip_updates = True
    """False if the optimizer must run its step even if fp16 gradients overflowed."""

    def make_transport(self, device: str, timeouts: Timeouts, heartbeat: Heartbeat) -> Transport:
        """Return the connection to the other ranks. It is not connected yet."""
        return Transport(device, timeouts, heartbeat)

    def context(self, rank: RankContext) -> AbstractContextManager[object]:
        """Return the context manager in which the rank is set up and runs its steps."""
        return nullcontext()

    def make_stage(
        self, rank: RankContext, number: int, module: ModuleType, ports: tuple[Port, ...]
    ) -> Stage:
        """Return a new stage of a rank. `number` is the number of the stage, `module` its generated
        module, `ports` its arguments and results.
        """
        return self.stage_type(rank, number, module, ports)

    def make_reporter(self, rank: RankContext) -> Reporter:
        """Return a new reporter of the rank's steps. Called once, when the rank is set up."""
        return Reporter(rank)

    def on_optimizer(self, update: ParameterUpdate) -> None:
        """Hook that is called once, after the rank's optimizer has been created and before the
        first step.
        """

    def before_step(self, rank: RankContext, step: Callable[[], None]) -> None:
        """Hook that is called before the clock of a step starts. `step` is the generated
        function.
        """

    def run_batch(self, rank: RankContext, step: Callable[[], None]) -> None:
        """Call the generated function `step` once, which runs all micro-batches of one batch. In a
        validation, its backward passes have no effect.
        """
        step()
