"""All ranks' instructions run against each other, computing nothing.

Sends never wait, receives are matched with sends channel by channel in order, tasks wait for their messages and for
their group. As no choice is left, one run shows for all whether every rank comes to its end. What orders instructions
(`posting`, `order`) has no part in it, so a fault there is found here.
"""

from __future__ import annotations

from autopipe.ir.errors import CodegenError
from autopipe.ir.program import Program, RankCode
from autopipe.passes.lower.proof.lanes import Barrier, ProofChannel, Wait
from autopipe.passes.lower.proof.script import ProgramSync, RankTrace


def prove(program: Program) -> None:
    """Raise CodegenError, naming the tasks, unless every rank's program runs to its end.

    It does if no ranks wait for one another in a circle, nothing is used before it was asked for or computed, messages
    are asked for in the order in which they are sent, each is sent and asked for once, each task runs once, and groups
    come to their exchanges in one order. Time and memory grow with the number of instructions.
    """
    stages = ProgramSync(program)
    scripts = [RankTrace(rank, stages) for rank in program.ranks]
    _check_waits(_run(scripts), scripts)
    for rank, script in zip(program.ranks, scripts, strict=True):
        _check_complete(program, rank, script)
    _check_lanes(stages)
    _check_reductions(program, scripts)


def _run(scripts: list[RankTrace]) -> dict[int, Wait]:
    """Run all ranks as far as they come; what each of those that do not come to the end waits for."""
    waits: dict[int, Wait] = {}
    awake = [script.rank for script in reversed(scripts)]
    while awake:
        script = scripts[awake.pop()]
        waits.pop(script.rank, None)
        steps, position = script.steps, script.position
        while position < len(steps):
            action, micro_batch = steps[position]
            wait = action.run(micro_batch, script.rank, awake)
            if wait is not None:
                waits[script.rank] = wait
                break
            position += 1
        script.position = position
    return waits


def _check_waits(waits: dict[int, Wait], scripts: list[RankTrace]) -> None:
    """Raise CodegenError for one who waits for what never comes, or for the circle that waiting ends in."""
    for rank, wait in sorted(waits.items()):
        if not scripts[wait.rank].will_meet(wait):
            raise CodegenError(f"{_waiting(rank, wait)}, which never comes")
    if waits:
        rank, seen = min(waits), list[int]()
        while rank not in seen:
            seen.append(rank)
            rank = waits[rank].rank
        circle = seen[seen.index(rank) :]
        raise CodegenError(f"deadlock: {', '.join(_waiting(each, waits[each]) for each in circle)}")


def _waiting(rank: int, wait: Wait) -> str:
    what = f"rank {wait.rank}"
    if isinstance(wait.what, ProofChannel):
        what = f"{wait.what.task(wait.number)} of {what}"
    elif isinstance(wait.what, Barrier):
        what += " to join in"
    return f"rank {rank} would wait in {wait.task} for {what}"


def _check_lanes(stages: ProgramSync) -> None:
    for lane in stages.lanes.values():
        if len(lane.sent) > len(lane.asked):
            task = lane.task(lane.sent[len(lane.asked)])
            raise CodegenError(f"rank {lane.source} sends {task}, which rank {lane.target} never asks for")
        if lane.used < len(lane.asked):
            raise CodegenError(f"rank {lane.target} asks for {lane.sender} more often than it uses it")


def _check_complete(program: Program, rank: RankCode, script: RankTrace) -> None:
    """Raise CodegenError unless each task has run on each of its stage's micro-batches."""
    for wired in rank.stages:
        due = program.micro_batches_of(wired.stage)
        for letter in "FBW" if program.train else "F":
            for micro_batch in sorted(script.part(wired.stage, letter).done.symmetric_difference(due)):
                reason = "never runs" if micro_batch in due else "does not belong to the step"
                raise CodegenError(f"{wired.stage}{letter}{micro_batch} {reason}", where=f"rank {rank.rank}")


def _check_reductions(program: Program, scripts: list[RankTrace]) -> None:
    """Raise CodegenError where ranks would start the sums of gradients over one group in different orders.

    A stage's sums start with its last backward, if all ranks of the group have it.
    """
    orders: dict[tuple[int, ...], tuple[int, list[int]]] = {}
    for rank, script in zip(program.ranks, scripts, strict=True):
        homes: dict[tuple[int, ...], set[int]] = {}
        for shard in rank.shards:
            if shard.home is not None and len(shard.gradient_ranks) > 1:
                homes.setdefault(shard.gradient_ranks, set()).add(shard.home)
        for group, stages in homes.items():
            found = [stage for stage in script.last_gradients() if stage in stages]
            first, order = orders.setdefault(group, (script.rank, found))
            if order != found:
                raise CodegenError(
                    f"rank {first} would add up gradients of stages {order}, rank {script.rank} of stages {found}, "
                    "in these orders"
                )
