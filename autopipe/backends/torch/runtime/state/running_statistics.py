"""Running means and variances of BatchNormalization. Training moves them towards each micro-batch's
own, as ONNX says: what is left of the old is `momentum`, and the variance is that of the samples;
in files of torch's exporter, the estimate for a population. A validation reads them.

They move at the step's end, by all micro-batches in the order of their numbers, and within a
micro-batch by all calls of a BatchNormalization in the order of the graph, whoever ran them. So
they are equal for every schedule and number of ranks, and a forward that runs again changes
nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.communication.transport import Transport
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.torch_interfaces import foreach_add_, foreach_mul, foreach_mul_

Calls = tuple[tuple[float, ...], tuple[int, ...]]
"""The momenta of all calls that move a running statistic in one forward pass of the model, in their
order, and the numbers of the calls that a stage makes.
"""
NotedStatistic = tuple[Tensor, Tensor, float]
"""A running statistic, the batch's own statistic, and the momentum."""


@dataclass(slots=True)
class RunningStatistics:
    """The running statistics of a stage, `p.running` of its forward."""

    training: bool = True
    _found: list[NotedStatistic] = field(default_factory=list)
    """Noted by the forward that runs."""
    _by_micro_batch: dict[int, list[NotedStatistic]] = field(default_factory=dict)

    def begin(self, training: bool) -> None:
        """A forward begins. What one has left that ran again, in a backward, is forgotten."""
        self.training = training
        self._found.clear()

    def end(self, micro_batch: int) -> None:
        if self._found:
            self._by_micro_batch[micro_batch] = self._found.copy()

    def take(self) -> list[NotedStatistic]:
        """Return the statistics that a captured forward has noted. Each replay writes the batch's
        own statistics.
        """
        found = self._found.copy()
        self._found.clear()
        return found

    def give(self, captured: list[NotedStatistic]) -> None:
        """Note copies of the statistics that a replay of a captured forward has written."""
        if captured:
            # A product with 1 copies all tensors with few kernels.
            own = foreach_mul([own for _, own, _ in captured], 1.0)
            self._found = [
                (running, copy, momentum)
                for (running, _, momentum), copy in zip(captured, own, strict=True)
            ]

    def note(self, running: Tensor, own: Tensor, momentum: float) -> None:
        """The batch's own statistic of which `running` is the running one."""
        self._found.append((running, own.detach(), momentum))

    def batch_norm(
        self,
        x: Tensor,
        scale: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        momentum: float,
        epsilon: float,
        unbiased: bool = False,
    ) -> Tensor:
        """x normalised by its own statistics, which are noted; by the running ones in a validation.
        The variance is that of the samples or, if `unbiased`, the estimate for a population.
        """
        if not self.training:
            return F.batch_norm(x, mean, variance, scale, bias, eps=epsilon)
        own_mean = torch.zeros_like(mean)
        own_variance = torch.zeros_like(variance)
        # Torch leaves in its buffers what it has found; of the variance the estimate for samples of
        # a population.
        y = F.batch_norm(
            x, own_mean, own_variance, scale, bias, training=True, momentum=1.0, eps=epsilon
        )
        self.note(mean, own_mean, momentum)
        if not unbiased:
            count = x.numel() // x.shape[1]
            own_variance = own_variance * ((count - 1) / count)
        self.note(variance, own_variance, momentum)
        return y

    def changes(
        self, micro_batches: int, calls: Mapping[int, Calls]
    ) -> list[tuple[Tensor, float, Tensor]]:
        """Return for each running statistic what is left of it at the end of a step, and what the
        forwards that ran here add; forget these forwards.

        A step has `micro_batches`, of which each moves a statistic once per call of its
        BatchNormalization. `calls` has, by `id` of the statistic, all calls of one that several
        stages hold; otherwise all calls ran here.
        """
        added: list[Tensor] = []
        weights: list[tuple[float, float]] = []
        found: list[NotedStatistic] = []
        for micro_batch, found in sorted(self._by_micro_batch.items()):
            weights = _weights(found, calls)
            behind = micro_batches - 1 - micro_batch
            shares = [weight * decay**behind for weight, decay in weights]
            own = list(foreach_mul([own for _, own, _ in found], shares))
            if added:
                foreach_add_(added, own)
            added = added or own
        self._by_micro_batch.clear()
        totals: dict[int, tuple[Tensor, float, Tensor]] = {}
        for (running, *_), (_, decay), total in zip(found, weights, added, strict=True):
            before = totals.get(id(running))
            totals[id(running)] = (
                running,
                decay**micro_batches,
                total if before is None else before[2] + total,
            )
        return list(totals.values())


def _weights(
    found: Sequence[NotedStatistic], calls: Mapping[int, Calls]
) -> list[tuple[float, float]]:
    """Return (weight, decay) of each statistic that a forward has noted.

    weight: of the batch's own statistic in the running one after the forward.
    decay: what is left of the old running statistic after the forward.

    With momenta m_1 ... m_k of the calls in their order, the weight of call j is (1 - m_j) m_(j+1)
    ... m_k, and the decay is m_1 ... m_k.
    """
    momenta = defaultdict[int, list[float]](list)
    for running, _, momentum in found:
        momenta[id(running)].append(momentum)
    places: dict[int, Calls] = {}
    for key, own in momenta.items():
        known = calls.get(key)
        places[key] = known or (tuple(own), tuple(range(len(own))))
    numbers = defaultdict[int, int](int)
    weights = []
    for running, *_ in found:
        key = id(running)
        every, own_places = places[key]
        place = own_places[numbers[key]]
        numbers[key] += 1
        weights.append(((1 - every[place]) * math.prod(every[place + 1 :]), math.prod(every)))
    return weights


def shared_statistics(manifest: Manifest) -> frozenset[int]:
    """Return the untrained parameters, by index, that move by the forwards of several stages:
    running statistics that several stages hold, and with several pipelines all of them.
    """
    if not manifest.train:
        return frozenset()
    if len({stage.pipeline for stage in manifest.stages}) > 1:
        return frozenset(
            index for index, each in enumerate(manifest.parameters) if not each.trainable
        )
    return frozenset(each.parameter for each in manifest.running_calls)


def sharing_groups(manifest: Manifest, shared: Collection[int]) -> set[tuple[int, ...]]:
    """Return the ranks of each block of the `shared` statistics."""
    found = (shard for shards in manifest.shards for shard in shards if shard.parameter in shared)
    return {shard.gradient_ranks for shard in found if len(shard.gradient_ranks) > 1}


def move(
    manifest: Manifest,
    transport: Transport,
    parameters: dict[int, Tensor],
    stages: Iterable[tuple[int, RunningStatistics]],
    shared: Collection[int],
) -> None:
    """Move the running statistics on a rank, at a step's end, by those of its stages and of other
    ranks' stages.

    `shared` are the manifest's `shared_statistics`.
    """
    changed = []
    for number, running in stages:
        count = manifest.micro_batches_at(number) * manifest.training.gradient_accumulation_steps
        calls = {
            id(parameters[each.parameter]): (each.momenta, each.made_by(number))
            for each in manifest.running_calls
            if each.parameter in parameters and number in each.stages
        }
        changed += [(number, *each) for each in running.changes(count, calls)]
    indices = {id(tensor): index for index, tensor in parameters.items()}
    shards = {shard.parameter: shard.gradient_ranks for shard in manifest.shards[transport.rank]}
    totals: defaultdict[int, list[Tensor]] = defaultdict(list)
    left: dict[int, float] = {}
    for number, tensor, factor, added in changed:
        index = indices[id(tensor)]
        copies = (
            len(set(shards[index]) & set(manifest.stages[number].ranks)) if index in shared else 1
        )
        totals[index].append(added / copies)
        left[index] = factor
    count = manifest.micro_batches * manifest.training.gradient_accumulation_steps
    for each in manifest.running_calls:
        # A stage on this rank may hold a statistic, and only others move it.
        if each.parameter in parameters and each.parameter not in totals:
            totals[each.parameter].append(torch.zeros_like(parameters[each.parameter]))
            left[each.parameter] = math.prod(each.momenta) ** count
    if not totals:
        return
    order = sorted(totals)
    sums = [
        torch.stack(totals[index]).sum(0) if len(totals[index]) > 1 else totals[index][0]
        for index in order
    ]
    sums = [
        transport.total_over(each, shards[index])
        if index in shared and len(shards[index]) > 1
        else each
        for index, each in zip(order, sums, strict=True)
    ]
    moved = [parameters[index].detach() for index in order]
    foreach_mul_(moved, [left[index] for index in order])
    foreach_add_(moved, sums)
