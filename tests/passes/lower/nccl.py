"""A program's ranks on GPUs, without numbers: kernels in order on streams, streams in order on
hardware queues.

The rules of NCCL and CUDA that it follows: communicators are there before the first step; a kernel
starts when the one before it on its stream is done, the events that it waits for have happened and,
where several streams share a hardware queue, what was launched before it into that queue has
started; a send ends with the receive at the same place of the other end's communicator; a
collective ends when all members have started theirs. Hosts wait for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

from autopipe.ir.layout import group_members
from autopipe.ir.program import MessageSlice, Opcode, Program, RankCode, StageOnRank
from tests.passes.lower.machine import BACKWARDS, Machine, unrolled

Message = tuple[int, bool, int]
"""Channel, if it is a gradient, and number."""
Stream = Hashable

COMPUTE = "compute"


@dataclass(eq=False, slots=True)
class Kernel:
    """One kernel, or one wait for an event, of a rank."""

    rank: int
    stream: Stream
    title: str
    before: list[Kernel] = field(default_factory=list)
    """Kernels of the same rank that must have ended before it starts."""
    members: tuple[int, ...] = ()
    """Of a collective, or of a message: sender, receiver."""
    carries: Hashable = None
    """What all members must mean at the same place of the communicator."""
    started: bool = False
    ended: bool = False


class Device:
    """The kernels of a rank in the order in which its host launches them."""

    def __init__(self, program: Program, rank: RankCode) -> None:
        self.rank = rank.rank
        self.kernels: list[Kernel] = []
        self._wired = {each.stage: each for each in rank.stages}
        self._program = program
        self._receives: dict[Message, Kernel] = {}
        self._last: Kernel | None = None
        """The youngest kernel on the compute stream."""
        instructions = unrolled(rank)
        last_of = {
            each.stage: place
            for place, each in enumerate(instructions)
            if each.opcode in _GIVE_WEIGHTS
        }
        for place, each in enumerate(instructions):
            wired = self._wired[each.stage]
            backward = each.opcode in (Opcode.RECV_GRADIENT, Opcode.SEND_GRADIENT)
            if each.opcode in (Opcode.RECV, Opcode.RECV_GRADIENT):
                for piece in Machine.incoming(wired, backward):
                    if Machine.takes(each, piece, backward):
                        self._message(piece, backward, each.micro_batch, receives=True)
            elif each.opcode in (Opcode.SEND, Opcode.SEND_GRADIENT):
                for piece in Machine.outgoing(wired, backward):
                    self._message(piece, backward, each.micro_batch, receives=False)
            else:
                self._task(wired, each.opcode, each.micro_batch)
                if program.train and last_of.get(each.stage) == place:
                    self._sums(rank, each.stage)
        if program.train:
            self._sums(rank, None)
            every = tuple(range(program.world_size))
            if len(every) > 1:  # A norm, or if fp16 overflowed.
                self._launch(
                    ("group", *every),
                    "agree",
                    *self._after_compute(),
                    members=every,
                    carries="agree",
                )

    def _launch(self, stream: Stream, title: str, *before: Kernel, **what: object) -> Kernel:
        kernel = Kernel(self.rank, stream, title, list(before), **what)  # type: ignore[arg-type]
        self.kernels.append(kernel)
        if stream == COMPUTE:
            self._last = kernel
        return kernel

    def _after_compute(self) -> list[Kernel]:
        return [] if self._last is None else [self._last]

    def _message(
        self, piece: MessageSlice, backward: bool, micro_batch: int, receives: bool
    ) -> None:
        number = Machine.message(piece, receives != backward, micro_batch)
        if piece.source_rank == piece.target_rank or number is None:
            return
        ends = piece.source_rank, piece.target_rank
        source, target = ends[::-1] if backward else ends
        message = piece.channel, backward, number
        kernel = self._launch(
            ("pair", source, target),
            f"{'receive' if receives else 'send'} {message}",
            *self._after_compute(),
            members=(source, target),
            carries=message,
        )
        if receives:
            self._receives[message] = kernel

    def _task(self, wired: StageOnRank, opcode: Opcode, micro_batch: int) -> None:
        title = f"{wired.stage} {opcode.value} {micro_batch}"
        arrives = []
        if opcode is not Opcode.BACKWARD_WEIGHT:
            backward = opcode in BACKWARDS
            for piece in Machine.incoming(wired, backward):
                number = Machine.message(piece, not backward, micro_batch)
                if piece.source_rank != piece.target_rank and number is not None:
                    arrives.append(self._receives[piece.channel, backward, number])
        self._launch(COMPUTE, title, *arrives)
        code = self._program.stages[wired.stage]
        for axes in code.meshes() if opcode is not Opcode.BACKWARD_WEIGHT else ():
            # Ranks along these axes exchange parts of tensors while the task runs.
            places = group_members(axes, code.devices.index(self.rank))
            group = tuple(sorted(code.devices[place] for place in places))
            middle = self._launch(
                ("group", *group), title, *self._after_compute(), members=group, carries=title
            )
            self._launch(COMPUTE, title, middle)

    def _sums(self, rank: RankCode, home: int | None) -> None:
        """Gradients are added up once the last backward of the stage that is their home has given
        them.
        """
        groups = {shard.gradient_ranks for shard in rank.shards if shard.home == home}
        for group in sorted(each for each in groups if len(each) > 1):
            self._launch(
                ("group", *sorted(group)),
                f"sums {home}",
                *self._after_compute(),
                members=group,
                carries=("sums", home),
            )

    @property
    def streams(self) -> set[Stream]:
        return {kernel.stream for kernel in self.kernels}


_GIVE_WEIGHTS = (Opcode.BACKWARD, Opcode.BACKWARD_WEIGHT)


def stopped(program: Program, queues: int = 10**6) -> list[str]:
    """What never ends, with `queues` hardware queues (CUDA_DEVICE_MAX_CONNECTIONS) on each GPU;
    nothing if all ends.
    """
    devices = [Device(program, rank) for rank in program.ranks]
    before_in_stream: dict[Kernel, Kernel] = {}
    queue_of: list[dict[int, list[Kernel]]] = []
    at: dict[tuple[Stream, int], list[Kernel]] = defaultdict(list)
    place: dict[Kernel, int] = {}
    for device in devices:
        numbers: dict[Stream, int] = {}
        own: dict[int, list[Kernel]] = defaultdict(list)
        newest: dict[Stream, Kernel] = {}
        for kernel in device.kernels:
            # Streams take hardware queues in turn, as they come into use.
            own[numbers.setdefault(kernel.stream, len(numbers)) % queues].append(kernel)
            if kernel.stream in newest:
                before_in_stream[kernel] = newest[kernel.stream]
            newest[kernel.stream] = kernel
            if kernel.members:
                line = at[kernel.stream, device.rank]
                place[kernel] = len(line)
                line.append(kernel)
        queue_of.append({number: kernels[::-1] for number, kernels in own.items()})

    def others(kernel: Kernel) -> list[Kernel] | None:
        """The kernels at the same place of the same communicator, of all members that have one."""
        lines = [at[kernel.stream, member] for member in kernel.members]
        if any(len(line) <= place[kernel] for line in lines):
            return None
        found = [line[place[kernel]] for line in lines]
        assert {each.carries for each in found} == {kernel.carries}, f"{kernel.title} meets {found}"
        return found

    moved = True
    while moved:
        moved = False
        for queued in queue_of:
            for waiting in queued.values():
                while waiting:
                    kernel = waiting[-1]
                    previous = before_in_stream.get(kernel)
                    if (previous is not None and not previous.ended) or not all(
                        each.ended for each in kernel.before
                    ):
                        break
                    waiting.pop()
                    kernel.started = moved = True
                    if not kernel.members:
                        kernel.ended = True
                    elif (together := others(kernel)) is not None and all(
                        each.started for each in together
                    ):
                        for each in together:
                            each.ended = True
    return [
        f"rank {each.rank}: {each.title}"
        for device in devices
        for each in device.kernels
        if not each.ended
    ]


def communicators(program: Program) -> set[Stream]:
    """Those that messages go over, groups left out."""
    streams = {stream for rank in program.ranks for stream in Device(program, rank).streams}
    return {stream for stream in streams if isinstance(stream, tuple) and stream[0] != "group"}
