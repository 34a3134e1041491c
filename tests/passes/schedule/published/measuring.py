"""Times and memory of a schedule's order, computed from scratch. This module shares no code with
the modules that make or check orders.
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT = {"F": 1, "B": -1, "I": 0, "W": -1}
"""Activations of a stage that a task adds. They are needed until the weight gradients exist."""


@dataclass(frozen=True)
class Measured:
    """One step in which each task starts as early as its device's order and its dependencies
    permit.
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
        """Time by which the step exceeds the work of the busiest device."""
        return self.makespan - max(self.work)

    @property
    def waiting(self) -> int:
        """Maximum idle time of a device between its first and its last task."""
        return max(span - work for span, work in zip(self.spans, self.work, strict=True))


def measure(schedule, graph, times, together=()) -> Measured:
    """Measure a schedule. `times` contains the length of each phase by its letter.

    Each pair of tasks in `together` is one piece of work of the time `times["&"]`: both start and
    end at the same time.
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
        assert len(ends) > before, "no task can run"
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
    """Return the phase letter of a task such as 2F0."""
    return next(sign for sign in "FBIW" if sign in name)


def waits(name, graph, everything):
    """Return the names of the tasks that must end before a task can start."""
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
    """Return the maximum number of activations in use while a device runs its order."""
    kept = most = 0
    for name in order:
        kept += KEPT[letter(name)]
        most = max(most, kept)
    return most
