"""Check that the kernels of a program cannot deadlock on the hardware queues of a GPU.

CUDA distributes the streams of a device round-robin over CUDA_DEVICE_MAX_CONNECTIONS hardware
queues. A queue starts its kernels in the order in which the host launched them. A kernel also waits
for the kernel before it on its stream, and for events of other streams. A kernel that waits can
therefore block kernels of other streams in its queue. Example: a receive waits for an earlier
message of its communicator and blocks a collective behind it; another rank needs this collective
before it can send the message.

Objective: show that all kernels of all ranks end with a given number of queues per device. The
check executes the kernels on a model of the queues:

- The first kernel of a queue starts as soon as all kernels that it waits for have ended.
- A kernel of a communicator ends as soon as the kernels at the same position of the communicator
  have started on all member ranks. Each other kernel ends as soon as it starts.

A kernel that can start stays able to start, so the order of execution does not matter: if one
execution starts all kernels, each execution does. If each stream has its own queue, no queue blocks
and the check is skipped; `deadlock_check` has then shown that the ranks end.
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

_MAX_RECEIVING_COMMUNICATORS = 64
"""Maximum number of communicators on which one rank receives. A posted receive is a kernel with at
least one block of threads, which occupies a multiprocessor while it waits. A large GPU has about
100 multiprocessors.
"""


@dataclass(slots=True, eq=False)
class _Kernel:
    """A kernel on a stream of a rank, or a wait of one stream for other streams."""

    rank: int
    title: str
    stream: Hashable
    after: tuple[_Kernel, ...]
    """Kernels that must end before this kernel starts: the previous kernel of the stream, the
    previous computation, and the kernels whose events this kernel waits for.
    """
    members: tuple[int, ...] = ()
    """Ranks of the communicator to which the kernel belongs; () for a kernel that waits for no
    other rank.
    """
    started: bool = False
    ended: bool = False
    counterparts: list[_Kernel] = field(default_factory=list)
    """The kernels of the member ranks, including this kernel, that take part in the same operation.
    """


def check_hardware_queues(
    program: Program, traces: Sequence[RankTrace], queues: int = HARDWARE_QUEUES
) -> None:
    """Raise CodegenError if a kernel would wait forever on GPUs with `queues` hardware queues. The
    error names the kernel.

    `traces` is the result of `deadlock_check.prove_no_deadlock`. Also raises CodegenError if a rank
    receives on more than `_MAX_RECEIVING_COMMUNICATORS` communicators.
    """
    for trace, code in zip(traces, program.ranks, strict=True):
        incoming = {
            id(channel.communicator)
            for action, _ in trace.steps
            for turn in action.posts
            for channel in turn
        }
        if len(incoming) > _MAX_RECEIVING_COMMUNICATORS:
            raise CodegenError(
                f"{len(incoming)} {plural(len(incoming), 'rank sends', 'ranks send')} to the rank, "
                f"expected at most {_MAX_RECEIVING_COMMUNICATORS}, because the "
                "kernels that wait for messages occupy the GPU",
                where=f"rank {code.rank}",
                hint="place the stages that send to the rank on fewer ranks",
            )
    meshes = tuple(stage.meshes() for stage in program.stages)
    ranks = [
        (trace, code, _collective_groups(program, meshes, code))
        for trace, code in zip(traces, program.ranks, strict=True)
    ]
    if all(_stream_count(trace, code, program, groups) <= queues for trace, code, groups in ranks):
        return
    launched = [
        list(_launched_kernels(trace, code, program, groups)) for trace, code, groups in ranks
    ]
    _connect_counterparts(launched)
    _run_queues([_kernels_by_queue(kernels, queues) for kernels in launched])
    for kernels in launched:
        for kernel in kernels:
            if not kernel.ended:
                raise CodegenError(
                    f"{kernel.title} would never start: {queues} hardware queues are too few",
                    where=f"rank {kernel.rank}",
                    hint="use fewer stages or fewer different groups of ranks on a device",
                )


_Groups = Mapping[int, tuple[tuple[int, ...], ...]]
"""For each stage of a rank, the process groups whose collectives run inside the stage's tasks. A
group is a tuple of ranks in ascending order.
"""


def _collective_groups(
    program: Program, meshes: Sequence[tuple[MeshAxes, ...]], code: RankCode
) -> _Groups:
    """Return, for each stage of a rank, the process groups of its collectives. `meshes` contains
    the mesh axes that each stage communicates over.
    """
    found = {}
    for wired in code.stages:
        devices = program.stages[wired.stage].devices
        own = (group_members(axes, devices.index(code.rank)) for axes in meshes[wired.stage])
        # The order of the groups is that of the mesh axes, which is equal on all ranks.
        found[wired.stage] = tuple(
            dict.fromkeys(tuple(sorted(devices[each] for each in places)) for places in own)
        )
    return found


def _stream_count(trace: RankTrace, code: RankCode, program: Program, groups: _Groups) -> int:
    """Return the number of streams of a rank: one for computation, one per communicator and one per
    process group.
    """
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


def _launched_kernels(
    trace: RankTrace, code: RankCode, program: Program, groups: _Groups
) -> Iterator[_Kernel]:
    """Yield the kernels of a rank in the order in which its host launches them."""
    newest: dict[Hashable, _Kernel] = {}
    received: dict[tuple[ProofChannel, int], _Kernel] = {}
    every = tuple(range(program.world_size))

    def launch(
        title: str, stream: Hashable, members: tuple[int, ...] = (), *after: _Kernel
    ) -> _Kernel:
        """Return a new kernel on the stream `stream`, which waits for the newest kernel of its
        stream, the newest computation, and the kernels `after`. `members` are the ranks of its
        communicator, () if it waits for no other rank.
        """
        before = (newest[key] for key in {stream, _COMPUTE} if key in newest)
        newest[stream] = kernel = _Kernel(code.rank, title, stream, (*before, *after), members)
        return kernel

    def gradient_reductions(home: int | None) -> Iterator[_Kernel]:
        """Yield the gradient all-reduces of the parameter shards that only the stage `home` uses
        (`ParameterShard.home`). If `home` is None, yield the all-reduces of the shards without such
        a stage.
        """
        summing = {shard.gradient_ranks for shard in code.shards if shard.home == home}
        for ranks in sorted(each for each in summing if len(each) > 1):
            yield launch("the gradient all-reduce", ("group", *sorted(ranks)), ranks)

    remaining = Counter(part for action, _ in trace.steps for part in action.completes)
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
            # Only tasks with a barrier run collectives. The task that computes weight gradients
            # runs none, so its `barrier` is None.
            for ranks in groups[int(action.name[:-1])] if action.barrier is not None else ():
                collective = launch(title, ("group", *ranks), ranks)
                yield collective
                yield launch(title, _COMPUTE, (), collective)
            for part in action.completes:
                remaining[part] -= 1
                if part.endswith("W") and not remaining[part] and program.train:
                    yield from gradient_reductions(int(part[:-1]))
        for channel in (action.sends or ((),))[micro_batch % len(action.sends or ((),))]:
            sent = channel.task(channel.sends.message(micro_batch))
            yield launch(
                f"the send of {sent}", channel.communicator, (channel.source, channel.target)
            )
    if program.train:
        yield from gradient_reductions(None)
        if program.world_size > 1:
            # Before the update, all ranks may all-reduce the norm of the gradients or the fp16
            # overflow flag. One kernel represents both, so that the check includes this collective.
            yield launch("the all-reduce before the update", ("group", *every), every)


_COMPUTE = "compute"


def _connect_counterparts(launched: Sequence[Sequence[_Kernel]]) -> None:
    """Set `counterparts` of each kernel of a communicator. `launched` contains the kernels of each
    rank in the order of launch.
    """
    streams: dict[tuple[Hashable, int], list[_Kernel]] = defaultdict(list)
    for kernel in (kernel for kernels in launched for kernel in kernels if kernel.members):
        streams[kernel.stream, kernel.rank].append(kernel)
    for (stream, _), kernels in streams.items():
        for position, kernel in enumerate(kernels):
            members = (streams[stream, rank] for rank in kernel.members)
            kernel.counterparts = [each[position] for each in members if position < len(each)]


def _kernels_by_queue(kernels: Sequence[_Kernel], queues: int) -> list[list[_Kernel]]:
    """Return the kernels of each non-empty hardware queue of a rank, in reverse order of launch.
    `kernels` are in the order of launch.
    """
    numbers: dict[Hashable, int] = {}
    found: list[list[_Kernel]] = [[] for _ in range(queues)]
    for kernel in kernels:
        found[numbers.setdefault(kernel.stream, len(numbers)) % queues].append(kernel)
    return [kernels[::-1] for kernels in found if kernels]


def _run_queues(devices: Sequence[list[list[_Kernel]]]) -> None:
    """Start and end kernels until no queue of any device can make progress. `devices` contains, for
    each device, its queues. The last kernel of a queue starts next.
    """
    progress = True
    while progress:
        progress = False
        for waiting in (waiting for device in devices for waiting in device):
            while waiting and all(each.ended for each in waiting[-1].after):
                kernel = waiting.pop()
                kernel.started = True
                progress = True
                counterparts = kernel.counterparts
                all_exist = len(counterparts) == len(kernel.members)
                if all_exist and all(each.started for each in counterparts):
                    for each in counterparts or (kernel,):
                        each.ended = True
