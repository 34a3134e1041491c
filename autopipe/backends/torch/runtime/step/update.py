"""The update of a rank's parameters at the end of a step. Gradients are reduced, divided, unscaled
and clipped; then the optimizer runs its step, and the moving average of weights is updated.
"""

from __future__ import annotations

import torch

from autopipe.backends.torch.runtime.state.running_statistics import (
    shared_statistics,
    update_shared_statistics,
)
from autopipe.backends.torch.runtime.step.cuda_graphs import CaptureResources, NotCapturedError
from autopipe.backends.torch.runtime.step.gradients import GradientReduction, buckets_of_rank
from autopipe.backends.torch.runtime.step.optimizers import (
    GradientClipping,
    allocate_state,
    make_optimizer,
    parameter_group_by_index,
    scale_gradients,
    set_learning_rate,
    tensor_groups,
    update_weight_average,
)
from autopipe.backends.torch.runtime.step.precision import LossScaler
from autopipe.backends.torch.runtime.step.stage import RankContext
from autopipe.backends.torch.runtime.step.update_graph import UpdateGraph
from autopipe.ir.problem import FIRST_LOSS_SCALE


class ParameterUpdate:
    """Updates the parameters of one rank at the end of each step. In inference it has no optimizer
    and reduces no gradients.
    """

    def __init__(self, rank: RankContext, can_skip: bool) -> None:
        """`can_skip` is False if the optimizer must run its step even if fp16 gradients
        overflowed.
        """
        manifest = rank.manifest
        self._rank = rank
        self._can_skip = can_skip
        self._shared_statistics = shared_statistics(manifest)
        buckets = buckets_of_rank(manifest, rank.number) if rank.train else ()
        self.reduction = GradientReduction(
            rank.transport,
            rank.parameters,
            buckets,
            manifest.optimizer["shard"],
            parameter_group_by_index(manifest),
        )
        self.loss_scaler: LossScaler | None = None
        if manifest.scales_loss:
            scale = float(manifest.optimizer.get("loss_scale", FIRST_LOSS_SCALE))
            self.loss_scaler = LossScaler(scale, rank.transport)
        self.optimizer = make_optimizer(
            manifest.optimizer, tensor_groups(manifest, self.reduction) if rank.train else []
        )
        self._clipping: GradientClipping | None = None
        if rank.train and (max_norm := manifest.training.max_norm) is not None:
            counted = self.reduction.counted_in_norm(rank.number, manifest.shards[rank.number])
            self._clipping = GradientClipping(
                max_norm, rank.transport, counted, self.reduction.updated_tensors
            )
        self._updated_first: list[torch.Tensor] | None = None
        """The tensors that had gradients in the first update; None before the first update."""
        self._graph: UpdateGraph | None = None

    def make_optimizer_state(self) -> None:
        """Allocate the optimizer's state and the averages of weights now, not in the first
        update.
        """
        if self.optimizer is not None:
            allocate_state(self.optimizer)
            self._update_weight_average()

    def finish_gradients(self) -> None:
        """Wait for the gradient reduction. Then divide the gradients by the divisor of the step's
        loss, if it has one, and by the loss scale. Collective over all ranks.
        """
        self.reduction.finish()
        self._divide_gradients()
        if self.loss_scaler is not None:
            self.loss_scaler.unscale(self.reduction.updated_tensors)

    def _divide_gradients(self) -> None:
        """Divide the gradients by the divisor of the step's loss, if it has one. Collective over
        all ranks if so.

        The loss is D / N. The reduced gradients are the gradients of D. N, the divisor, follows
        from the number of labels that are not ignored, so it does not depend on the parameters; N
        is 1 if the loss has no divisor. With `division.root` the loss is r = sqrt(D / N) instead,
        whose gradient is the gradient of D divided by 2 r N.
        """
        rank = self._rank
        division = rank.manifest.loss_division
        batches = rank.manifest.training.gradient_accumulation_steps
        divisor = None
        if rank.counted is not None:
            counted = rank.transport.scalar_sum(rank.counted) / batches + division.added
            divisor = rank.counted = (
                counted if division.minimum is None else counted.clamp(min=division.minimum)
            )
        if division.root:
            local_loss = torch.zeros((), dtype=torch.float64, device=rank.device)
            for stage in rank.stages.values():
                for loss in stage.losses.values():
                    local_loss += loss.double() * (stage.loss_share / batches)
            loss = rank.transport.scalar_sum(local_loss)
            root = (loss if divisor is None else loss / divisor).sqrt()
            divisor = 2 * root if divisor is None else divisor * 2 * root
        if divisor is not None:
            scale_gradients(self.reduction.updated_tensors, divisor.reciprocal())

    def update_running_statistics(self) -> None:
        """Update the running statistics of BatchNormalization with the statistics of the step's
        micro-batches. Collective over the ranks that share a statistic.
        """
        rank = self._rank
        running = ((number, stage.p.running) for number, stage in rank.stages.items())
        update_shared_statistics(
            rank.manifest, rank.transport, rank.parameters, running, self._shared_statistics
        )

    def apply(self) -> None:
        """Clip the gradients, and update the parameters with the learning rate of this step. Set
        `grad_norm` (if gradients are clipped) and `learning_rate` of the rank. Collective over all
        ranks.
        """
        rank = self._rank
        manifest = rank.manifest
        if self._clipping is not None:
            with rank.heartbeat.record_wait():
                rank.grad_norm = self._clipping.clip()
        factor = manifest.lr_scheduler.factor(rank.steps_done, rank.options.steps)
        rank.learning_rate = manifest.optimizer["lr"] * factor
        if self.optimizer is not None:
            set_learning_rate(self.optimizer, rank.learning_rate)
            self._step_optimizer(self.optimizer)
            self.optimizer.zero_grad(set_to_none=True)
        with rank.heartbeat.record_wait():
            for bucket in self.reduction.shared:
                bucket.gather_parameters()

    def _step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the optimizer's step and update the moving average of weights. Replay the captured
        update if there is one and it applies.
        """
        scaler = self.loss_scaler
        updated = self.reduction.updated_tensors
        if self._updated_first is None:
            self._updated_first = [tensor for tensor in updated if tensor.grad is not None]
        overflow = None if scaler is None else scaler.overflow
        if self._graph is not None and self._graph.replay(updated, overflow):
            return
        if scaler is None or not self._can_skip:
            optimizer.step()
        else:
            scaler.step_optimizer(optimizer)
        self._update_weight_average()

    def _update_weight_average(self) -> None:
        """Update the moving average of weights, if the program averages weights."""
        decay = self._rank.manifest.training.ema_decay
        if decay is not None and self.optimizer is not None:
            update_weight_average(self.optimizer, decay)

    def capture(self, resources: CaptureResources) -> str:
        """Capture the update as a CUDA graph. Called after the first step. Return the reason why
        the update stays eager; "" if it is captured or if there is nothing to update.
        """
        if self.optimizer is None or not self._updated_first:
            return ""
        try:
            self._graph = UpdateGraph(
                self.optimizer,
                self._updated_first,
                self._update_weight_average,
                self.loss_scaler is not None,
                resources,
            )
        except NotCapturedError as error:
            return str(error)
        return ""
