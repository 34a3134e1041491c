"""Optimizers, and what belongs to their step: parameter groups, learning rates, gradient clipping,
and the moving average of weights. Optimizers are those of torch, and Lion. With `muon`, Muon
updates matrices and AdamW updates the other parameters.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from autopipe.backends.torch.checkpoint import AVERAGE_STATE
from autopipe.backends.torch.runtime.communication.transport import Transport
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.step.gradients import GradientReduction
from autopipe.backends.torch.torch_interfaces import (
    foreach_add_,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul_,
    foreach_norm,
)
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.problem import PARAMETER_GROUPS_KEY, matches_pattern


def parameter_group_by_index(manifest: Manifest) -> dict[int, int]:
    """Return, by parameter index, the number of the parameter's group: entry i of the setting
    `optimizer.groups` has number i + 1. Parameters that match no entry are omitted.
    """
    patterns = [each["match"] for each in manifest.optimizer.get("groups", ())]
    found = {}
    for index, parameter in enumerate(manifest.parameters):
        own = (
            number
            for number, each in enumerate(patterns, 1)
            if matches_pattern(each, parameter.value.name, PARAMETER_GROUPS_KEY)
        )
        if number := next(own, 0):
            found[index] = number
    return found


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that the optimizer updates with equal settings. Their learning rate is `lr_factor`
    times the learning rate of the step. With optimizer `muon`, Muon updates the tensors if
    `matrices` is True, otherwise AdamW does.
    """

    tensors: tuple[torch.Tensor, ...]
    weight_decay: float
    lr_factor: float = 1.0
    matrices: bool = False

    def as_torch_group(self, lr: float) -> dict[str, Any]:
        """Return the group in the form of `torch.optim`, with the learning rate `lr *
        lr_factor`.
        """
        return {
            "params": list(self.tensors),
            "lr": lr * self.lr_factor,
            "lr_factor": self.lr_factor,
            "weight_decay": self.weight_decay,
        }


def tensor_groups(manifest: Manifest, reduction: GradientReduction) -> list[TensorGroup]:
    """Return all tensors that the rank's optimizer updates, grouped by their settings."""
    settings = manifest.optimizer
    numbers = parameter_group_by_index(manifest)
    matrices = frozenset(settings.get("matrices", ()))
    found = defaultdict[tuple[int, bool], list[torch.Tensor]](list)
    for index, tensor in reduction.updated_parameters.items():
        found[numbers.get(index, 0), index in matrices].append(tensor)
    for shard in reduction.shards:
        found[numbers.get(shard.runs[0].parameter, 0) if shard.runs else 0, False].append(
            shard.tensor
        )
    made = []
    for (number, is_matrix), tensors in found.items():
        own = settings["groups"][number - 1] if number else {}
        decay = own.get("weight_decay")
        decay = settings["weight_decay"] if decay is None else decay
        made.append(TensorGroup(tuple(tensors), decay, own.get("lr_factor", 1.0), is_matrix))
    return made


def _has_fused_kernel(tensor: torch.Tensor) -> bool:
    """Return True if torch updates many tensors like `tensor` with one fused kernel, which it does
    on GPUs.
    """
    return tensor.is_cuda


class EagerOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that do not import `torch._dynamo`. Methods of torch's base class
    import it, so that a compiled update can call them. Autopipe compiles no updates, and the import
    takes longer than the rest of the start-up.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


@cache
def remove_compile_hooks(
    kind: type[torch.optim.Optimizer],
) -> Callable[..., torch.optim.Optimizer]:
    """Return a subclass of `kind`, a class of torch optimizers, with equal name. It is an
    `EagerOptimizer`, and its `step` does not import `torch._dynamo`.
    """
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (EagerOptimizer, kind), {"step": step, "__module__": __name__})


def make_optimizer(
    settings: dict[str, Any], groups: Sequence[TensorGroup]
) -> torch.optim.Optimizer | None:
    """Return a new optimizer with the manifest's `optimizer` settings for the tensors of `groups`;
    None if there are no groups. Raise ConfigurationError if the name of the optimizer is unknown.
    """
    if not groups:
        return None
    forms = [each.as_torch_group(settings["lr"]) for each in groups]
    # On GPUs, one fused kernel updates many tensors. On CPUs, `fused` is None, so that torch
    # chooses the implementation.
    fused = (
        True
        if all(_has_fused_kernel(tensor) for each in groups for tensor in each.tensors)
        else None
    )
    betas = tuple(settings.get("betas", ()))
    momentum = settings.get("momentum", 0.0)
    nesterov = settings.get("nesterov", False)
    match settings["name"]:
        case "sgd":
            return remove_compile_hooks(torch.optim.SGD)(
                forms, momentum=momentum, nesterov=nesterov, fused=fused
            )
        case "adam":
            return remove_compile_hooks(torch.optim.Adam)(
                forms, betas=betas, eps=settings["eps"], fused=fused
            )
        case "adamw":
            return remove_compile_hooks(torch.optim.AdamW)(
                forms, betas=betas, eps=settings["eps"], fused=fused
            )
        case "lion":
            return Lion(forms, betas)
        case "muon":
            matrices = [form for form, each in zip(forms, groups, strict=True) if each.matrices]
            others = [form for form, each in zip(forms, groups, strict=True) if not each.matrices]
            parts: list[torch.optim.Optimizer] = []
            if matrices:
                # `match_rms_adamw` scales updates of matrices of any shape to the size of AdamW's
                # updates, so that one learning rate suits both optimizers.
                how = {"nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
                parts.append(
                    remove_compile_hooks(torch.optim.Muon)(matrices, momentum=momentum, **how)
                )
            if others:
                parts.append(
                    remove_compile_hooks(torch.optim.AdamW)(
                        others, betas=betas, eps=settings["eps"], fused=fused
                    )
                )
            return parts[0] if len(parts) == 1 else JointOptimizer(parts)
    raise ConfigurationError(f"optimizer {settings['name']!r} is unknown")


class Lion(EagerOptimizer):
    """The optimizer Lion, which updates by the sign of an interpolated momentum, with decoupled
    weight decay (Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023,
    algorithm 2).
    """

    def __init__(self, groups: Iterable[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(groups, {"betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not updated:
                continue
            gradients = [parameter.grad for parameter in updated]
            for parameter in updated:
                if "exp_avg" not in self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            averages = [self.state[parameter]["exp_avg"] for parameter in updated]
            first, second = group["betas"]
            signs = [each.sign_() for each in foreach_lerp(averages, gradients, 1.0 - first)]
            foreach_mul_(updated, 1.0 - group["lr"] * group["weight_decay"])
            foreach_add_(updated, signs, alpha=-group["lr"])
            foreach_lerp_(averages, gradients, 1.0 - second)


class JointOptimizer(EagerOptimizer):
    """Combines several optimizers of disjoint tensors into one optimizer, which has all their
    parameter groups and one common state.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(
            [{"params": list(group["params"])} for part in parts for group in part.param_groups], {}
        )
        self._parts = tuple(parts)
        self.__setstate__(
            {
                "state": self.state,
                "param_groups": [group for part in parts for group in part.param_groups],
            }
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        first = 0
        for part in self._parts:
            count = len(part.param_groups)
            part.param_groups = self.param_groups[first : first + count]
            part.state = self.state
            first += count

    def step(self, closure: Any = None) -> Any:
        for part in self._parts:
            part.step()


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer allocate its state, by a step with gradients of zero. This step also
    applies weight decay, so the parameters may change.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step: `rate` times the factor of each parameter group.

    For a fused optimizer the rate is rounded to float32, because a captured update reads it from a
    float32 tensor. So captured and eager updates have equal results.
    """
    for group in optimizer.param_groups:
        own = rate * group["lr_factor"]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(own)
        elif group.get("fused"):
            group["lr"] = float(np.float32(own))
        else:
            group["lr"] = own


def update_weight_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Update the exponential moving average of the weights, avg = decay · avg + (1 - decay) ·
    weight, as torch's `AveragedModel` does with `get_ema_multi_avg_fn`. At the first call for a
    weight, the average becomes the weight. The averages are part of the optimizer's state.
    """
    averages = []
    weights = []
    for tensor in (each for group in optimizer.param_groups for each in group["params"]):
        state = optimizer.state[tensor]
        if AVERAGE_STATE in state:
            averages.append(state[AVERAGE_STATE])
            weights.append(tensor.detach())
        elif state or isinstance(optimizer, torch.optim.SGD):
            # Optimizers other than SGD initialise their state of a tensor only if it is empty. So
            # the average is added to the state only after their first update of the tensor.
            state[AVERAGE_STATE] = tensor.detach().clone()
    if averages:
        foreach_lerp_(averages, weights, 1.0 - decay)


_CLIPPING_EPSILON = 1e-6
"""Added to the norm before the division by it, as in torch's `clip_grad_norm_`."""


class GradientClipping:
    """Scales the gradients of a step so that their 2-norm over all ranks is at most `max_norm`, as
    torch's `clip_grad_norm_` does on one device. The host does not wait for the device.
    """

    def __init__(
        self,
        max_norm: float,
        transport: Transport,
        counted: Iterable[torch.Tensor],
        updated: Sequence[torch.Tensor],
    ) -> None:
        """`updated` are the tensors that this rank's optimizer updates. `counted` are the tensors
        among them whose gradients this rank adds to the norm, so that each element counts on one
        rank only.
        """
        self._max_norm = max_norm
        self._transport = transport
        self._counted = tuple(counted)
        self._updated = tuple(updated)

    def clip(self) -> torch.Tensor:
        """Scale the gradients. Return their norm before the scaling, float64 [] on the device.
        Collective over all ranks.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self._transport.device)
        if counted := [each.grad for each in self._counted if each.grad is not None]:
            # Norms are converted to float64 per element type, because a conversion per tensor would
            # launch more kernels.
            by_dtype = defaultdict[torch.dtype, list[torch.Tensor]](list)
            for norm in foreach_norm(counted):
                by_dtype[norm.dtype].append(norm)
            squares = (
                torch.cat([torch.stack(norms).double() for norms in by_dtype.values()])
                .square()
                .sum()
            )
        norm = self._transport.scalar_sum(squares).sqrt()
        factor = torch.clamp(self._max_norm / (norm + _CLIPPING_EPSILON), max=1.0)
        scale_gradients(self._updated, factor)
        return norm


def scale_gradients(tensors: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply the gradients of `tensors` by `factor`, a scalar tensor [] on their device. Tensors
    without a gradient are skipped.
    """
    gradients = [each.grad for each in tensors if each.grad is not None]
    for dtype in {each.dtype for each in gradients}:
        foreach_mul_([each for each in gradients if each.dtype is dtype], factor.to(dtype))
