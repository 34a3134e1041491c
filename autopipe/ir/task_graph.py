"""The task graph of one rank: what it does in a step, in its static order, and what each task waits for.

It is what the rank's program says, loops unrolled, with what happens inside its lines made tasks of their own: the
collectives of a stage's group, the adding up of gradients, the update, the freeing of what no later task uses.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """One message of a send or receive: the other rank, and its task that receives or sends the same message."""

    peer: int
    channel: int
    tensor: str
    bytes: int
    task: str


@dataclass(frozen=True, slots=True)
class TaskNode:
    """One task. Tasks of a schedule are named as in the rank's file and the timeline, such as `2F0`; a send of its
    results is `2SEND_F0`, of gradients `2SEND_B0`, receives alike, `@1` behind one from stage 1 alone.

    `bytes` are moved, added, updated or freed; `after` are tasks of this rank, by place, that are really waited for;
    `group` are the ranks that do a collective, a reduction or a gathering together, `inside` is the task during which.
    """

    kind: str
    """`receive`, `forward`, `send`, `backward`, `input_gradient`, `weight_gradient`, `collective`, `accumulate`,
    `reduce`, `update`, `gather` or `free`."""
    name: str
    stage: int | None = None
    micro_batch: int | None = None
    bytes: int = 0
    after: tuple[int, ...] = ()
    messages: tuple[MessageEnd, ...] = ()
    group: tuple[int, ...] = ()
    inside: int | None = None
    what: str = ""
    """Value freed; or kind and value of a collective; or `shares` for a reduction that gives each rank one."""


@dataclass(frozen=True, slots=True)
class LoopedTasks:
    """Tasks that stand in a section (`warm-up`, `repetend`, `cool-down` or `end`) of the program once: `count` times as
    many as those from `start` to `end`, as a loop. `last` is where those of its last time start; the micro-batches of
    one time are `stride` further than those of the time before, None where stages differ in that."""

    section: str
    start: int
    end: int
    count: int = 1
    stride: int | None = 1
    last: int = 0


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """A rank's tasks in the order in which it does them, and by the plan's predictions the bytes in use after each
    (those of a forward or backward while it runs), of which `static_bytes` are there all through a step."""

    rank: int
    nodes: tuple[TaskNode, ...]
    held: tuple[int, ...]
    static_bytes: int
    stretches: tuple[LoopedTasks, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.held, default=self.static_bytes)
