"""When a run saves checkpoints, and at which step it resumes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from autopipe.backends.torch.checkpoint import Checkpoint, check_has_no_checkpoints
from autopipe.backends.torch.runtime.data.sample_order import START_OF_RUN, RunProgress
from autopipe.backends.torch.runtime.state.checkpoint import Checkpointer
from autopipe.backends.torch.runtime.state.checkpoint_state import TrainingState
from autopipe.backends.torch.runtime.step.stage import RankContext
from autopipe.backends.torch.runtime.step.update import ParameterUpdate
from autopipe.backends.torch.runtime.watch.failures import stop_on_signal
from autopipe.backends.torch.runtime.watch.step_agreement import (
    SAVE_REQUEST,
    STOP_REQUEST,
    StepAgreement,
)


class CheckpointPolicy:
    """The checkpoints of a run in `folder`. All ranks save after the same steps: after multiples of
    `--checkpoint-every`, after the last step, and when any rank was requested to save or to stop.
    """

    def __init__(self, rank: RankContext, update: ParameterUpdate, folder: Path) -> None:
        """Collective over all ranks. From now on SIGUSR2 stops the run after a step."""
        options = rank.options
        transport = rank.transport
        self._rank = rank
        self._folder = folder
        self._steps_saved = 0
        """Steps that the newest checkpoint includes."""
        self.begin = START_OF_RUN
        """The position in the data at which this run began."""
        state = TrainingState(
            rank.manifest,
            rank.number,
            rank.parameters,
            update.optimizer,
            rank.device,
            update.reduction.shards,
            update.loss_scaler,
        )
        self._checkpointer = Checkpointer(
            folder,
            rank.manifest,
            state,
            transport.make_control_group(),
            options.keep_latest_k,
            options.keep_every,
            options.run,
        )
        self._agreement = StepAgreement(
            transport.store, transport.make_control_group(), 60 * options.checkpoint_minutes
        )
        stop_on_signal(partial(self._agreement.request, STOP_REQUEST))

    def restore(self) -> Checkpoint | None:
        """Restore parameters, optimizer state and loss scale from the newest checkpoint. Return it,
        or None if the folder has none or `--resume` is not given.

        Raises an error if `--resume` is not given and the folder already has checkpoints.
        """
        self._rank.heartbeat.task = "restore"
        if not self._rank.options.resume:
            check_has_no_checkpoints(self._folder)
            return None
        saved = self._checkpointer.restore()
        if saved is not None:
            self._steps_saved = saved.step
            self.begin = RunProgress(saved.step, saved.samples, saved.forwards)
        return saved

    def best(self) -> tuple[float, int] | None:
        """Return (loss, step) for the saved state with the lowest validation loss, where `step` is
        the index, from 0, of its last step. Return None if no such state is saved.
        """
        return self._checkpointer.best()

    def requests(self) -> tuple[bool, bool]:
        """Return (save, stop): the requests that all ranks follow after this step."""
        requests = self._agreement.reach(self._rank.steps_done)
        return SAVE_REQUEST in requests, STOP_REQUEST in requests

    def before_update(self) -> None:
        """Make the GPU wait for the copies of a running save before it changes parameters."""
        self._checkpointer.before_update()

    def save_best(self, eval_loss: float) -> None:
        """Start to save the state as the best so far, with this validation loss."""
        self._checkpointer.save(self._position(), self._rank.seed, eval_loss)

    def is_due(self, requested: bool) -> bool:
        """True if a checkpoint is to be saved after the steps done so far."""
        options = self._rank.options
        done = self._rank.steps_done
        every = options.checkpoint_every
        return requested or done == options.steps or bool(every and done % every == 0)

    def has_saved(self) -> bool:
        """True if the newest checkpoint includes all steps done so far."""
        return self._rank.steps_done == self._steps_saved

    def save(self) -> None:
        """Start to save a checkpoint; it is written while later steps run."""
        self._steps_saved = self._rank.steps_done
        self._checkpointer.save(self._position(), self._rank.seed)

    def poll(self) -> None:
        """Raise the error of a save that has failed, without waiting for a save that still runs."""
        self._checkpointer.has_ended()

    def _position(self) -> RunProgress:
        """Return the progress of the run, including the runs that this run resumed."""
        forwards = self.begin.forwards
        if forwards is not None:
            manifest = self._rank.manifest
            steps = self._rank.steps_done - self.begin.steps
            forwards += (
                steps * manifest.micro_batches * manifest.training.gradient_accumulation_steps
            )
        return RunProgress(self._rank.steps_done, self._rank.samples_done, forwards)

    def close(self) -> None:
        """Wait until the last checkpoint is written. Collective over all ranks."""
        heartbeat = self._rank.heartbeat
        heartbeat.task = "checkpoint"
        self._checkpointer.close()
        with heartbeat.waiting():
            self._agreement.close()
