"""Decides after which steps a run saves checkpoints, and at which step it resumes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from autopipe.backends.torch.checkpoint import Checkpoint, check_has_no_checkpoints
from autopipe.backends.torch.runtime.data.sample_order import START_OF_RUN, RunProgress
from autopipe.backends.torch.runtime.state.checkpoint import Checkpointer
from autopipe.backends.torch.runtime.state.checkpoint_state import TrainingState
from autopipe.backends.torch.runtime.step.stage import RankContext
from autopipe.backends.torch.runtime.step.update import ParameterUpdate
from autopipe.backends.torch.runtime.watch.failures import install_stop_handler
from autopipe.backends.torch.runtime.watch.step_agreement import (
    SAVE_REQUEST,
    STOP_REQUEST,
    StepAgreement,
)


class CheckpointPolicy:
    """Saves and restores the checkpoints of a run in `folder`. All ranks save after the same steps:
    after multiples of `--checkpoint-every`, after the last step, at the interval
    `--checkpoint-minutes`, and if a rank receives a signal to stop.
    """

    def __init__(self, rank: RankContext, update: ParameterUpdate, folder: Path) -> None:
        """Prepare to save and restore in `folder`. Collective over all ranks. From now on, the
        signal `STOP_SIGNAL` requests a checkpoint and the end of the run.
        """
        options = rank.options
        transport = rank.transport
        self._rank = rank
        self._folder = folder
        self._steps_saved = 0
        """Number of steps that the newest checkpoint includes."""
        self.begin = START_OF_RUN
        """Position in the data at which this run starts or resumes."""
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
        install_stop_handler(partial(self._agreement.request, STOP_REQUEST))

    def restore(self) -> Checkpoint | None:
        """Restore parameters, optimizer state and loss scale from the newest checkpoint and return
        its manifest. Return None if the folder has no checkpoint or `--resume` is not given. Raise
        ConfigurationError if `--resume` is not given but the folder has checkpoints.
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

    def best_loss_and_step(self) -> tuple[float, int] | None:
        """Return (loss, step) of the saved state with the lowest validation loss: `step` is the
        index, from 0, of the last step before the validation. None if no such state is saved.
        """
        return self._checkpointer.best_loss_and_step()

    def requests(self) -> tuple[bool, bool]:
        """Return (save, stop): whether all ranks must save a checkpoint, and whether they must
        stop, after the step that has just ended. Must be called after each step.
        """
        requests = self._agreement.requests_after(self._rank.steps_done)
        return SAVE_REQUEST in requests, STOP_REQUEST in requests

    def delay_update_until_copied(self) -> None:
        """Make the GPU wait until the running save has copied the state. Must be called before
        parameters change.
        """
        self._checkpointer.delay_update_until_copied()

    def save_best(self, eval_loss: float) -> None:
        """Start to save the state as the one with the lowest validation loss so far,
        `eval_loss`.
        """
        self._checkpointer.save(self._position(), self._rank.seed, eval_loss)

    def is_due(self, requested: bool) -> bool:
        """Return True if a checkpoint must be saved now, between two steps. `requested` is True if
        it was requested.
        """
        options = self._rank.options
        done = self._rank.steps_done
        every = options.checkpoint_every
        return requested or done == options.steps or bool(every and done % every == 0)

    def has_saved(self) -> bool:
        """Return True if the newest checkpoint includes all steps that have run."""
        return self._rank.steps_done == self._steps_saved

    def save(self) -> None:
        """Start to save a checkpoint, which is written while further steps run."""
        self._steps_saved = self._rank.steps_done
        self._checkpointer.save(self._position(), self._rank.seed)

    def raise_error_of_save(self) -> None:
        """Raise the error of the last save if it has failed. Does not wait for a running save."""
        self._checkpointer.has_ended()

    def _position(self) -> RunProgress:
        """Return the position of the run in its data, counted from the start of the first run if
        this run resumes another run.
        """
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
        with heartbeat.record_wait():
            self._agreement.close()
