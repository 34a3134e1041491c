"""Optimizers by name, torch's own."""

from __future__ import annotations

from typing import Any

import torch

from autopipe.ir.errors import ConfigurationError


def make_optimizer(settings: dict[str, Any], parameters: list[torch.Tensor]) -> torch.optim.Optimizer | None:
    """The optimizer of a manifest over the rank's trainable blocks; None where the rank has none."""
    if not parameters:
        return None
    if settings["name"] == "sgd":
        return torch.optim.SGD(
            parameters, lr=settings["lr"], momentum=settings["momentum"], weight_decay=settings["weight_decay"]
        )
    if settings["name"] == "adamw":
        return torch.optim.AdamW(
            parameters,
            lr=settings["lr"],
            betas=tuple(settings["betas"]),
            eps=settings["eps"],
            weight_decay=settings["weight_decay"],
        )
    raise ConfigurationError(f"there is no optimizer {settings['name']!r}", hint="sgd or adamw")


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer make what it keeps, as its first step would: by a step of gradients that are zero."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
