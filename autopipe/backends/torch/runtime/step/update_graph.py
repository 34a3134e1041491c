"""The update of parameters as a CUDA graph: the optimizer's step and the update of the moving
average of weights.

The graph reads the static gradients of parameters, learning rates in tensors on the device and,
with loss scaling, a static tensor that is 1 if the step is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopipe.backends.torch.runtime.step.cuda_graphs import CaptureResources, NotCapturedError


class UpdateGraph:
    """The update of a rank's parameters, captured as a CUDA graph."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        tensors: Sequence[torch.Tensor],
        average: Callable[[], None],
        skips: bool,
        resources: CaptureResources,
    ) -> None:
        """Capture the update, after the optimizer's first step. If this raises NotCapturedError,
        the optimizer can still run eagerly.

        `tensors` are the tensors that had a gradient in the first step. `average` updates the
        moving average of weights. `skips` is True if steps may be skipped, because the loss is
        scaled.
        """
        if not all(group.get("fused") for group in optimizer.param_groups):
            raise NotCapturedError("its optimizer takes the learning rate from the host")
        self._optimizer = optimizer
        self._tensors = tuple(tensors)
        self._gradients = resources.gradients
        resources.check_free_memory(self._gradients.missing_bytes(self._tensors))
        device = self._tensors[0].device
        self._skipped = torch.zeros((), device=device) if skips else None
        try:
            with resources.capture_context():
                self._prepare(device)
                self._graph = resources.capture(
                    lambda: self._run_update(average), torch.cuda.graph_pool_handle()
                )
        except NotCapturedError:
            self._restore()
            raise
        finally:
            for tensor in self._tensors:
                tensor.grad = None

    def _prepare(self, device: torch.device) -> None:
        """Make the optimizer read gradients, learning rates and the skip flag from tensors on the
        device, whose addresses do not change.
        """
        for tensor in self._tensors:
            tensor.grad = self._gradients.gradient_of(tensor)
        for group in self._optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
            if "capturable" in group:
                group["capturable"] = True
        if self._skipped is not None:
            self._optimizer.found_inf = self._skipped  # type: ignore[attr-defined]
        torch.cuda.synchronize()

    def _run_update(self, average: Callable[[], None]) -> None:
        """Run the work that is captured: the optimizer's step, then `average`."""
        self._optimizer.step()
        average()

    def _restore(self) -> None:
        """Make the optimizer read learning rates from the host again."""
        for group in self._optimizer.param_groups:
            group["lr"] = float(group["lr"])
            if "capturable" in group:
                group["capturable"] = False

    def replay(self, tensors: Sequence[torch.Tensor], skipped: torch.Tensor | None) -> bool:
        """Replay the update, after the learning rates of the step have been set. `tensors` are all
        tensors that the optimizer updates. `skipped`, a scalar on the device, is 1 if the step is
        skipped, otherwise 0; None without loss scaling.

        Return False, without any effect, if the tensors that have gradients are not those of the
        capture.
        """
        found = [each for each in tensors if each.grad is not None]
        if len(found) != len(self._tensors) or any(map(_are_different, found, self._tensors)):
            return False
        self._gradients.set_as_gradients(self._tensors)
        if self._skipped is not None:
            assert skipped is not None, "the loss is scaled"
            self._skipped.copy_(skipped)
        self._graph.replay()
        return True


def _are_different(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if the arguments are different objects."""
    return one is not other
