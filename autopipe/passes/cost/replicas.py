"""Joint work, at a step's end, of devices that hold the same block of a parameter.

Without sharding they add up gradients, and each updates all. Where the optimizer's state is sharded (ZeRO-1, see
`Optimizer.shard`), each gets the sum of a shard of the gradients and updates that; then all gather the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopipe.ir.layout import Layout
from autopipe.ir.measured_costs import Affine
from autopipe.ir.memo import remembered
from autopipe.ir.problem import Problem
from autopipe.passes.cost.assignment import StageWork
from autopipe.passes.cost.communication import FREE, Cost, all_gather, all_reduce, reduce_scatter
from autopipe.passes.cost.roofline import bucket_line


def exchange_of_gradients(problem: Problem, group: Sequence[int], tensors: int = 0) -> Cost:
    """Seconds, once a step, for gradients of these bytes a device of `group`; as many bytes are gathered.

    Copying into a bucket and back counts too, by the byte, and by the tensor where `tensors` is given.
    """
    if len(group) < 2:
        return FREE
    buckets = [bucket_line(device) for device in problem.cluster.kinds_among(group)]
    own = Affine(max(each.per_tensor_s for each in buckets) * tensors, max(each.per_byte_s for each in buckets))
    if not problem.optimizer.shard:
        return Cost(tuple(way + own for way in all_reduce(problem.cluster, group).ways))
    halves = reduce_scatter(problem.cluster, group), all_gather(problem.cluster, group)
    return Cost(tuple(scatter + gather + own for scatter in halves[0].ways for gather in halves[1].ways))


def updated_part(problem: Problem, copies: float) -> float:
    """The part that each of the devices with `copies` of a block updates, and keeps the optimizer's state of."""
    return 1 / copies if problem.optimizer.shard else 1.0


@remembered(2)
def holders_of(works: Sequence[StageWork]) -> dict[str, tuple[int, ...]]:
    """The devices, ascending, that hold the same block of each parameter, over all stages; of its parts the first."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for work in works:
        alike: dict[Layout, tuple[int, ...]] = {}
        for name, layout in work.layouts.items():
            if layout not in alike:
                places = layout.like_first(len(work.stage.devices))
                alike[layout] = tuple(sorted(work.stage.devices[place] for place in places))
            found.setdefault(name, []).append(alike[layout])
    return {name: groups[0] if len(groups) == 1 else _united(groups) for name, groups in found.items()}


def _united(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(frozenset().union(*groups)))
