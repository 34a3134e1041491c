"""What a schedule's order takes and keeps, computed from scratch: shares no code with what makes or
checks orders.
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT = {"F": 1, "B": -1, "I": 0, "W": -1}
"""Activations of a stage that a task adds; they are needed until the parameters' gradients are
there.
"""


@dataclass(frozen=True)
class Measured:
    """Figures of one step in which every task starts as soon as its device's order and its own
    waits allow.
    """

    makespan: int
    work: tuple[int, ...]
    """Time that each device computes."""
    spans: tuple[int, ...]
    """Time from the start of each device's first task to the end of its last."""
    peaks: tuple[int, ...]
    """Most activations of stages that each device keeps at once."""

    @property
    def bubble(self) -> int:
        """Time by which the step is longer than the busiest device's work."""
        return self.makespan - max(self.work)

    @property
    def waiting(self) -> int:
        """The longest that a device waits between its first task and its last."""
        return max(span - work for span, work in zip(self.spans, self.work, strict=True))


def measure(schedule, graph, times, together=()) -> Measured:
    """`times` gives the length of each phase by its letter.

    Pairs of tasks in `together` are one piece of work each, of the time `times["&"]`: they start
    and end at once.
    """
    partner = {a: b for pair in together for a, b in (pair, pair[::-1])}
    names = [[str(task) for task in order] for order in schedule.tasks]
    everything = {name for order in names for name in order}
    ends: dict[str, int] = {}
    starts: dict[str, int] = {}
    rest = [list(order) for order in names]
    free = [0] * len(rest)
    while any(rest):
        before = len(ends)
        for device, order in enumerate(rest):
            while order and order[0] not in ends:
                group = [order[0]] + ([partner[order[0]]] if order[0] in partner else [])
                needs = {need for name in group for need in waits(name, graph, everything)} - set(
                    group
                )
                if not needs <= ends.keys():
                    break
                start = max([free[device], *(ends[need] for need in needs)])
                length = times[letter(group[0])] if len(group) == 1 else times["&"]
                for name in group:
                    assert order.pop(0) == name
                    starts[name], ends[name] = start, start + length
                free[device] = start + length
        assert len(ends) > before, "nothing can go on"
    return Measured(
        max(ends.values()),
        tuple(sum(times[letter(name)] for name in order) for order in names),
        tuple(
            max(ends[name] for name in order) - min(starts[name] for name in order)
            for order in names
        ),
        tuple(peak(order) for order in names),
    )


def letter(name: str) -> str:
    """The phase of a task by its name, like 2F0."""
    return next(sign for sign in "FBIW" if sign in name)


def waits(name, graph, everything):
    """Names of the tasks that must end before one of this name starts."""
    sign = letter(name)
    stage, micro_batch = map(int, name.split(sign))
    if sign == "F":
        return [f"{source}F{micro_batch}" for source, target in graph.edges if target == stage]
    if sign == "W":
        return [f"{stage}I{micro_batch}"]
    later = [target for source, target in graph.edges if source == stage]
    gradients = [
        f"{target}I{micro_batch}"
        if f"{target}I{micro_batch}" in everything
        else f"{target}B{micro_batch}"
        for target in later
    ]
    return [f"{stage}F{micro_batch}", *gradients]


def peak(order) -> int:
    """Most activations kept while a device runs its order."""
    kept = most = 0
    for name in order:
        kept += KEPT[letter(name)]
        most = max(most, kept)
    return most
