"""One rank: sets up what its stages need, and runs steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from autopipe.backends.torch import fake_cuda
from autopipe.backends.torch.checkpoint import check_unused
from autopipe.backends.torch.runtime.communication.transport import Transport
from autopipe.backends.torch.runtime.data.batch_reader import (
    BatchReader,
    PrefetchingReader,
    StepData,
)
from autopipe.backends.torch.runtime.data.outputs import OutputCollector
from autopipe.backends.torch.runtime.data.sample_order import START, Position
from autopipe.backends.torch.runtime.data.sample_source import Source
from autopipe.backends.torch.runtime.data.sources import open_source
from autopipe.backends.torch.runtime.job import variables_of_rank
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.backends.torch.runtime.modes.blocking import BlockingStage, GlobalOrder
from autopipe.backends.torch.runtime.modes.dry_run import (
    DryReporter,
    DryStage,
    DryTransport,
    MemoryTracker,
    use_fake_tensors,
)
from autopipe.backends.torch.runtime.modes.evaluation import Evaluator, evaluation_of
from autopipe.backends.torch.runtime.modes.generation import generate
from autopipe.backends.torch.runtime.modes.records import (
    RECORDED_STEPS,
    dump_tensors,
    load_gradients,
)
from autopipe.backends.torch.runtime.options import parse_options
from autopipe.backends.torch.runtime.state.checkpoint import Checkpointer
from autopipe.backends.torch.runtime.state.checkpoint_state import TrainingState
from autopipe.backends.torch.runtime.state.loading import equip_stages
from autopipe.backends.torch.runtime.state.parameters import Arguments, load_parameters
from autopipe.backends.torch.runtime.state.running_statistics import (
    move,
    shared_statistics,
    sharing_groups,
)
from autopipe.backends.torch.runtime.step.capture import capture_stages
from autopipe.backends.torch.runtime.step.compiled import compile_stages
from autopipe.backends.torch.runtime.step.cuda_graphs import (
    CaptureResources,
    NotCaptured,
    has_cuda_graphs,
)
from autopipe.backends.torch.runtime.step.gradients import (
    GradientReduction,
    buckets_of_rank,
    groups_of,
)
from autopipe.backends.torch.runtime.step.optimizers import (
    GradientClipping,
    average_weights,
    groups_of_parameters,
    make_optimizer,
    make_state,
    scale_gradients,
    set_learning_rate,
    tensor_groups,
)
from autopipe.backends.torch.runtime.step.precision import (
    LossScaler,
    LowPrecisionCopies,
    low_precision_type,
    set_products,
)
from autopipe.backends.torch.runtime.step.stage import Port, RankContext, Stage, perturbed
from autopipe.backends.torch.runtime.step.update_graph import UpdateGraph
from autopipe.backends.torch.runtime.watch.clock import StepProfiler
from autopipe.backends.torch.runtime.watch.failures import (
    end_on_error,
    live_with_launcher,
    stop_on_signal,
)
from autopipe.backends.torch.runtime.watch.heartbeat import ENDED, Heartbeat, Timeouts
from autopipe.backends.torch.runtime.watch.report import Reporter
from autopipe.backends.torch.runtime.watch.step_agreement import SAVE, STOP, StepAgreement
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.problem import FIRST_LOSS_SCALE
from autopipe.ir.words import plural


class Rank(RankContext):
    """The world as one rank sees it. A generated file makes one, adds its stages, and hands over
    its `step`.
    """

    def __init__(self, number: int, file: str) -> None:
        heartbeat = Heartbeat.of(number)
        end_on_error(number, heartbeat)
        live_with_launcher(heartbeat)
        os.environ.update(variables_of_rank(os.environ))
        options = parse_options(sys.argv[1:])
        manifest = read_manifest(Path(file).resolve().parent, options.model)
        timeouts = Timeouts(options.start_timeout, options.step_timeout, options.checkpoint_timeout)
        transport = (DryTransport if options.dry_run else Transport)(
            options.device, timeouts, heartbeat
        )
        if transport.world_size != manifest.world_size:
            raise ConfigurationError(
                f"the program is for {manifest.world_size} {plural(manifest.world_size, 'rank')}, "
                f"{transport.world_size} were started",
                hint="launch as many processes as the plan has devices",
            )
        if transport.rank != number:
            raise ConfigurationError(f"rank {transport.rank} runs the file of rank {number}")
        super().__init__(number, options, manifest, transport, heartbeat)
        self.global_order = GlobalOrder(self) if options.blocking else None
        self.memory_tracker: MemoryTracker | None = None
        self.clipping: GradientClipping | None = None
        self._steps_saved = 0
        self._begin = START
        self._repeated = False
        self._ended_early = False
        self._captured = False
        self.updated_first: list[torch.Tensor] = []
        """Tensors that the optimizer has updated in the first step."""
        self.update_graph: UpdateGraph | None = None

    def stage(self, number: int, module: ModuleType, *ports: Port) -> Stage:
        wiring = self, number, module, Arguments(device=self.device, training=True), ports
        if self.options.dry_run:
            self.stages[number] = DryStage(*wiring)
        elif self.global_order is not None:
            self.stages[number] = BlockingStage(self.global_order, *wiring)
        else:
            self.stages[number] = Stage(*wiring)
        return self.stages[number]

    def main(self, step: Callable[[], None]) -> None:
        without_values = self.options.device == "meta" or fake_cuda.is_loaded()
        with (
            use_fake_tensors(self.device)
            if without_values
            else nullcontext() as self.memory_tracker
        ):
            self._run_all(step)

    def _run_all(self, step: Callable[[], None]) -> None:
        self.set_up()
        if self.options.generate is not None:
            generate(self, self.options.generate, step)
            self.transport.stop()
            self.heartbeat.task = ENDED
            return
        self._restore()
        # What is recorded or run dry is one step, which may be run again.
        if self.device.type == "cuda" and not self.options.dry_run and self.options.record is None:
            self.reader = PrefetchingReader(
                self.manifest, self.reader.source, self.device, self.options.steps
            )
        while self.steps_done < self.options.steps and not self._ended_early:
            self.step_samples = self.reader.begin_step(self.steps_done)
            if not self.step_samples:
                self.reporter.report()
                self.reporter.say(f"{self.data} has ended: there is no step {self.steps_done}")
                self._evaluate(step, last=True)
                self._save(last=True)
                break
            data = self.run(step)
            self.collector.end_step(data.samples)
            if data.epoch > 1 and not self._repeated:
                self._repeated = True
                left = data.left_over
                without = (
                    f", the last {left} {plural(left, 'sample')} left out, which fill no batch"
                    if left
                    else ""
                )
                begins = f"step {self.steps_done - 1} begins epoch {data.epoch}"
                self.reporter.say(f"{self.data} has ended{without}: {begins}")
            self._evaluate(step)
            asked = set() if self.agreement is None else self.agreement.reach(self.steps_done)
            if STOP in asked and self.steps_done < self.options.steps:
                self._ended_early = True
                self.reporter.say(
                    f"stopped after {self.steps_done} {plural(self.steps_done, 'step')}, "
                    f"the state is in {self.options.checkpoint}"
                )
            self._save(asked=SAVE in asked)
        self.reader.close()
        self.profiler.close()
        self.reporter.report()
        if self.checkpointer is not None:
            self.heartbeat.task = "checkpoint"
            self.checkpointer.close()
        if self.agreement is not None:
            with self.heartbeat.waiting():
                self.agreement.close()
        self.heartbeat.task = "end"
        self.collector.finish()
        self.transport.stop()
        self.heartbeat.task = ENDED

    def set_up(self) -> None:
        """Join the world and load what the stages need; once, before the first step."""
        manifest = self.manifest
        transport = self.transport
        options = self.options
        transport.start()
        set_products(manifest.precision, exact=options.record is not None)
        groups = groups_of(manifest)
        if self.train and manifest.precision == "fp16":
            scale = float(manifest.optimizer.get("loss_scale", FIRST_LOSS_SCALE))
            self.loss_scaler = LossScaler(scale, transport)
        sums = manifest.counts_labels or manifest.loss_division.root
        if self.loss_scaler is not None or sums or manifest.training.max_norm is not None:
            groups.add(tuple(range(manifest.world_size)))
        self._shared_statistics = shared_statistics(manifest)
        transport.connect(
            groups | sharing_groups(manifest, self._shared_statistics), manifest.channels
        )
        if self.device.type == "cuda" and manifest.memory_limits:
            limit_memory(manifest.memory_limits[self.number], self.device)
        narrow = None if self.train else low_precision_type(manifest.precision)
        valued = self.memory_tracker is None
        self.parameters = load_parameters(
            manifest, self.number, self.device, self.seed, narrow, valued
        )
        if options.perturb:
            for index, tensor in self.parameters.items():
                tensor.data = perturbed(tensor.data, options.perturb, index)
        self.low_precision_copies = LowPrecisionCopies(self.parameters, manifest)
        equip_stages(self)
        self._set_up_update()
        self.checkpointer: Checkpointer | None = None
        self.agreement: StepAgreement | None = None
        if options.checkpoint is not None:
            self._save_in(options.checkpoint)
        self.reader = BatchReader(manifest, self._open_source(START), self.device)
        evaluation = evaluation_of(manifest, options)
        self.evaluator = (
            None if evaluation.data is None else Evaluator(self, evaluation, options.steps)
        )
        self.collector = OutputCollector(manifest, transport, options.outputs)
        self.collect = self.collector.keep
        self.reporter = Reporter(self)
        self.profiler = StepProfiler(
            options.profiled, options.profile, self.number, self.device, self.heartbeat
        )
        self.clock.keeps_waits = options.trace is not None or options.profile is not None
        if options.compile:
            self.heartbeat.task = "compile"
            for line in compile_stages(self.stages, transport):
                self.reporter.say(line)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # The first step begins with nothing left to do.
            torch.cuda.reset_peak_memory_stats(self.device)
        for notice in transport.notices:
            self.reporter.say(notice)
        if isinstance(transport, DryTransport):
            self.reporter = DryReporter(self, transport, self.memory_tracker)

    def _save_in(self, folder: Path) -> None:
        """Be ready to save checkpoints, also when this rank, or another one, is asked to stop."""
        manifest = self.manifest
        transport = self.transport
        options = self.options
        owned = self.number, self.parameters, self.optimizer, self.device, self.reduction.shards
        state = TrainingState(manifest, *owned, self.loss_scaler)
        kept = options.keep_latest_k, options.keep_every
        self.checkpointer = Checkpointer(
            folder, manifest, state, transport.make_control_group(), *kept, options.run
        )
        every_s = 60 * options.checkpoint_minutes
        self.agreement = StepAgreement(transport.store, transport.make_control_group(), every_s)
        stop_on_signal(partial(self.agreement.request, STOP))

    def _set_up_update(self) -> None:
        """Make the exchanges of gradients, and the optimizer."""
        manifest = self.manifest
        transport = self.transport
        options = self.options
        buckets = buckets_of_rank(manifest, self.number) if self.train else ()
        shared = manifest.optimizer["shard"]
        groups = groups_of_parameters(manifest)
        self.reduction = GradientReduction(transport, self.parameters, buckets, shared, groups)
        updated = tensor_groups(manifest, self.reduction) if self.train else []
        self.optimizer = make_optimizer(manifest.optimizer, updated)
        if options.dry_run and self.optimizer is not None:
            make_state(self.optimizer)  # The one step shall take what any other takes.
            self._average()
        if self.train and (max_norm := manifest.training.max_norm) is not None:
            counted = self.reduction.counted(self.number, manifest.shards[self.number])
            self.clipping = GradientClipping(max_norm, transport, counted, self.reduction.updated)

    def _restore(self) -> None:
        """Go on from the newest checkpoint, where the options ask for it: from its place in the
        data, and its seed unless one is given.
        """
        folder = self.options.checkpoint
        if self.checkpointer is None or folder is None:
            return
        self.heartbeat.task = "restore"
        if not self.options.resume:
            check_unused(folder)
            return
        saved = self.checkpointer.restore()
        if saved is None:
            return
        self.steps_done = self._steps_saved = saved.step
        self._begin = Position(saved.step, saved.samples, saved.forwards)
        self.seed = saved.seed if self.options.seed is None else self.options.seed
        self.low_precision_copies.refresh()
        self.reader = BatchReader(self.manifest, self._open_source(self._begin), self.device)
        if self.evaluator is not None and (best := self.checkpointer.best()) is not None:
            self.evaluator.restore(best)
        self.reporter.say(f"resuming at step {saved.step} from {folder}")

    def _open_source(self, begin: Position) -> Source:
        """The data from there on, as the plan has it under the flags; a number of epochs is a
        number of steps already where that is known in advance.
        """
        options = self.options
        settings = self.manifest.data
        shuffle = settings.shuffle if options.shuffle is None else options.shuffle
        settings = replace(settings, epochs=options.epochs, shuffle=shuffle)
        return open_source(self.manifest, self.data, self.seed, begin, settings)

    def _evaluate(self, step: Callable[[], None], last: bool = False) -> None:
        """Validate where that is due; keep what is the best so far."""
        if self.evaluator is None or not self.evaluator.is_due(last):
            return
        self.reporter.report()
        report = self.evaluator.run(partial(self._run_once, step))
        self.reporter.publish(report)
        if self.checkpointer is not None and report.best_step == report.step:
            self.checkpointer.save(self._position(), self.seed, report.eval_loss)
        if self.evaluator.has_no_patience_left():
            self._ended_early = True
            self.reporter.say(
                f"no lower validation loss than that of step {report.best_step}: the run ends"
            )

    def _run_once(self, step: Callable[[], None]) -> None:
        """Run a batch. Of a validation's nothing but forwards and their messages does anything in
        `step`.
        """
        if self.global_order is not None:
            self.global_order.begin(step)
        step()
        if self.global_order is not None:
            self.global_order.reach(None)

    def _save(self, last: bool = False, asked: bool = False) -> None:
        """Start to save a checkpoint where one is due: at the interval, after the last step, and
        where that is asked for.
        """
        if self.checkpointer is None:
            return
        every = self.options.checkpoint_every
        done = self.steps_done
        self.heartbeat.task = "checkpoint"
        if last and done == self._steps_saved:
            return
        if (
            last
            or asked
            or self._ended_early
            or done == self.options.steps
            or (every and done % every == 0)
        ):
            self.reporter.report()  # No later start reports these steps again.
            self._steps_saved = done
            self.checkpointer.save(self._position(), self.seed)
        else:
            self.checkpointer.has_ended()

    def _position(self) -> Position:
        """Return how far the run has come, with the runs that it goes on from."""
        forwards = self._begin.forwards
        if forwards is not None:
            steps = self.steps_done - self._begin.steps
            forwards += (
                steps
                * self.manifest.micro_batches
                * self.manifest.training.gradient_accumulation_steps
            )
        return Position(self.steps_done, self.samples_done, forwards)

    def run(self, step: Callable[[], None]) -> StepData:
        """Run a step, and say what data it took."""
        self.profiler.begin_step(self.steps_done)
        if self.options.replay is None or self.steps_done == 0:
            self._compute(step)
        else:
            self.clock.begin_step()
        self.heartbeat.task = "update"
        if self.train:
            with self.heartbeat.waiting():
                self.reduction.finish()
                self._divide_gradients()
                if self.loss_scaler is not None:
                    self.loss_scaler.unscale(self.reduction.updated)
            self._record("gradients")
            if self.options.replay is not None:
                load_gradients(self.options.replay, self.steps_done, self.parameters)
            if self.checkpointer is not None:
                self.checkpointer.before_update()
            running = ((number, stage.p.running) for number, stage in self.stages.items())
            move(self.manifest, self.transport, self.parameters, running, self._shared_statistics)
            self._update()
            self._record("parameters")
        with self.heartbeat.waiting():
            self.transport.finish()
        if self.loss_scaler is not None:
            self.loss_scaler.end_step()
            if self.options.record is not None and self.loss_scaler.was_skipped():
                # To be verified are gradients, and parameters are where they were.
                self.clear_step()
                return self.run(step)
        if self.train:
            self.low_precision_copies.refresh()
        self.reporter.end_step()
        self.profiler.end_step(self.steps_done)
        self.clear_step()
        self.steps_done += 1
        self._capture()
        return self.reader.end_step(
            self.steps_done - 1
        )  # A thread may copy from then on, which no capture allows.

    def _capture(self) -> None:
        """After the first step, capture CUDA graphs: if they are asked for, or by default if steps
        are left.
        """
        asked = self.options.cuda_graphs
        by_default = (
            has_cuda_graphs(self.device)
            and not self.options.dry_run
            and self.options.record is None
        )
        by_default = by_default and self.steps_done < self.options.steps
        if not self._captured and (by_default if asked is None else asked):
            self._captured = True
            self.heartbeat.task = "capture"
            self.reporter.say(capture_stages(self, self._capture_update))

    def _capture_update(self, resources: CaptureResources) -> str:
        """Capture the update. Return the reason why it stays eager, "" if it does not."""
        if self.optimizer is None or not self.updated_first:
            return ""
        try:
            skips = self.loss_scaler is not None
            self.update_graph = UpdateGraph(
                self.optimizer, self.updated_first, self._average, skips, resources
            )
        except NotCaptured as error:
            return str(error)
        return ""

    def _compute(self, step: Callable[[], None]) -> None:
        """Run the forwards and backwards of all of the step's batches."""
        if self.global_order is not None:
            self.global_order.note(step)
        self.clock.begin_step()
        if self.manifest.counts_labels:
            self.counted = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in range(self.manifest.training.gradient_accumulation_steps):
            self.batch = batch
            self._run_once(step)
        self.batch = 0

    def _record(self, kind: str) -> None:
        """Leave gradients before, or parameters after the update of the first steps, where options
        ask for them.
        """
        if self.options.record is None or self.steps_done >= RECORDED_STEPS:
            return
        tensors = self.reduction.gradients() if kind == "gradients" else self.parameters
        dump_tensors(self.options.record, kind, self.steps_done, self.number, tensors)

    def _divide_gradients(self) -> None:
        """Divide gradients by the step's divisor, where so far they are those of its dividend; a
        square root of the quotient divides them by twice the root.
        """
        division = self.manifest.loss_division
        batches = self.manifest.training.gradient_accumulation_steps
        divisor = None
        if self.counted is not None:
            counted = self.transport.total(self.counted) / batches + division.added
            divisor = self.counted = (
                counted if division.minimum is None else counted.clamp(min=division.minimum)
            )
        if division.root:
            own = torch.zeros((), dtype=torch.float64, device=self.device)
            for stage in self.stages.values():
                for loss in stage.losses.values():
                    own += loss.double() * (stage.loss_share / batches)
            loss = self.transport.total(own)
            root = (loss if divisor is None else loss / divisor).sqrt()
            divisor = 2 * root if divisor is None else divisor * 2 * root
        if divisor is not None:
            scale_gradients(self.reduction.updated, divisor.reciprocal())

    def _update(self) -> None:
        """Clip the gradients, and update parameters by them at the step's rate; all ranks
        together.
        """
        if self.clipping is not None:
            with self.heartbeat.waiting():
                self.grad_norm = self.clipping.clip()
        factor = self.manifest.lr_scheduler.factor(self.steps_done, self.options.steps)
        self.learning_rate = self.manifest.optimizer["lr"] * factor
        if self.optimizer is not None:
            set_learning_rate(self.optimizer, self.learning_rate)
            self._step_optimizer(self.optimizer)
            self.optimizer.zero_grad(set_to_none=True)
        with self.heartbeat.waiting():
            for bucket in self.reduction.shared:
                bucket.gather()

    def _step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step, and update the moving average; by a CUDA graph if there is
        one.
        """
        scaler = self.loss_scaler
        updated = self.reduction.updated
        if not self._captured:
            self.updated_first = [each for each in updated if each.grad is not None]
        overflow = None if scaler is None else scaler.overflow
        if self.update_graph is not None and self.update_graph.replay(updated, overflow):
            return
        if scaler is None or self.options.dry_run:
            optimizer.step()
        else:
            scaler.update(optimizer)
        self._average()

    def _average(self) -> None:
        decay = self.manifest.training.ema_decay
        if decay is not None and self.optimizer is not None:
            average_weights(self.optimizer, decay)


def limit_memory(limit: int, device: torch.device) -> None:
    """Let tensors on a GPU take up to `limit` bytes. The rest is for the CUDA context and NCCL's
    buffers.
    """
    share = limit / torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
