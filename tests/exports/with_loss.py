"""Modules that give a loss, and what they are traced with, to compare what is trained here with
what torch trains.

The same module without its loss is what exporters write for inference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]

BATCH = 2
SEQUENCE = 8
VOCABULARY = 50
CLASSES = 5


@dataclass(frozen=True, slots=True)
class WithLoss:
    """A module whose only output is a loss, and one batch for it."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensors]
    """By name, in the order of the module's arguments."""
    training: bool = False
    """Traced in training mode: the older exporter folds batch normalization into convolutions
    otherwise.
    """
    output: str = "logits"
    """What is kept of the result of a model of `transformers` that is asked for no loss."""


class Called(nn.Module):
    """A model of `transformers` called with tensors by name, of whose result one field is kept."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], output: str) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.output = output

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = getattr(
            self.model(**dict(zip(self.names, tensors, strict=True)), return_dict=True), self.output
        )
        return result


class Loss(nn.Module):
    """A model of `transformers` called with tensors by name, of whose result the loss is kept."""

    def __init__(
        self, model: nn.Module, names: tuple[str, ...], of: Callable[[Any], torch.Tensor] | None
    ) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.of = of

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        result = self.model(**dict(zip(self.names, tensors, strict=True)), return_dict=True)
        loss: torch.Tensor = result.loss if self.of is None else self.of(result)
        return loss


def hugging_face(
    name: str,
    head: str,
    inputs: Callable[[], Tensors],
    *,
    of: Callable[[Any], torch.Tensor] | None = None,
    training: bool = False,
    configuration: str = "",
    output: str = "logits",
    experts: str = "batched_mm",
    fixed: Mapping[str, Any] | None = None,
    **settings: Any,
) -> WithLoss:
    """The model `name + head` of `transformers`; `of` makes a loss of its result.

    It is configured by `configuration`, `name + "Config"` where that is empty. `experts` is how a
    mixture of experts is computed, `fixed` are arguments that are no inputs of the file.
    """

    def build() -> nn.Module:
        import transformers

        configured = getattr(transformers, configuration or f"{name}Config")(**settings)
        chosen = {"experts_implementation": experts} if "num_experts_per_tok" in settings else {}
        model = getattr(transformers, f"{name}{head}")._from_config(
            configured, attn_implementation="eager", **chosen
        )
        if fixed:
            model.forward = partial(model.forward, **fixed)
        return Loss(model, tuple(inputs()), of)

    return WithLoss(build, inputs, training, output)


def tokens(below: int = VOCABULARY, length: int = SEQUENCE) -> torch.Tensor:
    """Random tokens of a batch."""
    return torch.randint(0, below, (BATCH, length))


def without_loss(model: WithLoss) -> tuple[nn.Module, Tensors]:
    """The module inside, with random weights, and its inputs but for what only the loss reads."""
    module = model.build()
    inputs = model.inputs()
    if isinstance(module, Loss):
        inputs.pop("labels", None)
        return Called(module.model, tuple(inputs), model.output), inputs
    network = getattr(module, "network", None)
    if isinstance(network, nn.Module):
        inputs.popitem()
        return network, inputs
    return module, inputs
