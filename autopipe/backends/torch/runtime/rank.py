"""One rank: sets up what its stages need, and runs steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from autopipe.backends.torch.checkpoint.format import check_unused
from autopipe.backends.torch.runtime.blocking import BlockingStage, GlobalOrder
from autopipe.backends.torch.runtime.checkpoint import Checkpointer
from autopipe.backends.torch.runtime.checkpoint_state import TrainingState
from autopipe.backends.torch.runtime.collectives import Group
from autopipe.backends.torch.runtime.data import Position, open_source, read_block
from autopipe.backends.torch.runtime.dry_run import DryReporter, DryStage, DryTransport, MemoryTracker, use_fake_tensors
from autopipe.backends.torch.runtime.failures import end_on_error, live_with_launcher, parse_options
from autopipe.backends.torch.runtime.gradients import GradientReduction, buckets_of_rank, make_optimizer, make_state
from autopipe.backends.torch.runtime.heartbeat import ENDED, Heartbeat
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.backends.torch.runtime.parameters import Arguments, load_constants, load_parameters, torch_dtype
from autopipe.backends.torch.runtime.random_streams import Random
from autopipe.backends.torch.runtime.report import OutputCollector, Reporter, dump_gradients
from autopipe.backends.torch.runtime.stage import Clock, Data, Port, Stage
from autopipe.backends.torch.runtime.transport import ControlGroup, Transport
from autopipe.backends.torch.runtime.weight_gradients import WeightGradQueue
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.schedule import Task

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Rank:
    """The world as one rank sees it. A generated file makes one, adds its stages, and hands over its `step`."""

    def __init__(self, number: int, file: str) -> None:
        self.number = number
        self.heartbeat = Heartbeat.of(number)
        end_on_error(number, self.heartbeat)
        live_with_launcher(self.heartbeat)
        self.options = parse_options(sys.argv[1:])
        self.manifest = read_manifest(Path(file).resolve().parent)
        self.train = self.manifest.train
        self.seed = self.manifest.seed if self.options.seed is None else self.options.seed
        self.transport = (DryTransport if self.options.dry_run else Transport)(
            self.options.device, self.options.timeouts, self.heartbeat
        )
        if self.transport.world_size != self.manifest.world_size:
            raise ConfigurationError(
                f"the program is for {self.manifest.world_size} ranks, {self.transport.world_size} were started",
                hint="launch as many processes as the plan has devices",
            )
        if self.transport.rank != number:
            raise ConfigurationError(f"rank {self.transport.rank} runs the file of rank {number}")
        self.device = self.transport.device
        self.clock = Clock(self.device)
        self.global_order = GlobalOrder(self) if self.options.blocking else None
        self.control_group: ControlGroup
        self.stages: dict[int, Stage] = {}
        self.steps_done = 0
        self._samples = 0
        """Taken by this run; those that only fill a batch up are not counted."""
        self._repeated = False
        self.parameters: dict[int, torch.Tensor] = {}
        self.memory_tracker: MemoryTracker | None = None
        self._modules: dict[int, tuple[ModuleType, Arguments]] = {}
        self._inputs = {entry.name: entry for entry in self.manifest.inputs}

    @property
    def task(self) -> str:
        """Current task of the rank, for its heartbeat and its errors."""
        return self.heartbeat.task

    @task.setter
    def task(self, task: str) -> None:
        self.heartbeat.task = task

    def stage(self, number: int, module: ModuleType, *ports: Port) -> Stage:
        arguments = Arguments(device=self.device)
        self._modules[number] = (module, arguments)
        kind = DryStage if self.options.dry_run else Stage if self.global_order is None else BlockingStage
        self.stages[number] = kind(self, number, module, arguments, ports)
        return self.stages[number]

    def comes_to(self, task: Task) -> bool:
        """Exchange the messages before a task in the one order of all ranks, and say whether to run it now."""
        assert self.global_order is not None
        return self.global_order.come_to(task)

    def arguments_of(self, stage: int) -> Arguments:
        return self._modules[stage][1]

    def main(self, step: Callable[[], None]) -> None:
        if self.options.device == "meta":
            with use_fake_tensors() as self.memory_tracker:
                self._run_all(step)
        else:
            self._run_all(step)

    def _run_all(self, step: Callable[[], None]) -> None:
        self.set_up()
        self._restore()
        while self.steps_done < self.options.steps:
            if not self.source.has(self.steps_done):
                self.reporter.report()
                self.reporter.say(f"{self.options.data} has ended: there is no step {self.steps_done}")
                break
            self.run(step)
            self._tell_epoch(self.steps_done - 1)
            self._save()
        self.reporter.report()
        if self.checkpointer is not None:
            self.task = "checkpoint"
            self.checkpointer.close()
        self.task = "end"
        self.collector.finish(self._samples)
        self.transport.stop()
        self.task = ENDED

    def set_up(self) -> None:
        """Join the world and load what the stages need; once, before the first step."""
        manifest, transport = self.manifest, self.transport
        transport.start()
        gradient_groups = {shard.ranks for shards in manifest.shards for shard in shards}
        transport.make_groups({*gradient_groups, *(ranks for entry in manifest.stages for ranks in entry.groups())})
        transport.make_channels(manifest.channels)
        if self.options.blocking:
            self.control_group = transport.make_control_group()
        self.parameters = load_parameters(manifest, self.number, self.device, self.seed, self.memory_tracker is None)
        if self.options.perturb:
            for index, tensor in self.parameters.items():
                tensor.data = _perturbed(tensor.data, self.options.perturb, index)
        names = {name for module, _ in self._modules.values() for name in module.CONSTANTS}
        constants = load_constants(manifest.folder, names, self.device)
        named = constants | {f"w{index}": tensor for index, tensor in self.parameters.items()}
        for number, (module, arguments) in self._modules.items():
            for name in (*module.PARAMETERS, *module.CONSTANTS):
                setattr(arguments, name, named[name])
            arguments.group = Group(manifest.stages[number].ranks, transport)
            arguments.random = Random(self.device, arguments.group.position)
            arguments.weight_grads = WeightGradQueue(named[name] for name in module.PARAMETERS)
        buckets = buckets_of_rank(manifest, self.number) if self.train else ()
        self.reduction = GradientReduction(transport, self.parameters, buckets, manifest.optimizer["shard"])
        self.optimizer = make_optimizer(manifest.optimizer, self.reduction.updated) if self.train else None
        if self.options.dry_run and self.optimizer is not None:
            make_state(self.optimizer)  # The one step shall take what any other takes.
        self.checkpointer = self._checkpointer()
        self.source = open_source(manifest, self.options.data, self.seed)
        self.collector = OutputCollector(manifest, transport, self.options.outputs)
        self.reporter = Reporter(self)
        if isinstance(transport, DryTransport):
            self.reporter = DryReporter(self, transport, self.memory_tracker)

    def _checkpointer(self) -> Checkpointer | None:
        if self.options.checkpoint is None:
            return None
        shards = [each.shard for each in self.reduction.shared]
        state = TrainingState(self.manifest, self.number, self.parameters, self.optimizer, self.device, shards)
        control_group = self.transport.make_control_group()
        return Checkpointer(self.options.checkpoint, self.manifest, state, control_group)

    def _restore(self) -> None:
        """Go on from the newest checkpoint, where the options ask for it: from its place in the data, and its seed
        unless one is given."""
        if self.checkpointer is None or self.options.checkpoint is None:
            return
        self.task = "restore"
        if not self.options.resume:
            check_unused(self.options.checkpoint)
            return
        saved = self.checkpointer.restore()
        if saved is None:
            return
        self.steps_done = saved.step
        self.seed = saved.seed if self.options.seed is None else self.options.seed
        self.source = open_source(self.manifest, self.options.data, self.seed, Position(saved.step, saved.samples))
        self.reporter.say(f"going on after {saved.step} steps, from {self.options.checkpoint}")

    def _save(self) -> None:
        """Start to save a checkpoint where one is due: at the interval, and after the last step."""
        if self.checkpointer is None:
            return
        every, done = self.options.checkpoint_every, self.steps_done
        self.task = "checkpoint"
        if done == self.options.steps or (every and done % every == 0):
            self.reporter.report()  # No later start reports these steps again.
            self.checkpointer.save(Position(done, self.samples_done), self.seed)
        else:
            self.checkpointer.look()

    def _tell_epoch(self, step: int) -> None:
        """Say, the first time, that a step that was run took data again."""
        epoch = self.source.epoch(step)
        if epoch > 1 and not self._repeated:
            self._repeated, left = True, self.source.left_over
            without = f", the last {left} samples left out, which fill no batch" if left else ""
            self.reporter.say(f"{self.options.data} has ended{without}: step {step} begins epoch {epoch}")

    @property
    def samples_done(self) -> int:
        """Number of the next step's first sample: how far the data was gone through, by plans of other batches too."""
        return self.source.sample(self.steps_done)

    def run(self, step: Callable[[], None]) -> None:
        if self.global_order is not None:
            self.global_order.begin(step)
        started = time.perf_counter()
        self.clock.begin_step()
        step()
        if self.global_order is not None:
            self.global_order.end()
        self.task = "update"
        if self.train:
            with self.heartbeat.waiting():
                self.reduction.finish()
            if self.options.record is not None and self.steps_done == 0:
                dump_gradients(self.options.record, self.number, self.reduction.gradients())
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            with self.heartbeat.waiting():
                self.reduction.gather()
        with self.heartbeat.waiting():
            self.transport.finish()
        self.reporter.end_step(time.perf_counter() - started)
        self.transport.traffic.clear()
        for stage in self.stages.values():
            stage.end_step()
        self._samples += self.source.count(self.steps_done)
        self.steps_done += 1

    def before_last_gradients(self, stage: Stage) -> None:
        """Called as a whole backward starts; the last one of a step sends gradients off as they come."""
        if stage.backwards == len(self.manifest.micro_batches_of(stage.number)):
            self.reduction.arm(stage.number, stage.readers)

    def after_gradients(self, stage: Stage) -> None:
        """Called when a micro-batch's gradients are there; the last one's are sent off, unless that has begun."""
        if stage.backwards == len(self.manifest.micro_batches_of(stage.number)):
            self.reduction.start(stage.number)

    def autocast(self) -> AbstractContextManager[object]:
        dtype = _AUTOCAST.get(self.manifest.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def read(self, stage: int, micro_batch: int, data: Data) -> torch.Tensor:
        """Read a stage's block of a graph input for one of its micro-batches of this step, on the device."""
        entry = self._inputs[data.name]
        size = self.manifest.batch_size // self.manifest.micro_batches_at(stage)
        sample = self.samples_done + micro_batch * size
        block = torch.from_numpy(read_block(self.source, self.manifest, entry, sample, data.box))
        found = block.to(self.device, torch_dtype(entry.dtype), non_blocking=True)
        return _perturbed(found, self.options.perturb, sample) if self.options.perturb else found

    def begin_drawing(self, stage: int, micro_batch: int, random: Random) -> None:
        """Have the stage's random operators draw what belongs to one of its micro-batches of this step."""
        manifest, turns = self.manifest, self.manifest.stages[stage].turns
        size = manifest.micro_batch_size // turns
        random.begin(self.seed, self.steps_done, micro_batch * size, micro_batch // turns * manifest.micro_batch_size)

    def collect(self, stage: int, micro_batch: int, results: tuple[torch.Tensor, ...]) -> None:
        """Keep what this stage gives of the graph's outputs."""
        counted = self.steps_done * self.manifest.micro_batches_at(stage) + micro_batch
        self.collector.keep(stage, counted, self.number, results)


def _perturbed(tensor: torch.Tensor, step: float, key: int) -> torch.Tensor:
    """The tensor with each number a relative `step` larger or smaller, as `key` decides; whole numbers stay."""
    if not tensor.is_floating_point():
        return tensor
    signs = np.random.default_rng(key).integers(0, 2, tensor.shape, np.int8)
    factors = 1 + (torch.from_numpy(2 * signs - 1) * step).to(torch.float64)
    return (tensor.double() * factors.to(tensor.device)).to(tensor.dtype)
