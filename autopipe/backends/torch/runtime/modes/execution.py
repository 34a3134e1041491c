"""How a rank runs its stages and communicates with other ranks. The default overlaps P2P
communication with computation; dry runs and blocking communication override it.
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
    """Runs stages that overlap P2P communication with computation. A rank has one execution."""

    probes = False
    """True if the run inspects one step (`Mode.probes`)."""
    stage_type: type[Stage] = Stage
    has_values = True
    """False if tensors have shapes and types but no values."""
    can_skip_updates = True
    """False if the optimizer steps even if fp16 gradients overflowed."""

    def make_transport(self, device: str, timeouts: Timeouts, heartbeat: Heartbeat) -> Transport:
        """Return the connection to the other ranks, before it is started."""
        return Transport(device, timeouts, heartbeat)

    def context(self, rank: RankContext) -> AbstractContextManager[object]:
        """Return the context in which the rank is set up and runs its steps."""
        return nullcontext()

    def make_stage(
        self, rank: RankContext, number: int, module: ModuleType, ports: tuple[Port, ...]
    ) -> Stage:
        """Return stage `number` of a rank; `module` is the generated module of the stage."""
        return self.stage_type(rank, number, module, ports)

    def make_reporter(self, rank: RankContext) -> Reporter:
        """Return the reporter of the rank's steps. Called when the rank is set up."""
        return Reporter(rank)

    def on_optimizer(self, update: ParameterUpdate) -> None:
        """Called once when the optimizer of the rank has been created, before the first step."""

    def before_step(self, rank: RankContext, step: Callable[[], None]) -> None:
        """Called before the clock of a step starts."""

    def run_batch(self, rank: RankContext, step: Callable[[], None]) -> None:
        """Run the generated function `step` once: all micro-batches of one batch. In a validation
        only forward passes and their P2P communication have an effect.
        """
        step()
