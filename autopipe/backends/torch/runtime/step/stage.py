"""One stage on one rank: what its file says it takes and gives, and the verbs that a generated step
is made of.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

import torch

from autopipe.backends.torch.runtime.communication.transport import (
    Form,
    PendingRecv,
    PendingSend,
    Transport,
)
from autopipe.backends.torch.runtime.data.batch_reader import BatchReader, BlockRequest
from autopipe.backends.torch.runtime.data.sample_source import Slices
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.modes.mode import Mode
from autopipe.backends.torch.runtime.options import Options
from autopipe.backends.torch.runtime.state.parameters import Arguments, torch_dtype
from autopipe.backends.torch.runtime.step.cuda_graphs import (
    Captured,
    CaptureResources,
    NotCaptured,
    Slot,
    StageGraphs,
    names_in,
    why_not_captured,
)
from autopipe.backends.torch.runtime.step.gradients import GradientReduction
from autopipe.backends.torch.runtime.step.output_edges import OutputEdge, run_backward
from autopipe.backends.torch.runtime.step.precision import LossScaler, LowPrecisionCopies, autocast
from autopipe.backends.torch.runtime.step.weight_gradients import Waiting, compute_all
from autopipe.backends.torch.runtime.watch.clock import Clock
from autopipe.backends.torch.runtime.watch.heartbeat import Heartbeat
from autopipe.backends.torch.torch_interfaces import accumulate_gradients
from autopipe.ir.graph import DType
from autopipe.ir.schedule import MicroBatchSlice

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Data:
    """An argument read from the batch: the block `box` of one micro-batch of the graph input
    `name`.
    """

    argument: str
    name: str
    box: Slices


@dataclass(frozen=True, slots=True, kw_only=True)
class _Port:
    """A value, or the block `box` of it, on its way between this stage and a stage on `rank`.
    `slice` is the index and count of the `MicroBatchSlice` of this stage's micro-batches of which
    it carries something, `part` the index of that of the other stage's. It travels as `dtype`,
    which may be narrower than the value's own.
    """

    rank: int
    stage: int
    channel: int
    gradient: bool = True  # True if its gradient goes the other way.
    dtype: str | None = None  # None for the value's own.
    box: Slices | None = None
    slice: tuple[int, int] = (0, 1)
    part: int = 0


@dataclass(frozen=True, slots=True)
class Receive(_Port):
    argument: str


@dataclass(frozen=True, slots=True)
class Send(_Port):
    result: int


@dataclass(frozen=True, slots=True)
class Loss:
    """The result that is the loss; `share` is its weight in the step's loss, over all ranks and
    micro-batches.
    """

    result: int
    share: float


@dataclass(frozen=True, slots=True)
class Labels:
    """The result that is the number of a micro-batch's labels that count; `share` is its weight in
    the part of the step's labels that do, over all ranks and micro-batches.
    """

    result: int
    share: float


Port = Data | Receive | Send | Loss | Labels
_Between = TypeVar("_Between", Receive, Send)

_Source = tuple[int | None, int | None]
"""Stage and part that something comes from; None for all."""

Block = tuple[
    torch.Tensor, Slices | None
]  # A block of a tensor, and where in it; None for all of it.


@dataclass(slots=True)
class EagerPass:
    """State of an eager forward for its backward."""

    asking: Tensors
    """The arguments whose gradients are needed."""
    edges: tuple[OutputEdge, ...]
    waiting: Waiting
    """Gradients of parameters that the first half of a split backward leaves."""

    def weight_gradients(self) -> None:
        """Compute the gradients that wait."""
        compute_all(self.waiting)


def _part(tensor: torch.Tensor, box: Slices | None) -> torch.Tensor:
    return tensor if box is None else tensor[tuple(slice(*each) for each in box)]


def _assembled(
    pieces: list[Block], form: Form, device: torch.device, add: bool = False
) -> torch.Tensor:
    """A tensor of its blocks; or, with `add`, the sum of blocks that may overlap, zero where there
    is none. Blocks may have narrower types.
    """
    dtype, shape = form
    if len(pieces) == 1 and pieces[0][1] is None:
        return pieces[0][0].to(dtype)
    make, put = (torch.zeros, torch.Tensor.add_) if add else (torch.empty, torch.Tensor.copy_)
    whole = make(shape, dtype=dtype, device=device)
    for tensor, box in pieces:
        put(_part(whole, box), tensor)
    return whole


@dataclass(frozen=True, slots=True)
class EvaluationStep:
    """A step of a validation: its forwards alone run, on data of its own."""

    reader: BatchReader
    number: int


class RankContext:
    """The part of a rank that its stages, its reports and the order of blocking messages use."""

    reader: BatchReader
    reduction: GradientReduction
    shared_statistics: frozenset[int] = frozenset()
    """Running statistics, by parameter index, that forward passes of several stages move."""
    loss_scaler: LossScaler | None = None
    """Where a program in fp16 trains."""
    evaluated: EvaluationStep | None = None
    """The step of a validation that runs now, if any: then backwards do nothing."""
    learning_rate: float | None = None
    """Of the step that was updated last, of parameters in no group."""
    grad_norm: torch.Tensor | None = None
    """Norm of the step's gradients over all ranks, before they are clipped, []; None where nothing
    computes it.
    """
    collect: Callable[[int, int, tuple[torch.Tensor, ...]], None]
    """Keeps a stage's results of inference by micro-batch, counted over all steps."""

    def __init__(
        self,
        number: int,
        options: Options,
        manifest: Manifest,
        transport: Transport,
        heartbeat: Heartbeat,
        modes: tuple[Mode, ...] = (),
    ) -> None:
        self.number = number
        self.modes = modes
        self.options = options
        self.manifest = manifest
        self.train = manifest.train
        self.seed = manifest.seed if options.seed is None else options.seed
        self.transport = transport
        self.heartbeat = heartbeat
        self.device = transport.device
        self.clock = Clock(self.device)
        self.data = manifest.data.path if options.data is None else options.data
        self.steps_done = 0
        self.step_samples = manifest.batch_size
        """Samples of this step that are data; those behind them fill its batch up."""
        self.batch = 0
        """Number of the batch that runs, of those whose gradients the step adds up."""
        self.counted: torch.Tensor | None = None
        """The part of the step's labels that count, on the device, []; this rank's share until the
        step is done. None where none of them are counted.
        """
        self.stages: dict[int, Stage] = {}
        self.parameters: dict[int, torch.Tensor] = {}
        self.low_precision_copies = LowPrecisionCopies({}, manifest)

    @property
    def training(self) -> bool:
        return self.train and self.evaluated is None

    @property
    def samples_done(self) -> int:
        """Number of the next step's first sample: how far the data was gone through, by plans of
        other batches too.
        """
        return self.reader.source.sample(self.steps_done)

    def weight(self, stage: int, micro_batch: int) -> float:
        """The share of a stage's micro-batch in the step's samples, times their number: 1 but where
        samples fill the batch up, which count nothing.
        """
        batch = self.manifest.batch_size
        if (
            self.step_samples == batch or self.evaluated is not None
        ):  # A validation weighs them itself.
            return 1.0
        size = self.manifest.micro_batch_size // self.manifest.stages[stage].micro_batch_ratio
        own = max(0, min(size, self.step_samples - micro_batch * size))
        if (
            self.manifest.counts_labels
        ):  # Of those that are left out, in a micro-batch that has others.
            return float(own > 0)
        return own * (batch // size) / self.step_samples

    def read(self, stage: int, micro_batch: int, data: Data) -> torch.Tensor:
        """Read a stage's block of a graph input for one of its micro-batches of this step, on the
        device.
        """
        request = BlockRequest(stage, micro_batch, data.name, data.box)
        if self.evaluated is not None:
            return self.evaluated.reader.read(self.evaluated.number, request)
        found = self.reader.read(self.steps_done, request)
        if self.modes:
            size = self.manifest.micro_batch_size // self.manifest.stages[stage].micro_batch_ratio
            first = self.samples_done + micro_batch * size
            for mode in self.modes:
                found = mode.on_input(found, first)
        return found

    def clear_step(self) -> None:
        self.transport.traffic.clear()
        for stage in self.stages.values():
            stage.end_step()


class Stage:
    """Runs a stage's forward and backward and its part of the exchanges, micro-batch by
    micro-batch.
    """

    def __init__(
        self,
        rank: RankContext,
        number: int,
        module: ModuleType,
        arguments: Arguments,
        ports: tuple[Port, ...],
    ) -> None:
        self._rank = rank
        self.number = number
        self._inputs: dict[str, Form] = module.INPUTS
        self._outputs: tuple[Form, ...] = tuple(module.OUTPUTS.values())
        self.p = arguments
        self.module = module
        self.data = [port for port in ports if isinstance(port, Data)]
        self.receives = tuple(port for port in ports if isinstance(port, Receive))
        self.sends = tuple(port for port in ports if isinstance(port, Send))
        self._slices = {
            port.channel: MicroBatchSlice(*port.slice) for port in (*self.receives, *self.sends)
        }
        self._loss = next((port for port in ports if isinstance(port, Loss)), None)
        self.loss_share = 0.0 if self._loss is None else self._loss.share
        """Weight of one micro-batch's loss on this rank in its batch's loss; 0 where the stage
        gives no loss.
        """
        self._labels = next((port for port in ports if isinstance(port, Labels)), None)
        self.function = module.forward
        self.compiled: str | None = None
        """Parts of the stage that run eagerly although it was compiled, "" for none; None where it
        was not.
        """
        self.graphs: StageGraphs | None = None
        self._most_in_flight = 1
        self._readers = Counter(
            int(name[1:]) for segment in getattr(module, "SEGMENTS", ()) for name in segment
        )
        """By parameter the segments that run again and read it."""
        # By micro-batch, and whether they are gradients, by channel: messages that come, those to
        # be sent, and what came from stages on this rank.
        self._arriving = defaultdict[tuple[int, bool], dict[int, PendingRecv]](dict)
        self._leaving = defaultdict[tuple[int, bool], dict[int, torch.Tensor]](dict)
        self._local = defaultdict[tuple[int, bool], dict[int, torch.Tensor]](dict)
        # By micro-batch what a forward leaves for its backward, and the first half of a split
        # backward for the second.
        self._kept: dict[int, EagerPass | Slot] = {}
        self._waiting: dict[int, EagerPass | Slot] = {}
        self._backwards = 0
        """Micro-batches of this step whose gradients of parameters are being or have been computed.
        """
        self._unowned: list[torch.Tensor] | None = None
        """Parameters that no backward of this step has given a gradient of their own; None before
        the first.
        """
        self.losses: dict[int, torch.Tensor] = {}

    def _due(
        self, ports: tuple[_Between, ...], micro_batch: int, gradient: bool = False
    ) -> list[_Between]:
        return [
            port
            for port in ports
            if self._slices[port.channel].has(micro_batch) and (port.gradient or not gradient)
        ]

    def _remote(
        self,
        ports: tuple[_Between, ...],
        micro_batch: int,
        gradient: bool = False,
        source: _Source = (None, None),
    ) -> list[_Between]:
        """Ports through which something of a micro-batch goes to or comes from other ranks, all or
        those of a source.
        """
        (stage, part) = source
        due = self._due(ports, micro_batch, gradient)
        found = (port for port in due if stage in (None, port.stage) and part in (None, port.part))
        return [port for port in found if port.rank != self._rank.number]

    def _exchange(
        self, act: Callable[[_Between, int], object], ports: list[_Between], micro_batch: int
    ) -> None:
        """Post or send what goes through ports. What a micro-batch gives to one of another stage,
        to its part on one rank, goes together.
        """
        batches = defaultdict[tuple[int, int, int], list[_Between]](list)
        for port in ports:
            batches[port.rank, port.stage, port.part].append(port)
        for together in batches.values():
            with self._rank.transport.batch():
                for port in together:
                    act(port, micro_batch)

    def _form(self, port: Receive | Send) -> Form:
        """Of what goes through a port, and of its gradient."""
        dtype, shape = (
            self._outputs[port.result] if isinstance(port, Send) else self._inputs[port.argument]
        )
        if port.dtype is not None:
            dtype = torch_dtype(DType(port.dtype))
        return dtype, shape if port.box is None else tuple(stop - start for start, stop in port.box)

    def receive(self, micro_batch: int, source: int | None = None, part: int | None = None) -> None:
        """Post the receives of the arguments that come from other ranks, all or those of one stage,
        or of one part.
        """
        self._exchange(
            self.post_recv,
            self._remote(self.receives, micro_batch, False, (source, part)),
            micro_batch,
        )

    def receive_gradient(
        self, micro_batch: int, source: int | None = None, part: int | None = None
    ) -> None:
        """Post the receives of the results' gradients, all or those of one stage, or of one
        part.
        """
        if self._rank.training:
            self._exchange(
                self.post_recv,
                self._remote(self.sends, micro_batch, True, (source, part)),
                micro_batch,
            )

    def send(self, micro_batch: int) -> None:
        """Start sending the results that other ranks need."""
        self._exchange(self.start_send, self._remote(self.sends, micro_batch), micro_batch)

    def send_gradient(self, micro_batch: int) -> None:
        """Start sending the arguments' gradients to where the arguments came from."""
        if self._rank.training:
            self._exchange(
                self.start_send,
                self._remote(self.receives, micro_batch, gradient=True),
                micro_batch,
            )

    def post_recv(self, port: Receive | Send, micro_batch: int) -> PendingRecv:
        """Post the receive of what comes through a port: an argument, or the gradient of a
        result.
        """
        gradient = isinstance(port, Send)
        pending = self._rank.transport.receive(self._form(port), port.rank, port.channel, gradient)
        self._arriving[micro_batch, gradient][port.channel] = pending
        return pending

    def start_send(self, port: Receive | Send, micro_batch: int) -> PendingSend:
        """Start sending what goes through a port: a result, or the gradient of an argument."""
        gradient = isinstance(port, Receive)
        block = self._leaving[micro_batch, gradient].pop(port.channel)
        return self._rank.transport.send(block, port.rank, port.channel, gradient)

    def forward(self, micro_batch: int) -> None:
        """Wait for the arguments and compute."""
        rank = self._rank
        manifest = self._rank.manifest
        rank.heartbeat.task = task = f"{self.number}F{micro_batch}"
        arguments = self._arguments(micro_batch)
        ratio = manifest.stages[self.number].micro_batch_ratio
        whole = manifest.micro_batch_size
        number = self._of_step(micro_batch)
        step = rank.steps_done if rank.evaluated is None else rank.evaluated.number
        self.p.random.begin(rank.seed, step, number * (whole // ratio), number // ratio * whole)
        self.p.training = rank.evaluated is None
        self.p.running.begin(rank.evaluated is None)
        start = rank.clock.mark()
        slot = self.graphs.take() if self.graphs is not None and rank.evaluated is None else None
        results = (
            self._results(arguments)
            if slot is None
            else slot.forward(arguments, self.p.random.state)
        )
        rank.clock.add(task, start)
        if rank.training:
            self.p.running.end(number)
            self._kept[micro_batch] = slot or self._eager_pass(arguments, results)
            self._most_in_flight = max(self._most_in_flight, len(self._kept) + len(self._waiting))
        elif slot is not None:
            slot.release()
        for port in self._due(self.sends, micro_batch):
            self._pass_on(port, micro_batch, results[port.result].detach())
        if self._loss is not None:
            loss = results[self._loss.result].detach()
            weight = rank.weight(self.number, number)
            self.losses[number] = loss if weight == 1 else loss * weight
        if self._labels is not None and rank.counted is not None:
            share = results[self._labels.result].detach().double() * self._labels.share
            rank.counted += share * rank.weight(self.number, number)
        if not rank.train:
            counted = rank.steps_done * manifest.micro_batches_at(self.number) + micro_batch
            rank.collect(self.number, counted, results)

    def _of_step(self, micro_batch: int) -> int:
        """The number of one of the batch's micro-batches among all of the step's."""
        return self._rank.batch * self._rank.manifest.micro_batches_at(self.number) + micro_batch

    def _results(self, arguments: Tensors) -> tuple[torch.Tensor, ...]:
        """The results in the types that those who receive them expect: autocast computes in
        narrower ones.
        """
        rank = self._rank
        with torch.set_grad_enabled(rank.training), autocast(rank.manifest.precision, rank.device):
            results = self.function(self.p, *arguments.values())
            return tuple(
                result.to(dtype) for result, (dtype, _) in zip(results, self._outputs, strict=True)
            )

    def _arguments(self, micro_batch: int) -> Tensors:
        number = self._of_step(micro_batch)
        found = {data.argument: self._rank.read(self.number, number, data) for data in self.data}
        parts = defaultdict[str, list[Block]](list)
        for port, tensor in self._arrived(self.receives, micro_batch):
            parts[port.argument].append((tensor, port.box))
        gradients = self._asking()
        for name, pieces in parts.items():
            tensor = _assembled(pieces, self._inputs[name], pieces[0][0].device)
            found[name] = tensor.requires_grad_(True) if name in gradients else tensor
        return {name: found[name] for name in self._inputs}

    def _asking(self) -> set[str]:
        """Arguments whose gradients are needed."""
        return {port.argument for port in self.receives if port.gradient and self._rank.training}

    def _zeros(self) -> Tensors:
        """Arguments as every micro-batch has them."""
        return {
            name: torch.zeros(
                shape, dtype=dtype, device=self._rank.device, requires_grad=name in self._asking()
            )
            for name, (dtype, shape) in self._inputs.items()
        }

    def capture(self, resources: CaptureResources) -> str:
        """Capture the stage as CUDA graphs, which later steps replay; nothing is under way. There
        are as many slots as micro-batches were in flight before. Return the reason why the stage
        stays eager, "" if it does not.
        """
        rank = self._rank
        if reason := why_not_captured(names_in(inspect.getsource(self.module))):
            return reason
        seeded = {port.result for port in self.sends if port.gradient} if rank.training else set()
        if rank.training and self._loss is not None:
            seeded.add(self._loss.result)
        parameters = {name: rank.parameters[int(name[1:])] for name in self.module.PARAMETERS}
        stage = Captured(self.p, self._results, self._zeros, parameters, frozenset(seeded))
        try:
            self.graphs = StageGraphs(stage, resources, self._most_in_flight)
        except NotCaptured as error:
            return str(error)
        return ""

    def rehearse(self) -> None:
        """Run a micro-batch of zeros forwards and, in training, backwards; nothing is left of
        it.
        """
        results = self._results(self._zeros())
        waiting = self.p.weight_grads.take()
        if roots := [result for result in results if result.requires_grad]:
            accumulate_gradients(roots, [torch.zeros_like(root) for root in roots])
            compute_all(waiting + self.p.weight_grads.take())
        for tensor in self._rank.parameters.values():
            tensor.grad = None

    def _arrived(
        self, ports: tuple[_Between, ...], micro_batch: int, gradient: bool = False
    ) -> Iterator[tuple[_Between, torch.Tensor]]:
        """Messages through ports: of stages on this rank in the order in which they ran, then of
        other ranks.
        """
        local = self._local.pop((micro_batch, gradient), {})
        pending = self._arriving.pop((micro_batch, gradient), {})
        due = {port.channel: port for port in self._due(ports, micro_batch, gradient)}
        yield from ((due.pop(channel), tensor) for channel, tensor in local.items())
        for channel, port in due.items():
            heartbeat = self._rank.heartbeat
            clock = self._rank.clock
            with (
                heartbeat.waiting(port.rank, channel),
                clock.waiting(heartbeat.task, port.rank, channel),
            ):
                tensor = pending[channel].wait()
            yield port, tensor

    def _pass_on(self, port: Receive | Send, micro_batch: int, tensor: torch.Tensor) -> None:
        """Keep a result, or an argument's gradient, for its message; to a stage on this rank it
        goes at once.
        """
        gradient = isinstance(port, Receive)
        dtype = self._form(port)[0]
        block = _part(tensor, port.box).to(dtype)
        if port.rank != self._rank.number:
            self._leaving[micro_batch, gradient][port.channel] = block
            return
        target = self._rank.stages[port.stage]
        number = self._slices[port.channel].message(micro_batch)
        # A copy of what becomes an argument: requires_grad is set on it, and two stages may share
        # the tensor. It lies in memory as a received one does: a compiled stage is for one layout.
        arrives = target._local[target._slices[port.channel].micro_batch(number), gradient]
        arrives[port.channel] = (
            block if gradient else block.clone(memory_format=torch.contiguous_format)
        )

    def backward(self, micro_batch: int) -> None:
        """Wait for the results' gradients and compute those of parameters and arguments."""
        if not self._rank.training:
            return
        last = self._begins_last()
        # A replay adds to all gradients at once, and autograd's hooks do not run.
        if last and not self.p.weight_grads.used and not isinstance(self._kept[micro_batch], Slot):
            self._rank.reduction.arm(
                self.number, self._readers
            )  # Gradients are sent off as they come.
        self._propagate(micro_batch, "B")
        if last:
            self._rank.reduction.start(self.number)

    def input_gradient(self, micro_batch: int) -> None:
        """The first half of a backward: wait for the results' gradients and compute those of
        arguments.
        """
        if self._rank.training:
            self._propagate(micro_batch, "I")

    def weight_gradient(self, micro_batch: int) -> None:
        """The second half: compute the gradients of parameters that the first half left."""
        if not self._rank.training:
            return
        last = self._begins_last()
        self._rank.heartbeat.task = task = f"{self.number}W{micro_batch}"
        start = self._rank.clock.mark()
        self._waiting.pop(micro_batch).weight_gradients()
        self._rank.clock.add(task, start)
        if last:
            self._rank.reduction.start(self.number)

    def _begins_last(self) -> bool:
        """Count a micro-batch whose gradients of parameters are computed next; True if it is the
        step's last.
        """
        self._backwards += 1
        manifest = self._rank.manifest
        batches = manifest.training.gradient_accumulation_steps
        return self._backwards == batches * len(manifest.micro_batches_of(self.number))

    def _propagate(self, micro_batch: int, phase: str) -> None:
        """Compute the gradients of arguments and parameters; in phase `I` leave those that a split
        backward defers.
        """
        self._rank.heartbeat.task = task = f"{self.number}{phase}{micro_batch}"
        kept = self._kept.pop(micro_batch)
        incoming = defaultdict[int, list[Block]](list)
        for port, tensor in self._arrived(self.sends, micro_batch, gradient=True):
            incoming[port.result].append((tensor, port.box))
        start = self._rank.clock.mark()
        seeds = self._seeds(micro_batch, kept.edges, incoming)
        gradients = (
            kept.backward(seeds) if isinstance(kept, Slot) else self._run_backward(kept, seeds)
        )
        if phase == "I":
            self._waiting[micro_batch] = kept
        else:
            kept.weight_gradients()
        self._rank.clock.add(task, start)
        for source in self._due(self.receives, micro_batch, gradient=True):
            self._pass_on(source, micro_batch, gradients[source.argument])

    def _eager_pass(self, arguments: Tensors, results: tuple[torch.Tensor, ...]) -> EagerPass:
        """Return what the forward that has just run leaves for its backward."""
        asking = {name: tensor for name, tensor in arguments.items() if tensor.requires_grad}
        return EagerPass(asking, tuple(map(OutputEdge.of, results)), self.p.weight_grads.take())

    def _run_backward(self, kept: EagerPass, seeds: dict[int, torch.Tensor]) -> Tensors:
        """Run autograd from the gradients of results. Return the gradients of the arguments."""
        if seeds:
            run_backward(kept.edges, seeds)
            self._own_gradients(seeds.values(), kept.asking)
        kept.waiting += (
            self.p.weight_grads.take()
        )  # Segments that run again in the backward leave these.
        return {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in kept.asking.items()
        }

    def _own_gradients(self, seeds: Iterable[torch.Tensor], arguments: Tensors) -> None:
        """Copy each first gradient whose memory another parameter's, an argument's or a result's
        lies in: autograd keeps a part of what it was given as it is, and the next micro-batch is
        added in place.
        """
        if self._unowned is None:
            self._unowned = [each for each in self._rank.parameters.values() if each.requires_grad]
        if not self._unowned:
            return
        taken = [*seeds, *(each.grad for each in arguments.values() if each.grad is not None)]
        memory = {each.untyped_storage()._cdata for each in taken}
        for parameter in (given := [each for each in self._unowned if each.grad is not None]):
            assert parameter.grad is not None
            place = parameter.grad.untyped_storage()._cdata
            if place in memory:
                parameter.grad = parameter.grad.clone()
            memory.add(place)
        if given:
            self._unowned = [each for each in self._unowned if each.grad is None]

    def _seeds(
        self,
        micro_batch: int,
        results: tuple[OutputEdge, ...],
        incoming: defaultdict[int, list[Block]],
    ) -> dict[int, torch.Tensor]:
        """Return the gradients of results from which backward starts, by the index of the result;
        `incoming` are those that come from elsewhere.
        """
        if self._loss is not None:
            loss = results[self._loss.result]
            weight = self._rank.weight(self.number, self._of_step(micro_batch))
            weighed = (
                self.loss_share * weight / self._rank.manifest.training.gradient_accumulation_steps
            )
            share = torch.full(loss.form[1], weighed, dtype=loss.form[0], device=loss.device)
            if self._rank.loss_scaler is not None:
                share.mul_(self._rank.loss_scaler.scale)
            incoming[self._loss.result].append((share, None))
        # Exchanges in backward wait for the whole group, so a rank that no gradient comes to takes
        # part too.
        wanted = range(len(results)) if self.p.group.size > 1 else sorted(incoming)
        return {
            index: _assembled(
                incoming.get(index, []), results[index].form, results[index].device, add=True
            )
            for index in wanted
            if results[index].edge is not None
        }

    def end_step(self) -> None:
        self._kept.clear()
        self._leaving.clear()
        self.losses.clear()
        self._backwards = 0
        self._unowned = None
        if self.graphs is not None:
            self.graphs.end_step()
