"""One rank of a generated program: sets up its stages, then runs steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch

from autopipe.backends.torch.runtime.data.batch_reader import (
    BatchReader,
    PrefetchingReader,
    StepData,
)
from autopipe.backends.torch.runtime.data.outputs import OutputCollector
from autopipe.backends.torch.runtime.data.sample_order import START_OF_RUN, RunProgress
from autopipe.backends.torch.runtime.data.sample_source import SampleSource
from autopipe.backends.torch.runtime.data.sources import open_source
from autopipe.backends.torch.runtime.modes.evaluation import Evaluator, evaluation_settings
from autopipe.backends.torch.runtime.startup import connect, start_process
from autopipe.backends.torch.runtime.state.checkpoint_policy import CheckpointPolicy
from autopipe.backends.torch.runtime.state.loading import load_stages
from autopipe.backends.torch.runtime.step.capture import capture_stages, captures_by_default
from autopipe.backends.torch.runtime.step.compilation import compile_stages
from autopipe.backends.torch.runtime.step.ports import Port
from autopipe.backends.torch.runtime.step.stage import RankContext, Stage
from autopipe.backends.torch.runtime.step.update import ParameterUpdate
from autopipe.backends.torch.runtime.watch.clock import StepProfiler
from autopipe.backends.torch.runtime.watch.heartbeat import ENDED_TASK
from autopipe.ir.words import plural


class Rank(RankContext):
    """One rank of a generated program. The file `rank_NNN.py` creates it, adds the stages of the
    rank with `stage`, and calls `main` with the generated function `step`, which runs one batch.

    By default the rank trains or infers on data. A dry run and `--blocking` replace `execution`,
    the way in which stages run. Verification and generation add objects to `modes`, whose hooks
    change single parts of a run.
    """

    def __init__(self, number: int, file: str) -> None:
        """`file` is the path of the generated file; the manifest is in the same folder. The options
        come from the command line of the process.
        """
        process = start_process(number, file)
        super().__init__(
            number,
            process.options,
            process.manifest,
            process.transport,
            process.heartbeat,
            process.modes,
        )
        self.execution = process.execution
        self._probes = self.execution.probes or any(mode.probes for mode in self.modes)
        self._has_repeated_data = False
        self._must_end = False
        self._has_tried_capture = False

    def stage(self, number: int, module: ModuleType, *ports: Port) -> Stage:
        """Create stage `number` of this rank and return it. `module` is the generated module of the
        stage; `ports` are its arguments and results.
        """
        stage = self.execution.make_stage(self, number, module, ports)
        self.stages[number] = stage
        return stage

    def main(self, step: Callable[[], None]) -> None:
        """Set up the rank and run all steps, then leave the other ranks. `step` is the generated
        function that runs the micro-batches of one batch.
        """
        with self.execution.context(self):
            self.set_up()
            if not any(mode.run(self, step) for mode in self.modes):
                self._run_steps(step)
            self.transport.stop()
            self.heartbeat.task = ENDED_TASK

    def set_up(self) -> None:
        """Connect to the other ranks, and load or create what steps need: parameters, optimizer,
        data, checkpoints and reports. Called once, before the first step. Collective over all
        ranks.
        """
        manifest = self.manifest
        options = self.options
        connect(self)
        load_stages(self, self.execution.has_values)
        self.update = ParameterUpdate(self, self.execution.can_skip_updates)
        self.reduction = self.update.reduction
        self.loss_scaler = self.update.loss_scaler
        self.execution.on_optimizer(self.update)
        self.saving: CheckpointPolicy | None = None
        if options.checkpoint is not None:
            self.saving = CheckpointPolicy(self, self.update, options.checkpoint)
        self.reader = BatchReader(manifest, self._open_source(START_OF_RUN), self.device)
        self.evaluator: Evaluator | None = None
        evaluation = evaluation_settings(manifest, options)
        if evaluation.data is not None and not self._probes:
            self.evaluator = Evaluator(self, evaluation, options.steps)
        self.collector = OutputCollector(manifest, self.transport, options.outputs)
        self.collect = self.collector.keep
        self.reporter = self.execution.make_reporter(self)
        self.profiler = StepProfiler(
            options.profiled_steps, options.profile, self.number, self.device, self.heartbeat
        )
        self.clock.keeps_waits = options.trace is not None or options.profile is not None
        if options.compile:
            self.heartbeat.task = "compile"
            for line in compile_stages(self.stages, self.transport):
                self.reporter.print_on_rank_0(line)
        if self.device.type == "cuda":
            # Wait for the device, because the time of the first step must not include work of the
            # set-up.
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        for notice in self.transport.notices:
            self.reporter.print_on_rank_0(notice)

    def _open_source(self, begin: RunProgress) -> SampleSource:
        """Return the source of the run's samples, from the position `begin` on. Options override
        the plan's data settings.
        """
        options = self.options
        settings = self.manifest.data
        shuffle = settings.shuffle if options.shuffle is None else options.shuffle
        settings = replace(settings, epochs=options.epochs, shuffle=shuffle)
        return open_source(self.manifest, self.data, self.seed, begin, settings)

    def _resume(self) -> None:
        """If `--resume` is given and there is a checkpoint, continue from the newest one: restore
        its state, its position in the data and, unless `--seed` is given, its seed.
        """
        if self.saving is None:
            return
        saved = self.saving.restore()
        if saved is None:
            return
        self.steps_done = saved.step
        self.seed = saved.seed if self.options.seed is None else self.options.seed
        self.low_precision_copies.refresh()
        self.reader = BatchReader(self.manifest, self._open_source(self.saving.begin), self.device)
        if self.evaluator is not None and (best := self.saving.best_loss_and_step()) is not None:
            self.evaluator.restore(best)
        self.reporter.print_on_rank_0(
            f"resuming at step {saved.step} from {self.options.checkpoint}"
        )

    def _run_steps(self, step: Callable[[], None]) -> None:
        """Run steps until the run has done the requested number, the data end, any rank is
        requested to stop, or the validation loss stops improving. Save checkpoints and write
        outputs.
        """
        self._resume()
        if self.device.type == "cuda" and not self._probes:
            self.reader = PrefetchingReader(
                self.manifest, self.reader.source, self.device, self.options.steps
            )
        while self.steps_done < self.options.steps and not self._must_end:
            self.step_samples = self.reader.begin_step(self.steps_done)
            if not self.step_samples:
                self._finish_at_end_of_data(step)
                break
            data = self.run(step)
            self.collector.end_step(data.samples)
            self._report_epoch(data)
            self._evaluate(step)
            save, stop = (False, False) if self.saving is None else self.saving.requests()
            if stop and self.steps_done < self.options.steps:
                self._must_end = True
                self.reporter.print_on_rank_0(
                    f"stopped after {self.steps_done} {plural(self.steps_done, 'step')}; "
                    f"saving the state in {self.options.checkpoint}"
                )
            self._save_if_due(requested=save or self._must_end)
        self.reader.close()
        self.profiler.close()
        self.reporter.report()
        if self.saving is not None:
            self.saving.close()
        self.heartbeat.task = "end"
        self.collector.finish()

    def _finish_at_end_of_data(self, step: Callable[[], None]) -> None:
        """Report that the data have no samples for the next step. Validate and save a last time,
        unless this was done after the last step.
        """
        self.reporter.report()
        self.reporter.print_on_rank_0(
            f"{self.data} has no samples for step {self.steps_done}: the run ends"
        )
        self._evaluate(step, last=True)
        if self.saving is not None:
            self.heartbeat.task = "checkpoint"
            if not self.saving.has_saved():
                self._save_if_due(requested=True)

    def _report_epoch(self, data: StepData) -> None:
        """Report once that the run reads its data again: after the first step of the second
        epoch or, if the run resumes later than that, after the step at which it resumes.
        """
        if data.epoch <= 1 or self._has_repeated_data:
            return
        self._has_repeated_data = True
        left = data.skipped_samples
        omitted = (
            f" (the last {left} {plural(left, 'sample')}, fewer than a batch, are skipped)"
            if left
            else ""
        )
        self.reporter.print_on_rank_0(
            f"step {self.steps_done - 1} begins epoch {data.epoch} of {self.data}{omitted}"
        )

    def _evaluate(self, step: Callable[[], None], last: bool = False) -> None:
        """Validate if a validation is due. Save the state if the validation loss is the lowest so
        far, and end the run if the loss has not improved for too long. `last` is True if no step
        follows.
        """
        if self.evaluator is None or not self.evaluator.is_due(last):
            return
        self.reporter.report()
        report = self.evaluator.run(partial(self.execution.run_batch, self, step))
        self.reporter.publish(report)
        if self.saving is not None and report.best_step == report.step:
            self.saving.save_best(report.eval_loss)
        if self.evaluator.has_run_out_of_patience():
            self._must_end = True
            self.reporter.print_on_rank_0(
                f"the validation loss has not improved since step {report.best_step}: the run ends"
            )

    def _save_if_due(self, requested: bool) -> None:
        """Start to save a checkpoint if one is due or `requested`. Otherwise raise the error of an
        earlier save if it failed.
        """
        if self.saving is None:
            return
        self.heartbeat.task = "checkpoint"
        if self.saving.is_due(requested):
            # Report all steps before the checkpoint first: a run that resumes from the checkpoint
            # does not report them.
            self.reporter.report()
            self.saving.save()
        else:
            self.saving.raise_error_of_save()

    def run(self, step: Callable[[], None]) -> StepData:
        """Run one training or inference step, including its update and report. Return the samples
        that it used.
        """
        self.profiler.begin_step(self.steps_done)
        if all(mode.computes_step(self.steps_done) for mode in self.modes):
            self._run_batches(step)
        else:
            self.clock.begin_step()
        self.heartbeat.task = "update"
        if self.train:
            with self.heartbeat.record_wait():
                self.update.finish_gradients()
            for mode in self.modes:
                mode.on_gradients(self)
            if self.saving is not None:
                self.saving.delay_update_until_copied()
            self.update.update_running_statistics()
            self.update.apply()
            for mode in self.modes:
                mode.on_update(self)
        with self.heartbeat.record_wait():
            self.transport.finish()
        if self.loss_scaler is not None:
            self.loss_scaler.end_step()
        if any(mode.repeats_step(self) for mode in self.modes):
            self.clear_step()
            return self.run(step)
        if self.train:
            self.low_precision_copies.refresh()
        self.reporter.end_step()
        self.profiler.end_step(self.steps_done)
        self.clear_step()
        self.steps_done += 1
        self._capture_once()
        # `reader.end_step` lets the prefetching thread copy data to the GPU. CUDA allows no copies
        # during the capture of graphs in `_capture_once`, so the call follows the capture.
        return self.reader.end_step(self.steps_done - 1)

    def _run_batches(self, step: Callable[[], None]) -> None:
        """Run the forward and backward passes of all batches that a step accumulates."""
        self.execution.before_step(self, step)
        self.clock.begin_step()
        if self.manifest.counts_labels:
            self.counted = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in range(self.manifest.training.gradient_accumulation_steps):
            self.batch = batch
            self.execution.run_batch(self, step)
        self.batch = 0

    def _capture_once(self) -> None:
        """Capture CUDA graphs once, after the first step: if `--cuda-graphs` is given, or by
        default if the device supports them and further steps follow. `--no-cuda-graphs` disables
        this.
        """
        if self._has_tried_capture:
            return
        wanted = self.options.cuda_graphs
        if wanted is None:
            wanted = captures_by_default(self) and not self._probes
        if wanted:
            self._has_tried_capture = True
            self.heartbeat.task = "capture"
            self.reporter.print_on_rank_0(capture_stages(self, self.update.capture))
