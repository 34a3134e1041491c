"""The update of parameters: optimizers (torch's, Lion, Muon beside AdamW), groups of parameters,
rates, clipping by the norm of all gradients, averaged weights.
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

from autopipe.backends.torch.checkpoint import AVERAGE
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
from autopipe.ir.problem import GROUPS, matches


def groups_of_parameters(manifest: Manifest) -> dict[int, int]:
    """By parameter the number of its group in `optimizer.groups`, from 1 on; those of none are left
    out.
    """
    patterns = [each["match"] for each in manifest.optimizer.get("groups", ())]
    found = {}
    for index, parameter in enumerate(manifest.parameters):
        own = (
            number
            for number, each in enumerate(patterns, 1)
            if matches(each, parameter.value.name, GROUPS)
        )
        if number := next(own, 0):
            found[index] = number
    return found


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that are updated alike: `lr_factor` times the rate of the step, and by Muon if
    `matrices`.
    """

    tensors: tuple[torch.Tensor, ...]
    weight_decay: float
    lr_factor: float = 1.0
    matrices: bool = False

    def form(self, lr: float) -> dict[str, Any]:
        """As torch's optimizers take it."""
        return {
            "params": list(self.tensors),
            "lr": lr * self.lr_factor,
            "lr_factor": self.lr_factor,
            "weight_decay": self.weight_decay,
        }


def tensor_groups(manifest: Manifest, reduction: GradientReduction) -> list[TensorGroup]:
    """All that the rank's optimizer updates."""
    settings = manifest.optimizer
    numbers = groups_of_parameters(manifest)
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


def _is_fused(tensor: torch.Tensor) -> bool:
    """True if one kernel of torch updates many tensors like `tensor`."""
    return tensor.is_cuda


class EagerOptimizer(torch.optim.Optimizer):
    """An optimizer that does not import torch._dynamo. Torch's own methods import it, which takes
    longer than all else before the first step, to break graphs of a compiled update; autopipe does
    not compile updates.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


@cache
def eager(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return a subclass of `kind`, with its name, that is an `EagerOptimizer` and has the eager
    form of its update.
    """
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (EagerOptimizer, kind), {"step": step, "__module__": __name__})


def make_optimizer(
    settings: dict[str, Any], groups: Sequence[TensorGroup]
) -> torch.optim.Optimizer | None:
    """The optimizer of a manifest over the rank's trainable blocks; None where the rank has
    none.
    """
    if not groups:
        return None
    forms = [each.form(settings["lr"]) for each in groups]
    # One kernel updates many tensors; on CPUs torch chooses.
    fused = True if all(_is_fused(tensor) for each in groups for tensor in each.tensors) else None
    betas = tuple(settings.get("betas", ()))
    momentum = settings.get("momentum", 0.0)
    nesterov = settings.get("nesterov", False)
    match settings["name"]:
        case "sgd":
            return eager(torch.optim.SGD)(forms, momentum=momentum, nesterov=nesterov, fused=fused)
        case "adam":
            return eager(torch.optim.Adam)(forms, betas=betas, eps=settings["eps"], fused=fused)
        case "adamw":
            return eager(torch.optim.AdamW)(forms, betas=betas, eps=settings["eps"], fused=fused)
        case "lion":
            return Lion(forms, betas)
        case "muon":
            matrices = [form for form, each in zip(forms, groups, strict=True) if each.matrices]
            others = [form for form, each in zip(forms, groups, strict=True) if not each.matrices]
            parts: list[torch.optim.Optimizer] = []
            if matrices:
                # Updates as large as AdamW's, whichever way round a matrix lies, so that one rate
                # does for both.
                how = {"nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
                parts.append(eager(torch.optim.Muon)(matrices, momentum=momentum, **how))
            if others:
                parts.append(
                    eager(torch.optim.AdamW)(others, betas=betas, eps=settings["eps"], fused=fused)
                )
            return parts[0] if len(parts) == 1 else JointOptimizer(parts)
    raise ConfigurationError(f"there is no optimizer {settings['name']!r}")


class Lion(EagerOptimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2:
    steps by the sign of an average, with decoupled weight decay.
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
    """Several optimizers of different tensors as one, whose groups and state are all of theirs."""

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


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer make what it keeps, as its first step would: by a step of gradients that
    are zero.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step: of each group `rate` times its factor.

    Fused kernels get it in float32, as a captured update reads it from a tensor: captured and eager
    steps are equal.
    """
    for group in optimizer.param_groups:
        own = rate * group["lr_factor"]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(own)
        elif group.get("fused"):
            group["lr"] = float(np.float32(own))
        else:
            group["lr"] = own


def average_weights(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Take the weights into their exponential moving average, as torch's `AveragedModel` does with
    `get_ema_multi_avg_fn`: the first ones are its beginning."""
    averages = []
    weights = []
    for tensor in (each for group in optimizer.param_groups for each in group["params"]):
        state = optimizer.state[tensor]
        if AVERAGE in state:
            averages.append(state[AVERAGE])
            weights.append(tensor.detach())
        elif state or isinstance(
            optimizer, torch.optim.SGD
        ):  # Others take an empty state for one to be made.
            state[AVERAGE] = tensor.detach().clone()
    if averages:
        foreach_lerp_(averages, weights, 1.0 - decay)


_EPS = 1e-6  # Of torch's clip_grad_norm_.


class GradientClipping:
    """Scales a step's gradients so that their norm over all ranks is `max_norm` at most, as torch's
    `clip_grad_norm_` does on one device. Nothing waits for the device.
    """

    def __init__(
        self,
        max_norm: float,
        transport: Transport,
        counted: Iterable[torch.Tensor],
        updated: Sequence[torch.Tensor],
    ) -> None:
        """`updated` are all tensors that this rank's optimizer updates, `counted` those of them
        that no other rank counts.
        """
        self._max_norm = max_norm
        self._transport = transport
        self._counted = tuple(counted)
        self._updated = tuple(updated)

    def clip(self) -> torch.Tensor:
        """The norm before, on the device, []. All ranks together."""
        squares = torch.zeros((), dtype=torch.float64, device=self._transport.device)
        if counted := [each.grad for each in self._counted if each.grad is not None]:
            # One conversion per element type, not one per tensor: the host launches each.
            by_dtype = defaultdict[torch.dtype, list[torch.Tensor]](list)
            for norm in foreach_norm(counted):
                by_dtype[norm.dtype].append(norm)
            squares = (
                torch.cat([torch.stack(norms).double() for norms in by_dtype.values()])
                .square()
                .sum()
            )
        norm = self._transport.total(squares).sqrt()
        factor = torch.clamp(self._max_norm / (norm + _EPS), max=1.0)
        scale_gradients(self._updated, factor)
        return norm


def scale_gradients(tensors: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply the gradients of tensors by a number that is on their device, []."""
    gradients = [each.grad for each in tensors if each.grad is not None]
    for dtype in {each.dtype for each in gradients}:
        foreach_mul_([each for each in gradients if each.dtype is dtype], factor.to(dtype))
