"""Stages of a rank, whose methods the generated function `step` calls with micro-batch numbers;
`RankContext`, the part of a rank that stages use; and `Mode`, hooks of a rank's run.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

import torch

from autopipe.backends.torch.runtime.communication.transport import (
    PendingRecv,
    PendingSend,
    TensorForm,
    Transport,
)
from autopipe.backends.torch.runtime.data.batch_reader import BatchReader, BlockRequest
from autopipe.backends.torch.runtime.data.sample_source import BlockRanges
from autopipe.backends.torch.runtime.deprecated import warn_of_old_name
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.options import RankOptions
from autopipe.backends.torch.runtime.state.arguments import (
    Arguments,
    parameter_index,
    read_attributes,
)
from autopipe.backends.torch.runtime.state.parameters import torch_dtype
from autopipe.backends.torch.runtime.step.cuda_graphs import (
    CapturedStage,
    CaptureResources,
    GraphSlot,
    NotCapturedError,
    StageGraphs,
    names_in_source,
    reason_not_captured,
)
from autopipe.backends.torch.runtime.step.gradients import GradientReduction
from autopipe.backends.torch.runtime.step.output_edges import OutputEdge, run_backward
from autopipe.backends.torch.runtime.step.ports import Data, Labels, Loss, Port, Recv, Send
from autopipe.backends.torch.runtime.step.precision import LossScaler, LowPrecisionCopies, autocast
from autopipe.backends.torch.runtime.step.weight_gradients import (
    PendingWeightGradients,
    compute_weight_gradients,
)
from autopipe.backends.torch.runtime.watch.clock import Clock
from autopipe.backends.torch.runtime.watch.heartbeat import Heartbeat
from autopipe.backends.torch.torch_interfaces import accumulate_gradients
from autopipe.ir.graph import DType
from autopipe.ir.schedule import MicroBatchSlice

Tensors = dict[str, torch.Tensor]

_RemotePort = TypeVar("_RemotePort", Recv, Send)

_SourceAndPart = tuple[int | None, int | None]
"""(number of another stage, index of its `MicroBatchSlice`): selects the ports that exchange
tensors with this stage, for the micro-batches in this slice. None selects all stages or all slices.
"""

_TensorPiece = tuple[torch.Tensor, BlockRanges | None]
"""(piece, offsets): a slice of a tensor and its (start, stop) in each dimension of the tensor.
`offsets` is None if the piece is the full tensor.
"""


@dataclass(slots=True)
class EagerPass:
    """State that a forward saves for its backward, if the forward is not a CUDA graph."""

    inputs: Tensors
    """The arguments whose gradients are needed, by name."""
    edges: tuple[OutputEdge, ...]
    """References to the results in autograd's graph."""
    waiting: PendingWeightGradients
    """Gradients of parameters that the first half of a split backward defers to the second half."""

    def run_weight_gradients(self) -> None:
        """Compute the deferred gradients of parameters and add them to `grad`."""
        compute_weight_gradients(self.waiting)


def _slice_of(tensor: torch.Tensor, offsets: BlockRanges | None) -> torch.Tensor:
    """Return the slice `offsets` of a tensor, as a view; the tensor itself if `offsets` is None."""
    return tensor if offsets is None else tensor[tuple(slice(*each) for each in offsets)]


def _assemble_pieces(
    pieces: list[_TensorPiece], form: TensorForm, device: torch.device, add: bool = False
) -> torch.Tensor:
    """Return a tensor with `form`, an element type and a shape, assembled from `pieces`. With
    `add`, pieces may overlap and are summed, and elements in no piece are 0. Without `add`, the
    pieces must cover the tensor.
    """
    dtype, shape = form
    if len(pieces) == 1 and pieces[0][1] is None:
        return pieces[0][0].to(dtype)
    result = (torch.zeros if add else torch.empty)(shape, dtype=dtype, device=device)
    for tensor, offsets in pieces:
        part = _slice_of(result, offsets)
        if add:
            part.add_(tensor)
        else:
            part.copy_(tensor)
    return result


@dataclass(frozen=True, slots=True)
class EvaluationStep:
    """The batch of a validation that runs now."""

    reader: BatchReader
    """Reader of the validation data."""
    number: int
    """Index of the batch in the validation."""


class RankContext:
    """The part of a rank that its stages, reports and modes use: settings, connections, and the
    state of the current step.
    """

    reader: BatchReader
    """Reader of the run's samples."""
    reduction: GradientReduction
    loss_scaler: LossScaler | None = None
    """The loss scaler; None unless the program trains in fp16."""
    evaluated: EvaluationStep | None = None
    """The batch of a validation that runs now; None outside of a validation. In a validation,
    backward passes have no effect.
    """
    learning_rate: float | None = None
    """Learning rate of the last update, without the factors of parameter groups; None before the
    first update.
    """
    grad_norm: torch.Tensor | None = None
    """Norm of the step's gradients over all ranks before clipping, [] on the device; None if
    gradients are not clipped.
    """
    collect: Callable[[int, int, tuple[torch.Tensor, ...]], None]
    """In inference, function that stages call after each forward with (stage, micro-batch,
    results). Micro-batches are numbered over all steps.
    """

    def __init__(
        self,
        number: int,
        options: RankOptions,
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
        """Number of samples of the current step that come from the data. If it is less than
        `batch_size`, filler samples, which do not count, complete the batch.
        """
        self.batch = 0
        """Index of the current batch among the `gradient_accumulation_steps` batches of the
        step.
        """
        self.counted: torch.Tensor | None = None
        """Fraction of the step's labels that are not ignored, [] on the device; this rank's
        contribution to it until `ParameterUpdate` divides the gradients. None if the loss is not
        divided by the number of these labels.
        """
        self.stages: dict[int, Stage] = {}
        self.parameters: dict[int, torch.Tensor] = {}
        self.low_precision_copies = LowPrecisionCopies({}, manifest)

    @property
    def training(self) -> bool:
        """True if the current batch belongs to a training step; False in inference and in a
        validation.
        """
        return self.train and self.evaluated is None

    @property
    def samples_done(self) -> int:
        """Number of the first sample of step `steps_done`, the current or the next step. If this
        run resumes another run, samples are counted from the start of the first run, whose batch
        size may have been different.
        """
        return self.reader.source.first_sample(self.steps_done)

    def filler_factor(self, stage: int, micro_batch: int) -> float:
        """Return the factor by which the weight of a micro-batch's loss changes because the step
        contains filler samples. `micro_batch` is the number of the micro-batch in the step.

        Let the stage have n micro-batches in the step, and let the data have s samples for the
        step, r of them in this micro-batch. The factor is n r / s, which is 1 without filler
        samples. If the loss is divided by a number of labels, the factor is 1 for r > 0 and 0 for r
        = 0.
        """
        batch = self.manifest.batch_size
        # In a validation, `ValidationSource` weights the samples itself, so this factor is 1.
        if self.step_samples == batch or self.evaluated is not None:
            return 1.0
        size = self.manifest.micro_batch_size_at(stage)
        real = max(0, min(size, self.step_samples - micro_batch * size))
        if self.manifest.counts_labels:
            return float(real > 0)
        return real * (batch // size) / self.step_samples

    def read(self, stage: int, micro_batch: int, data: Data) -> torch.Tensor:
        """Return the slice of a graph input that a stage reads for one of its micro-batches, on the
        device. `micro_batch` is the number of the micro-batch in the step.
        """
        request = BlockRequest(stage, micro_batch, data.name, data.offsets)
        if self.evaluated is not None:
            return self.evaluated.reader.read(self.evaluated.number, request)
        tensor = self.reader.read(self.steps_done, request)
        for mode in self.modes:
            tensor = mode.on_input(self, request, tensor)
        return tensor

    def clear_step(self) -> None:
        """Discard the state of the current step: losses, tensors that were not delivered, and
        counts of moved bytes.
        """
        self.transport.traffic.clear()
        for stage in self.stages.values():
            stage.end_step()


class Mode:
    """Hooks of a rank's run. The hooks of this base class have no effect; subclasses override some
    of them. A rank has a tuple of modes and calls each hook on all of them in order.
    """

    probes = False
    """True if the run inspects a few steps instead of training. Such a run has no validation and
    does not read data ahead. It captures CUDA graphs only if `--cuda-graphs` is given.
    """
    exact_matmuls = False
    """True if matmuls of fp32 tensors must have IEEE precision, even if the plan says TF32."""

    def on_parameters(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Called once, with the rank's shards of parameters by parameter index. May change them in
        place.
        """

    def on_constants(self, constants: dict[str, torch.Tensor]) -> None:
        """Called once per program, with the constants of its stages by name. May replace
        entries.
        """

    def on_stages(self, rank: RankContext) -> None:
        """Called once, after the stages have got their parameters."""

    def on_input(
        self, rank: RankContext, request: BlockRequest, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Return the tensor that replaces `tensor`, a slice of a graph input that was read for
        `request`.
        """
        return tensor

    def computes_step(self, step: int) -> bool:
        """Return False to skip the forward and backward passes of the step with index `step`."""
        return True

    def on_gradients(self, rank: RankContext) -> None:
        """Called in each training step after the reduction of gradients, before the update."""

    def on_update(self, rank: RankContext) -> None:
        """Called in each training step after the update."""

    def repeats_step(self, rank: RankContext) -> bool:
        """Return True to run the step that has just ended once more with the same data. Called
        after each step.
        """
        return False

    def run(self, rank: RankContext, step: Callable[[], None]) -> bool:
        """Do the work of a mode that replaces steps on data, for example generation, and return
        True. The default returns False: the rank runs steps on data. `step` is the generated
        function.
        """
        return False


class Stage:
    """Runs the forward and backward passes of one stage, and its P2P communication, for one
    micro-batch per call.

    `recv` posts receives and `send` starts sends; both return at once. `forward` and `backward`
    wait for the tensors that they need.
    """

    def __init__(
        self, rank: RankContext, number: int, module: ModuleType, ports: tuple[Port, ...]
    ) -> None:
        """`module` is the generated module of the stage; `ports` are its arguments and results."""
        self._rank = rank
        self.number = number
        self._inputs: dict[str, TensorForm] = module.INPUTS
        self._outputs: tuple[TensorForm, ...] = tuple(module.OUTPUTS.values())
        self.p = Arguments(device=rank.device, training=True)
        """The first argument of the stage's forward, with its parameters, constants and process
        group.
        """
        self.module = module
        self.data = [port for port in ports if isinstance(port, Data)]
        self.receives = tuple(port for port in ports if isinstance(port, Recv))
        self.sends = tuple(port for port in ports if isinstance(port, Send))
        self._slices = {
            port.channel: MicroBatchSlice(*port.slice) for port in (*self.receives, *self.sends)
        }
        """For each channel, the micro-batches of this stage whose tensors use it."""
        self._loss = next((port for port in ports if isinstance(port, Loss)), None)
        self.loss_share = 0.0 if self._loss is None else self._loss.weight
        """Weight of one micro-batch's loss on this rank in the loss of its batch; 0 if the stage
        does not compute the loss.
        """
        self._labels = next((port for port in ports if isinstance(port, Labels)), None)
        self.function = module.forward
        self.compiled: str | None = None
        """Description of the parts that run eagerly although the stage was compiled, "" if there
        are none; None if the stage was not compiled.
        """
        self.graphs: StageGraphs | None = None
        """The CUDA graphs of the stage; None if the stage runs eagerly."""
        self._max_in_flight = 1
        """Maximum number of micro-batches, so far, whose forward has run and whose backward has not
        ended.
        """
        self.attributes = read_attributes(module)
        """The attributes of `p` that are parameters and constants."""
        self._recomputing_readers = Counter(
            int(name[1:]) for segment in self.attributes.segments for name in segment
        )
        """For each parameter index, the number of recomputed segments that read the parameter."""
        # Keys of `_arriving`, `_leaving` and `_local` are (micro-batch, is gradient); keys of their
        # inner maps are channel numbers.
        self._arriving = defaultdict[tuple[int, bool], dict[int, PendingRecv]](dict)
        """Receives from other ranks that have been posted."""
        self._leaving = defaultdict[tuple[int, bool], dict[int, torch.Tensor]](dict)
        """Computed tensors that have not been sent to other ranks."""
        self._local = defaultdict[tuple[int, bool], dict[int, torch.Tensor]](dict)
        """Tensors that stages on this rank have computed for this stage."""
        self._saved: dict[int, EagerPass | GraphSlot] = {}
        """For each micro-batch, what its forward has saved for its backward."""
        self._waiting: dict[int, EagerPass | GraphSlot] = {}
        """For each micro-batch, the state between the two halves of its split backward."""
        self._backwards = 0
        """Number of micro-batches of this step for which the computation of the gradients of
        parameters has begun.
        """
        self._unowned: list[torch.Tensor] | None = None
        """Parameters that have no gradient yet in this step. The tensor of their first gradient may
        also be in use elsewhere (see `_copy_shared_gradients`). None before the first backward of
        the step.
        """
        self.losses: dict[int, torch.Tensor] = {}
        """Loss of each micro-batch of the step, by its number in the step. Filler samples are
        accounted for (`RankContext.filler_factor`).
        """

    def _ports_due(
        self, ports: tuple[_RemotePort, ...], micro_batch: int, gradient: bool = False
    ) -> list[_RemotePort]:
        """Return the ports in `ports`, tensors that the stage receives or sends, that a micro-batch
        uses. With `gradient`, return only ports whose gradient is sent back.
        """
        return [
            port
            for port in ports
            if self._slices[port.channel].has(micro_batch) and (port.gradient or not gradient)
        ]

    def _ports_to_other_ranks(
        self,
        ports: tuple[_RemotePort, ...],
        micro_batch: int,
        gradient: bool = False,
        source: _SourceAndPart = (None, None),
    ) -> list[_RemotePort]:
        """Return the ports in `ports` through which a micro-batch exchanges tensors with other
        ranks; with `gradient`, gradients. `source` is (number of another stage, index of its
        `MicroBatchSlice`), to which the ports are restricted; None for no restriction.
        """
        (stage, part) = source
        due = self._ports_due(ports, micro_batch, gradient)
        found = (port for port in due if stage in (None, port.stage) and part in (None, port.part))
        return [port for port in found if port.rank != self._rank.number]

    def _exchange_through_ports(
        self,
        act: Callable[[_RemotePort, int], object],
        ports: list[_RemotePort],
        micro_batch: int,
    ) -> None:
        """Call `act(port, micro_batch)` for each port. The transfers with one rank, one of its
        stages, and one slice of that stage's micro-batches form one batch of P2P operations, as
        they do on the other rank.
        """
        batches = defaultdict[tuple[int, int, int], list[_RemotePort]](list)
        for port in ports:
            batches[port.rank, port.stage, port.part].append(port)
        for together in batches.values():
            with self._rank.transport.batch():
                for port in together:
                    act(port, micro_batch)

    def _form_of_port(self, port: Recv | Send) -> TensorForm:
        """Return the element type and shape of the tensor that a port transfers. The gradient has
        the same type and shape.
        """
        dtype, shape = (
            self._outputs[port.result] if isinstance(port, Send) else self._inputs[port.argument]
        )
        if port.dtype is not None:
            dtype = torch_dtype(DType(port.dtype))
        if port.offsets is None:
            return dtype, shape
        return dtype, tuple(stop - start for start, stop in port.offsets)

    def recv(self, micro_batch: int, source: int | None = None, part: int | None = None) -> None:
        """Post the receives for the arguments of a micro-batch that stages on other ranks compute.
        If `source` is given, post only receives from this stage; if `part` is given, only from the
        micro-batches of its `MicroBatchSlice` with this index.
        """
        self._exchange_through_ports(
            self.post_recv,
            self._ports_to_other_ranks(self.receives, micro_batch, False, (source, part)),
            micro_batch,
        )

    def recv_gradient(
        self, micro_batch: int, source: int | None = None, part: int | None = None
    ) -> None:
        """Post the receives for the gradients of a micro-batch's results from stages on other
        ranks. If `source` is given, post only receives from this stage; if `part` is given, only
        from the micro-batches of its `MicroBatchSlice` with this index. Does nothing in a
        validation.
        """
        if self._rank.training:
            self._exchange_through_ports(
                self.post_recv,
                self._ports_to_other_ranks(self.sends, micro_batch, True, (source, part)),
                micro_batch,
            )

    def send(self, micro_batch: int) -> None:
        """Start to send the results of a micro-batch that stages on other ranks read."""
        self._exchange_through_ports(
            self.start_send, self._ports_to_other_ranks(self.sends, micro_batch), micro_batch
        )

    def send_gradient(self, micro_batch: int) -> None:
        """Start to send the gradients of a micro-batch's arguments to the ranks that computed the
        arguments. Does nothing in a validation.
        """
        if self._rank.training:
            self._exchange_through_ports(
                self.start_send,
                self._ports_to_other_ranks(self.receives, micro_batch, gradient=True),
                micro_batch,
            )

    def post_recv(self, port: Recv | Send, micro_batch: int) -> PendingRecv:
        """Post the receive of one tensor: of an argument if `port` is a `Recv`, of the gradient of
        a result if it is a `Send`.
        """
        gradient = isinstance(port, Send)
        pending = self._rank.transport.recv(
            self._form_of_port(port), port.rank, port.channel, gradient
        )
        self._arriving[micro_batch, gradient][port.channel] = pending
        return pending

    def start_send(self, port: Recv | Send, micro_batch: int) -> PendingSend:
        """Start to send one tensor: a result if `port` is a `Send`, the gradient of an argument if
        it is a `Recv`.
        """
        gradient = isinstance(port, Recv)
        tensor = self._leaving[micro_batch, gradient].pop(port.channel)
        return self._rank.transport.send(tensor, port.rank, port.channel, gradient)

    def forward(self, micro_batch: int) -> None:
        """Wait for the arguments of a micro-batch, run its forward, and hand the results to stages
        on this rank or keep them for `send`.
        """
        rank = self._rank
        manifest = self._rank.manifest
        rank.heartbeat.task = task = f"{self.number}F{micro_batch}"
        arguments = self._collect_arguments(micro_batch)
        ratio = manifest.stages[self.number].micro_batch_ratio
        full_size = manifest.micro_batch_size
        number = self._number_in_step(micro_batch)
        step = rank.steps_done if rank.evaluated is None else rank.evaluated.number
        self.p.random.begin(
            rank.seed,
            step,
            number * manifest.micro_batch_size_at(self.number),
            number // ratio * full_size,
        )
        self.p.training = rank.evaluated is None
        self.p.running.begin(rank.evaluated is None)
        start = rank.clock.mark()
        slot = self.graphs.take() if self.graphs is not None and rank.evaluated is None else None
        results = (
            self._run_forward(arguments)
            if slot is None
            else slot.forward(arguments, self.p.random.state)
        )
        rank.clock.add(task, start)
        if rank.training:
            self.p.running.end(number)
            self._saved[micro_batch] = slot or self._eager_pass(arguments, results)
            self._max_in_flight = max(self._max_in_flight, len(self._saved) + len(self._waiting))
        elif slot is not None:
            slot.release()
        for port in self._ports_due(self.sends, micro_batch):
            self._send_or_deliver(port, micro_batch, results[port.result].detach())
        if self._loss is not None:
            loss = results[self._loss.result].detach()
            weight = rank.filler_factor(self.number, number)
            self.losses[number] = loss if weight == 1 else loss * weight
        if self._labels is not None and rank.counted is not None:
            labels = results[self._labels.result].detach().double() * self._labels.weight
            rank.counted += labels * rank.filler_factor(self.number, number)
        if not rank.train:
            number_in_run = rank.steps_done * manifest.micro_batch_count(self.number) + micro_batch
            rank.collect(self.number, number_in_run, results)

    def _number_in_step(self, micro_batch: int) -> int:
        """Return the number of a micro-batch in the step. `micro_batch` is its number in the
        current batch, one of those that the step accumulates.
        """
        return self._rank.batch * self._rank.manifest.micro_batch_count(self.number) + micro_batch

    def _run_forward(self, arguments: Tensors) -> tuple[torch.Tensor, ...]:
        """Run the forward and return its results in the element types that their receivers expect.
        Under autocast, the forward may compute narrower types.
        """
        rank = self._rank
        with torch.set_grad_enabled(rank.training), autocast(rank.manifest.precision, rank.device):
            results = self.function(self.p, *arguments.values())
            return tuple(
                result.to(dtype) for result, (dtype, _) in zip(results, self._outputs, strict=True)
            )

    def _collect_arguments(self, micro_batch: int) -> Tensors:
        """Return the arguments of a micro-batch by name, in the order of the forward's parameters.
        Reads data, and waits for tensors of other stages.
        """
        number = self._number_in_step(micro_batch)
        found = {data.argument: self._rank.read(self.number, number, data) for data in self.data}
        received = defaultdict[str, list[_TensorPiece]](list)
        for port, tensor in self._wait_for_tensors(self.receives, micro_batch):
            received[port.argument].append((tensor, port.offsets))
        with_gradients = self._arguments_with_gradients()
        for name, pieces in received.items():
            tensor = _assemble_pieces(pieces, self._inputs[name], pieces[0][0].device)
            found[name] = tensor.requires_grad_(True) if name in with_gradients else tensor
        return {name: found[name] for name in self._inputs}

    def _arguments_with_gradients(self) -> set[str]:
        """Return the names of the arguments whose gradients the stage computes in the current
        batch.
        """
        return {port.argument for port in self.receives if port.gradient and self._rank.training}

    def _zero_arguments(self) -> Tensors:
        """Return arguments by name, with the types and shapes of a micro-batch, filled with
        zeros.
        """
        with_gradients = self._arguments_with_gradients()
        return {
            name: torch.zeros(
                shape, dtype=dtype, device=self._rank.device, requires_grad=name in with_gradients
            )
            for name, (dtype, shape) in self._inputs.items()
        }

    def capture(self, resources: CaptureResources) -> str:
        """Capture the stage as CUDA graphs, which later steps replay. Called between steps. Return
        the reason why the stage stays eager, "" if it is captured.

        There is a slot for each micro-batch that may be in flight (its forward has run, its
        backward has not): as many as were in flight at one time in earlier steps.
        """
        rank = self._rank
        if reason := reason_not_captured(names_in_source(inspect.getsource(self.module))):
            return reason
        seeded = {port.result for port in self.sends if port.gradient} if rank.training else set()
        if rank.training and self._loss is not None:
            seeded.add(self._loss.result)
        paths: dict[int, list[str]] = defaultdict(list)
        for path, content in self.attributes.attributes:
            if (index := parameter_index(content)) is not None:
                paths[index].append(path)
        stage = CapturedStage(
            self.p,
            self._run_forward,
            self._zero_arguments,
            {index: rank.parameters[index] for index in paths},
            paths,
            frozenset(seeded),
        )
        try:
            self.graphs = StageGraphs(stage, resources, self._max_in_flight)
        except NotCapturedError as error:
            return str(error)
        return ""

    def run_on_zeros(self) -> None:
        """Run the forward and, in training, the backward of a micro-batch of zeros, so that
        torch.compile compiles them. The gradients are discarded.
        """
        results = self._run_forward(self._zero_arguments())
        waiting = self.p.weight_grads.take()
        if roots := [result for result in results if result.requires_grad]:
            accumulate_gradients(roots, [torch.zeros_like(root) for root in roots])
            compute_weight_gradients(waiting + self.p.weight_grads.take())
        for tensor in self._rank.parameters.values():
            tensor.grad = None

    def _wait_for_tensors(
        self, ports: tuple[_RemotePort, ...], micro_batch: int, gradient: bool = False
    ) -> Iterator[tuple[_RemotePort, torch.Tensor]]:
        """Yield (port, tensor) for each port in `ports` that a micro-batch uses; with `gradient`,
        the gradients. Tensors of stages on this rank come first, in the order in which these stages
        ran; then tensors from other ranks, each after a wait.
        """
        local = self._local.pop((micro_batch, gradient), {})
        pending = self._arriving.pop((micro_batch, gradient), {})
        due = {port.channel: port for port in self._ports_due(ports, micro_batch, gradient)}
        yield from ((due.pop(channel), tensor) for channel, tensor in local.items())
        for channel, port in due.items():
            heartbeat = self._rank.heartbeat
            clock = self._rank.clock
            with (
                heartbeat.record_wait(port.rank, channel),
                clock.record_wait(heartbeat.task, port.rank, channel),
            ):
                tensor = pending[channel].wait()
            yield port, tensor

    def _send_or_deliver(self, port: Recv | Send, micro_batch: int, tensor: torch.Tensor) -> None:
        """Hand over a result, or the gradient of an argument: to the other stage if it is on this
        rank; otherwise keep the tensor until it is sent.
        """
        gradient = isinstance(port, Recv)
        dtype = self._form_of_port(port)[0]
        piece = _slice_of(tensor, port.offsets).to(dtype)
        if port.rank != self._rank.number:
            self._leaving[micro_batch, gradient][port.channel] = piece
            return
        target = self._rank.stages[port.stage]
        message = self._slices[port.channel].message(micro_batch)
        arrives = target._local[target._slices[port.channel].micro_batch(message), gradient]
        # An activation is copied, because the target stage sets `requires_grad` on it and because
        # two stages may read the tensor. The copy is contiguous like a received tensor, because a
        # compiled stage accepts one memory layout only.
        arrives[port.channel] = (
            piece if gradient else piece.clone(memory_format=torch.contiguous_format)
        )

    def backward(self, micro_batch: int) -> None:
        """Wait for the gradients of a micro-batch's results, and compute the gradients of
        parameters and arguments. Does nothing in a validation.
        """
        if not self._rank.training:
            return
        last = self._begins_last_micro_batch()
        # Autograd's hooks can start the reduction only if they run when gradients are complete. The
        # replay of a CUDA graph runs no hooks, and deferred gradients are computed after the hooks.
        if (
            last
            and not self.p.weight_grads.used
            and not isinstance(self._saved[micro_batch], GraphSlot)
        ):
            # Hooks start the reduction of each bucket, the parameters that one collective reduces,
            # during this backward: as soon as the gradients of the bucket are complete.
            self._rank.reduction.start_during_backward(self.number, self._recomputing_readers)
        self._compute_gradients(micro_batch, "B")
        if last:
            self._rank.reduction.start(self.number)

    def backward_input(self, micro_batch: int) -> None:
        """Run the first half of a split backward: wait for the gradients of a micro-batch's
        results, and compute the gradients of its arguments. Does nothing in a validation.
        """
        if self._rank.training:
            self._compute_gradients(micro_batch, "I")

    def backward_weight(self, micro_batch: int) -> None:
        """Run the second half of a split backward: compute the gradients of parameters that the
        first half deferred. Does nothing in a validation.
        """
        if not self._rank.training:
            return
        last = self._begins_last_micro_batch()
        self._rank.heartbeat.task = task = f"{self.number}W{micro_batch}"
        start = self._rank.clock.mark()
        self._waiting.pop(micro_batch).run_weight_gradients()
        self._rank.clock.add(task, start)
        if last:
            self._rank.reduction.start(self.number)

    def _begins_last_micro_batch(self) -> bool:
        """Count a micro-batch for which the computation of the gradients of parameters begins now.
        Return True if it is the last one of the step.
        """
        self._backwards += 1
        manifest = self._rank.manifest
        batches = manifest.training.gradient_accumulation_steps
        return self._backwards == batches * len(manifest.micro_batches_of(self.number))

    def _compute_gradients(self, micro_batch: int, phase: str) -> None:
        """Compute the gradients of a micro-batch's arguments. In phase `B`, an unsplit backward,
        also compute all gradients of parameters. In phase `I`, leave the gradients that can be
        deferred to `backward_weight`.
        """
        self._rank.heartbeat.task = task = f"{self.number}{phase}{micro_batch}"
        saved = self._saved.pop(micro_batch)
        incoming = defaultdict[int, list[_TensorPiece]](list)
        for port, tensor in self._wait_for_tensors(self.sends, micro_batch, gradient=True):
            incoming[port.result].append((tensor, port.offsets))
        start = self._rank.clock.mark()
        seeds = self._backward_seeds(micro_batch, saved.edges, incoming)
        gradients = (
            saved.backward(seeds)
            if isinstance(saved, GraphSlot)
            else self._run_backward(saved, seeds)
        )
        if phase == "I":
            self._waiting[micro_batch] = saved
        else:
            saved.run_weight_gradients()
        self._rank.clock.add(task, start)
        for source in self._ports_due(self.receives, micro_batch, gradient=True):
            self._send_or_deliver(source, micro_batch, gradients[source.argument])

    def _eager_pass(self, arguments: Tensors, results: tuple[torch.Tensor, ...]) -> EagerPass:
        """Return what the forward that has just run saves for its backward."""
        inputs = {name: tensor for name, tensor in arguments.items() if tensor.requires_grad}
        return EagerPass(
            inputs, tuple(map(OutputEdge.from_result, results)), self.p.weight_grads.take()
        )

    def _run_backward(self, saved: EagerPass, seeds: dict[int, torch.Tensor]) -> Tensors:
        """Run autograd's backward from `seeds`, the gradients of results by index. Return the
        gradients of the arguments by name.
        """
        if seeds:
            run_backward(saved.edges, seeds)
            self._copy_shared_gradients(seeds.values(), saved.inputs)
        # The backward of recomputed segments adds deferred gradients to the queue `weight_grads`.
        # They are collected here and computed with the other deferred gradients of this
        # micro-batch.
        saved.waiting += self.p.weight_grads.take()
        return {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in saved.inputs.items()
        }

    def _copy_shared_gradients(self, seeds: Iterable[torch.Tensor], arguments: Tensors) -> None:
        """Copy the first gradient of a parameter in the step if its memory is also the gradient of
        another parameter, of an argument or of a result. Autograd may store a tensor that it was
        given as `grad`, and adds the gradients of later micro-batches to it in place.
        """
        if self._unowned is None:
            self._unowned = [each for each in self._rank.parameters.values() if each.requires_grad]
        if not self._unowned:
            return
        taken = [*seeds, *(each.grad for each in arguments.values() if each.grad is not None)]
        storages = {each.untyped_storage()._cdata for each in taken}
        with_gradient = [each for each in self._unowned if each.grad is not None]
        for parameter in with_gradient:
            assert parameter.grad is not None
            storage = parameter.grad.untyped_storage()._cdata
            if storage in storages:
                parameter.grad = parameter.grad.clone()
            storages.add(storage)
        if with_gradient:
            self._unowned = [each for each in self._unowned if each.grad is None]

    def _backward_seeds(
        self,
        micro_batch: int,
        results: tuple[OutputEdge, ...],
        incoming: defaultdict[int, list[_TensorPiece]],
    ) -> dict[int, torch.Tensor]:
        """Return the gradients of results from which the backward starts, by index of the result:
        the weight of the loss, and the sums of the gradients `incoming` from other stages.
        """
        if self._loss is not None:
            loss = results[self._loss.result]
            batches = self._rank.manifest.training.gradient_accumulation_steps
            weight = self._rank.filler_factor(self.number, self._number_in_step(micro_batch))
            weight = self.loss_share * weight / batches
            seed = torch.full(loss.form[1], weight, dtype=loss.form[0], device=loss.device)
            if self._rank.loss_scaler is not None:
                seed.mul_(self._rank.loss_scaler.scale)
            incoming[self._loss.result].append((seed, None))
        # If the stage has several ranks, all of them must run the collectives of the backward. So a
        # rank that receives no gradient of a result uses zeros instead.
        wanted = range(len(results)) if self.p.group.size > 1 else sorted(incoming)
        return {
            index: _assemble_pieces(
                incoming.get(index, []), results[index].form, results[index].device, add=True
            )
            for index in wanted
            if results[index].edge is not None
        }

    def end_step(self) -> None:
        """Discard the state of the step that has ended."""
        self._saved.clear()
        self._leaving.clear()
        self.losses.clear()
        self._backwards = 0
        self._unowned = None
        if self.graphs is not None:
            self.graphs.end_step()

    # These are method names of the previous release. Programs that it generated call them.

    def receive(self, micro_batch: int, source: int | None = None, part: int | None = None) -> None:
        """Old name of `recv`."""
        warn_of_old_name("receive", "recv")
        self.recv(micro_batch, source, part)

    def receive_gradient(
        self, micro_batch: int, source: int | None = None, part: int | None = None
    ) -> None:
        """Old name of `recv_gradient`."""
        warn_of_old_name("receive_gradient", "recv_gradient")
        self.recv_gradient(micro_batch, source, part)

    def input_gradient(self, micro_batch: int) -> None:
        """Old name of `backward_input`."""
        warn_of_old_name("input_gradient", "backward_input")
        self.backward_input(micro_batch)

    def weight_gradient(self, micro_batch: int) -> None:
        """Old name of `backward_weight`."""
        warn_of_old_name("weight_gradient", "backward_weight")
        self.backward_weight(micro_batch)
