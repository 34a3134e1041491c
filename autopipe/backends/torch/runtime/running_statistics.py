"""Running means and variances of BatchNormalization. Training moves them towards each micro-batch's own, as ONNX says:
what is left of the old is `momentum`, and the variance is that of the samples; in files of torch's exporter, the
estimate for a population. A validation reads them.

They move at the step's end, by all micro-batches in the order of their numbers, whoever ran them: so they are the same
whatever the schedule, on any number of ranks, and a forward that runs again changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.transport import Transport
from autopipe.backends.torch.torch_interfaces import foreach_add_, foreach_mul, foreach_mul_

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
        """Return the statistics that a captured forward has noted. Each replay writes the batch's own statistics."""
        found = self._found.copy()
        self._found.clear()
        return found

    def give(self, captured: list[NotedStatistic]) -> None:
        """Note copies of the statistics that a replay of a captured forward has written."""
        if captured:
            # A product with 1 copies all tensors with few kernels.
            own = foreach_mul([own for _, own, _ in captured], 1.0)
            self._found = [
                (running, copy, momentum) for (running, _, momentum), copy in zip(captured, own, strict=True)
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
        """x normalised by its own statistics, which are noted; by the running ones in a validation. The variance is
        that of the samples or, if `unbiased`, the estimate for a population."""
        if not self.training:
            return F.batch_norm(x, mean, variance, scale, bias, eps=epsilon)
        own_mean, own_variance = torch.zeros_like(mean), torch.zeros_like(variance)
        # Torch leaves in its buffers what it has found; of the variance the estimate for samples of a population.
        y = F.batch_norm(x, own_mean, own_variance, scale, bias, training=True, momentum=1.0, eps=epsilon)
        self.note(mean, own_mean, momentum)
        if not unbiased:
            count = x.numel() // x.shape[1]
            own_variance = own_variance * ((count - 1) / count)
        self.note(variance, own_variance, momentum)
        return y

    def changes(self, micro_batches: int) -> list[tuple[Tensor, float, Tensor]]:
        """Of each running statistic what is left of it at a step's end, and what is added by the micro-batches that ran
        here, of `micro_batches` in all; they are forgotten."""
        added: list[Tensor] = []
        found: list[NotedStatistic] = []
        for micro_batch, found in sorted(self._by_micro_batch.items()):
            behind = micro_batches - 1 - micro_batch
            shares = [(1 - momentum) * momentum**behind for *_, momentum in found]
            own = list(foreach_mul([own for _, own, _ in found], shares))
            if added:
                foreach_add_(added, own)
            added = added or own
        self._by_micro_batch.clear()
        pairs = zip(found, added, strict=True)
        return [(running, momentum**micro_batches, total) for (running, _, momentum), total in pairs]


def shared_statistics(manifest: Manifest) -> set[tuple[int, ...]]:
    """The ranks of each block of an untrained parameter that several pipelines hold: as running statistics they move by
    what all of them have found."""
    if not manifest.train or len({stage.pipeline for stage in manifest.stages}) == 1:
        return set()
    return {
        shard.gradient_ranks
        for shards in manifest.shards
        for shard in shards
        if len(shard.gradient_ranks) > 1 and not manifest.parameters[shard.parameter].trainable
    }


def move(
    manifest: Manifest,
    transport: Transport,
    parameters: dict[int, Tensor],
    stages: Iterable[tuple[int, RunningStatistics]],
    shared: set[tuple[int, ...]],
) -> None:
    """Move the running statistics on a rank, at a step's end, by those of its stages. `shared` are the manifest's
    `shared_statistics`."""
    changed = []
    for number, running in stages:
        count = manifest.micro_batches_at(number) * manifest.training.gradient_accumulation_steps
        changed += [(number, *each) for each in running.changes(count)]
    if not changed:
        return
    indices = {id(tensor): index for index, tensor in parameters.items()}
    shards = {shard.parameter: shard.gradient_ranks for shard in manifest.shards[transport.rank]}
    totals: defaultdict[int, list[Tensor]] = defaultdict(list)
    left: dict[int, float] = {}
    for number, tensor, factor, added in changed:
        index = indices[id(tensor)]
        holders = shards[index]
        copies = len(set(holders) & set(manifest.stages[number].ranks)) if holders in shared else 1
        totals[index].append(added / copies)
        left[index] = factor
    order = sorted(totals)
    sums = [torch.stack(totals[index]).sum(0) if len(totals[index]) > 1 else totals[index][0] for index in order]
    sums = [
        transport.total_over(each, shards[index]) if shards[index] in shared else each
        for index, each in zip(order, sums, strict=True)
    ]
    moved = [parameters[index].detach() for index in order]
    foreach_mul_(moved, [left[index] for index in order])
    foreach_add_(moved, sums)
