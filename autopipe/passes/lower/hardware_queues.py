"""A program's kernels on GPUs whose streams share hardware queues: none may wait behind one that
waits for it.

CUDA puts a device's streams on CUDA_DEVICE_MAX_CONNECTIONS hardware queues, in turn, and starts
what one queue holds in the order in which the host launched it. A kernel also waits for the one
before it on its own stream, and for events of others. So a receive that waits for an earlier
message of its communicator can hold up a collective that another rank needs to send that message.
Where each stream has a queue of its own, nothing is held up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopipe.ir.errors import CodegenError
from autopipe.ir.layout import MeshAxes, group_members
from autopipe.ir.program import HARDWARE_QUEUES, Program, RankCode
from autopipe.ir.words import plural
from autopipe.passes.lower.deadlock_check import ProofChannel, RankTrace

_MOST_RECEIVING = 64
"""Communicators that one rank receives over. A posted receive is a kernel of one block of threads
at least, which waits on a multiprocessor, of which large GPUs have about a hundred.
"""


@dataclass(slots=True, eq=False)
class _Kernel:
    """A kernel on a stream of a rank, or the wait of one stream for others."""

    rank: int
    title: str
    stream: Hashable
    after: tuple[_Kernel, ...]
    """Kernels that must have ended before it starts: the one before it on its stream, and events it
    waits for.
    """
    members: tuple[int, ...] = ()
    """Ranks that must have started theirs for it to end."""
    started: bool = False
    ended: bool = False
    meets: list[_Kernel] = field(default_factory=list)


def check_hardware_queues(
    program: Program, traces: Sequence[RankTrace], queues: int = HARDWARE_QUEUES
) -> None:
    """Raise CodegenError, naming a task, unless all kernels end on GPUs with `queues` hardware
    queues each.
    """
    for trace, code in zip(traces, program.ranks, strict=True):
        incoming = {
            id(channel.communicator)
            for action, _ in trace.steps
            for turn in action.posts
            for channel in turn
        }
        if len(incoming) > _MOST_RECEIVING:
            raise CodegenError(
                f"{len(incoming)} {plural(len(incoming), 'rank sends', 'ranks send')} to "
                "it: kernels that wait for their messages would fill a GPU",
                where=f"rank {code.rank}",
                hint="place what it reads on fewer ranks",
            )
    meshes = tuple(stage.meshes() for stage in program.stages)
    ranks = [
        (trace, code, _groups(program, meshes, code))
        for trace, code in zip(traces, program.ranks, strict=True)
    ]
    if all(_stream_count(trace, code, program, groups) <= queues for trace, code, groups in ranks):
        return
    launched = [list(_kernels(trace, code, program, groups)) for trace, code, groups in ranks]
    _join(launched)
    _run([_queued(kernels, queues) for kernels in launched])
    for kernels in launched:
        for kernel in kernels:
            if not kernel.ended:
                raise CodegenError(
                    f"{kernel.title} would wait for ever, with {queues} hardware queues",
                    where=f"rank {kernel.rank}",
                    hint="use fewer stages or fewer different groups of ranks on a device",
                )


_Groups = Mapping[int, tuple[tuple[int, ...], ...]]
"""By stage the groups, as ascending ranks, in which a rank exchanges parts of tensors while the
stage's tasks run.
"""


def _groups(program: Program, meshes: Sequence[tuple[MeshAxes, ...]], code: RankCode) -> _Groups:
    found = {}
    for wired in code.stages:
        devices = program.stages[wired.stage].devices
        own = (group_members(axes, devices.index(code.rank)) for axes in meshes[wired.stage])
        # In the order of their axes, which is one for all ranks.
        found[wired.stage] = tuple(
            dict.fromkeys(tuple(sorted(devices[each] for each in places)) for places in own)
        )
    return found


def _stream_count(trace: RankTrace, code: RankCode, program: Program, groups: _Groups) -> int:
    found = {shard.gradient_ranks for shard in code.shards}
    found |= {tuple(range(program.world_size))} if program.train else set()
    every = {tuple(sorted(each)) for each in found if len(each) > 1}.union(*groups.values())
    communicators = set[int]()
    for action, _ in trace.steps:
        communicators.update(
            id(each.communicator)
            for turn in (*action.posts, *(action.sends or ()))
            for each in turn
        )
    return 1 + len(communicators) + len(every)


def _kernels(
    trace: RankTrace, code: RankCode, program: Program, groups: _Groups
) -> Iterator[_Kernel]:
    """Yield the kernels that a rank's host launches, in order; no launch waits."""
    newest: dict[Hashable, _Kernel] = {}
    received: dict[tuple[ProofChannel, int], _Kernel] = {}
    every = tuple(range(program.world_size))

    def launch(
        title: str, stream: Hashable, members: tuple[int, ...] = (), *after: _Kernel
    ) -> _Kernel:
        before = (newest[key] for key in {stream, _COMPUTE} if key in newest)
        newest[stream] = kernel = _Kernel(code.rank, title, stream, (*before, *after), members)
        return kernel

    def sums(home: int | None) -> Iterator[_Kernel]:
        summing = {shard.gradient_ranks for shard in code.shards if shard.home == home}
        for ranks in sorted(each for each in summing if len(each) > 1):
            yield launch("the sum of gradients", ("group", *sorted(ranks)), ranks)

    left = Counter(part for action, _ in trace.steps for part in action.completes)
    for action, micro_batch in trace.steps:
        title = f"{action.name}{micro_batch}"
        for channel in action.posts[micro_batch % len(action.posts)]:
            message = channel.uses.message(micro_batch)
            received[channel, message] = launch(
                f"the receive of {channel.task(message)}",
                channel.communicator,
                (channel.source, channel.target),
            )
            yield received[channel, message]
        if action.completes:
            uses = action.uses[micro_batch % len(action.uses)]
            yield launch(
                title,
                _COMPUTE,
                (),
                *(received[each, each.uses.message(micro_batch)] for each in uses),
            )
            # Ranks exchange parts of tensors while the task runs, but for what computes gradients
            # of weights alone.
            for ranks in groups[int(action.name[:-1])] if action.barrier is not None else ():
                yield (middle := launch(title, ("group", *ranks), ranks))
                yield launch(title, _COMPUTE, (), middle)
            for part in action.completes:
                left[part] -= 1
                if part.endswith("W") and not left[part] and program.train:
                    yield from sums(int(part[:-1]))
        for channel in (action.sends or ((),))[micro_batch % len(action.sends or ((),))]:
            sent = channel.task(channel.sends.message(micro_batch))
            yield launch(
                f"the sending of {sent}", channel.communicator, (channel.source, channel.target)
            )
    if program.train:
        yield from sums(None)
        if (
            program.world_size > 1
        ):  # They may exchange a number before the update: a norm, or if fp16 overflowed.
            yield launch("what all ranks agree on", ("group", *every), every)


_COMPUTE = "compute"


def _join(launched: Sequence[Sequence[_Kernel]]) -> None:
    """Tell each kernel of a communicator those of its other members: the ones at the same place."""
    lines: dict[tuple[Hashable, int], list[_Kernel]] = defaultdict(list)
    for kernel in (kernel for kernels in launched for kernel in kernels if kernel.members):
        lines[kernel.stream, kernel.rank].append(kernel)
    for (stream, _), line in lines.items():
        for place, kernel in enumerate(line):
            others = (lines[stream, rank] for rank in kernel.members)
            kernel.meets = [other[place] for other in others if place < len(other)]


def _queued(kernels: Sequence[_Kernel], queues: int) -> list[list[_Kernel]]:
    """A device's kernels by hardware queue, the first last."""
    numbers: dict[Hashable, int] = {}
    found: list[list[_Kernel]] = [[] for _ in range(queues)]
    for kernel in kernels:
        found[numbers.setdefault(kernel.stream, len(numbers)) % queues].append(kernel)
    return [kernels[::-1] for kernels in found if kernels]


def _run(devices: Sequence[list[list[_Kernel]]]) -> None:
    """Start and end all that can."""
    moved = True
    while moved:
        moved = False
        for waiting in (waiting for device in devices for waiting in device):
            while waiting and all(each.ended for each in waiting[-1].after):
                kernel = waiting.pop()
                kernel.started = moved = True
                if len(kernel.meets) == len(kernel.members) and all(
                    each.started for each in kernel.meets
                ):
                    for each in kernel.meets or (kernel,):
                        each.ended = True
