"""Running mean and variance of BatchNormalization.

In training, each micro-batch updates a running value r to m r + (1 - m) s, with the attribute
`momentum` m and the statistic s of the micro-batch, as ONNX defines it. The variance of a
micro-batch is the biased variance. It is the unbiased estimate in files of torch's exporter, which
declare this. A validation uses the running values and does not change them.

The running values are updated at the end of a step, in the order of the micro-batches, and within a
micro-batch in the order of the BatchNormalization calls in the graph. This order does not depend on
which ranks ran the calls. So running values are equal for every schedule and number of ranks, and
recomputation does not change them.
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

StatisticCalls = tuple[tuple[float, ...], tuple[int, ...]]
"""(momenta, numbers). momenta: the momenta of all BatchNormalization calls in one forward of the
model that update a running value, in their order. numbers: the indices of those calls that belong
to one stage.
"""
NotedStatistic = tuple[Tensor, Tensor, float]
"""(running value, statistic of the micro-batch, momentum) of one BatchNormalization call. "Running
value" is the tensor of a running mean or variance.
"""


@dataclass(slots=True)
class RunningStatistics:
    """The statistics that the forwards of one stage compute in a step, to update running values at
    its end. Generated code uses it as `p.running`.
    """

    training: bool = True
    _found: list[NotedStatistic] = field(default_factory=list)
    """Statistics of the forward that runs now, or that has just run."""
    _by_micro_batch: dict[int, list[NotedStatistic]] = field(default_factory=dict)
    """Statistics of the step's forwards, by number of the micro-batch in the step."""

    def begin(self, training: bool) -> None:
        """Start a forward. Statistics that were recorded since the last `end`, by a recomputed
        segment, are discarded. `training` is False in a validation.
        """
        self.training = training
        self._found.clear()

    def end(self, micro_batch: int) -> None:
        """Keep the statistics of the forward that has just run, for micro-batch `micro_batch` of
        the step.
        """
        if self._found:
            self._by_micro_batch[micro_batch] = self._found.copy()

    def take(self) -> list[NotedStatistic]:
        """Remove and return the statistics of a forward that has just been captured as a CUDA
        graph. Each replay overwrites these tensors.
        """
        found = self._found.copy()
        self._found.clear()
        return found

    def record_replayed(self, captured: list[NotedStatistic]) -> None:
        """Record copies of the statistics that a replay has written to the tensors in `captured`,
        which `take` has returned.
        """
        if captured:
            # A multiplication by 1 copies all tensors with few kernels. Clones would need a kernel
            # per tensor.
            own = foreach_mul([own for _, own, _ in captured], 1.0)
            self._found = [
                (running, copy, momentum)
                for (running, _, momentum), copy in zip(captured, own, strict=True)
            ]

    def record(self, running: Tensor, own: Tensor, momentum: float) -> None:
        """Record the statistic `own` of the current micro-batch, with which the end of the step
        updates `running`.
        """
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
        """Return x normalised by the mean and variance of the batch x, and record both statistics
        for the running values `mean` and `variance`. In a validation, return x normalised by the
        running values. The recorded variance is the biased variance; if `unbiased`, the unbiased
        estimate.
        """
        if not self.training:
            return F.batch_norm(x, mean, variance, scale, bias, eps=epsilon)
        own_mean = torch.zeros_like(mean)
        own_variance = torch.zeros_like(variance)
        # With momentum 1, the running mean and variance in `own_mean` and `own_variance` become the
        # mean and the unbiased variance of this batch.
        y = F.batch_norm(
            x, own_mean, own_variance, scale, bias, training=True, momentum=1.0, eps=epsilon
        )
        self.record(mean, own_mean, momentum)
        if not unbiased:
            count = x.numel() // x.shape[1]
            own_variance = own_variance * ((count - 1) / count)
        self.record(variance, own_variance, momentum)
        return y

    def updates_of_step(
        self, micro_batches: int, calls: Mapping[int, StatisticCalls]
    ) -> list[tuple[Tensor, float, Tensor]]:
        """Return (running value, factor, addend) for each running value that this stage updates at
        the end of a step: it becomes factor · value + addend. Discard the statistics of the step.

        A step has `micro_batches` micro-batches, each of which updates a running value once per
        call of its BatchNormalization. `calls` describes the running values that several stages
        update: by `id` of the running value, the BatchNormalization calls of all stages that update
        it. If a running value is not in `calls`, only calls of this stage update it in the forward
        of a micro-batch.
        """
        added: list[Tensor] = []
        weights: list[tuple[float, float]] = []
        found: list[NotedStatistic] = []
        for micro_batch, found in sorted(self._by_micro_batch.items()):
            weights = _statistic_weights(found, calls)
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


def _statistic_weights(
    found: Sequence[NotedStatistic], calls: Mapping[int, StatisticCalls]
) -> list[tuple[float, float]]:
    """Return (weight, decay) for each statistic in `found`, the statistics of one forward. They say
    how the forward changes the running value.

    weight: factor of the statistic in the new running value.
    decay: factor of the previous running value in the new one.

    If the calls that update a running value have the momenta m_1 ... m_k in their order, the weight
    of call j is (1 - m_j) m_(j+1) ... m_k, and the decay is m_1 ... m_k. `calls` has, by `id` of
    the running value, the calls of all stages for each running value that several stages update.
    """
    momenta = defaultdict[int, list[float]](list)
    for running, _, momentum in found:
        momenta[id(running)].append(momentum)
    places: dict[int, StatisticCalls] = {}
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
    """Return the parameter indices of running values that the forwards of several stages update.
    With several pipelines, return the indices of all untrained parameters. Empty in inference.
    """
    if not manifest.train:
        return frozenset()
    if len({stage.pipeline for stage in manifest.stages}) > 1:
        return frozenset(
            index for index, each in enumerate(manifest.parameters) if not each.trainable
        )
    return frozenset(each.parameter for each in manifest.running_calls)


def groups_with_shared_statistics(
    manifest: Manifest, shared: Collection[int]
) -> set[tuple[int, ...]]:
    """Return the process groups, as tuples of ranks, that hold a shard of a running value in
    `shared`. Shards that only one rank holds are omitted.
    """
    found = (shard for shards in manifest.shards for shard in shards if shard.parameter in shared)
    return {shard.gradient_ranks for shard in found if len(shard.gradient_ranks) > 1}


def update_shared_statistics(
    manifest: Manifest,
    transport: Transport,
    parameters: dict[int, Tensor],
    stages: Iterable[tuple[int, RunningStatistics]],
    shared: Collection[int],
) -> None:
    """Update all running values on a rank at the end of a step. Values that several stages update
    get the contributions of the stages on all ranks. Collective over the ranks that hold a shared
    running value.

    `shared` are the manifest's `shared_statistics`. `stages` has (number, statistics) of the rank's
    stages.
    """
    changed = []
    for number, running in stages:
        count = manifest.micro_batch_count(number) * manifest.training.gradient_accumulation_steps
        calls = {
            id(parameters[each.parameter]): (each.momenta, each.made_by(number))
            for each in manifest.running_calls
            if each.parameter in parameters and number in each.stages
        }
        changed += [(number, *each) for each in running.updates_of_step(count, calls)]
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
        # This rank may store a running value that only stages on other ranks update. Its
        # contribution to the sum over ranks is then zero.
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
        transport.sum_over_ranks(each, shards[index])
        if index in shared and len(shards[index]) > 1
        else each
        for index, each in zip(order, sums, strict=True)
    ]
    moved = [parameters[index].detach() for index in order]
    foreach_mul_(moved, [left[index] for index in order])
    foreach_add_(moved, sums)
