"""From a PyTorch module to an ONNX file with its loss, by torch's own exporter."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.output_kinds import ONNX, OutputFile

_BATCH = "batch"


class _WithLoss(nn.Module):
    """The module, its loss in place of its outputs where there is one."""

    def __init__(self, module: nn.Module, loss: Callable[..., torch.Tensor] | None, keywords: Sequence[str]) -> None:
        super().__init__()
        self.module, self._loss, self._keywords = module, loss, tuple(keywords)

    def forward(self, *tensors: torch.Tensor) -> Any:
        labels, tensors = (tensors[-1], tensors[:-1]) if self._loss is not None else (None, tensors)
        positional = tensors[: len(tensors) - len(self._keywords)]
        found = self.module(*positional, **dict(zip(self._keywords, tensors[len(positional) :], strict=True)))
        if self._loss is not None:
            return self._loss(getattr(found, "logits", found), labels)
        # A model of `transformers` gives its loss where it is called with labels.
        return found if getattr(found, "loss", None) is None else found.loss


def export(
    module: nn.Module,
    example: torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
    path: str | Path = "model.onnx",
    *,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
    labels: torch.Tensor | None = None,
    force: bool = False,
) -> Path:
    """Write a module as an ONNX file whose batch axis, the first of every input, is left open, and return its path.

    `example` holds the inputs, by name where they are keyword arguments. With `loss`, such as
    `torch.nn.functional.cross_entropy`, and an example of `labels` the graph ends in that loss; a module may also
    return its loss itself, as those of `transformers` do with labels among their inputs. Parameters keep the module's
    names. The module is exported in the mode in which it is, `train()` or `eval()`. A file at `path` that is no ONNX
    model is replaced only with `force`. Raises ConfigurationError where
    torch's exporter is not installed or cannot export the module.
    """
    path = Path(path)
    OutputFile(path, ONNX, force=force).check()
    if (loss is None) != (labels is None):
        raise ConfigurationError("loss and labels go together", "labels is an example of what loss compares with")
    named = dict(example) if isinstance(example, Mapping) else {}
    positional = [example] if isinstance(example, torch.Tensor) else [] if named else list(example)
    names = [*(f"input_{index}" if len(positional) > 1 else "input" for index in range(len(positional))), *named]
    tensors = [*positional, *named.values()]
    if labels is not None:
        names, tensors = [*names, "labels"], [*tensors, labels]
    batches = {len(each) for each in tensors if each.dim()}
    if len(batches) != 1:
        raise ConfigurationError(f"examples have {sorted(batches)} samples", "give each the same number of rows")
    if batches == {1}:  # torch takes an extent of 1 for a constant.
        tensors = [torch.cat([each, each]) if each.dim() else each for each in tensors]
    batch = torch.export.Dim(_BATCH)
    wrapped = _WithLoss(module, loss, list(named))
    wrapped.train(module.training)
    try:
        with _without_remarks():
            program = torch.onnx.export(
                wrapped,
                tuple(tensors),
                dynamo=True,
                input_names=names,
                output_names=["loss"] if loss is not None or "labels" in named else None,
                dynamic_shapes=(tuple({0: batch} if each.dim() else None for each in tensors),),
                optimize=False,  # It would make one parameter of several that are equal, as a new module's are.
                verbose=False,
            )
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"torch's exporter needs {error.name}", f"pip install {error.name}") from error
    except torch.onnx.errors.OnnxExporterError as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigurationError(f"torch cannot export the module: {first}", "torch.onnx.export says more") from error
    assert program is not None
    for value in list(program.model.graph.initializers.values()):
        if value.name is not None:
            value.name = value.name.removeprefix("module.")
    program.save(path)
    return path


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Leave out what the exporter remarks about its own parts, and that the module is in training mode."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
