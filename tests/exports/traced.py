"""Modules with a loss as torch's two exporters write them, with numbers as if trained or as they
begin.
"""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.exports import architectures, other_models, text_models, with_loss
from tests.exports.architectures import perturb
from tests.exports.export import cache
from tests.exports.with_loss import Tensors

MODELS = {**text_models.TEXT, **other_models.OTHER}
"""Every model that is compared, by name."""
EXPORTERS = ("dynamo", "torchscript")
"""torch.onnx.export with dynamo=True and with dynamo=False."""
UNOPTIMIZED = "dynamo-unoptimized"
"""dynamo=True with optimize=False, which keeps parameters apart that the exporter else multiplies
with one another.
"""


@dataclass(frozen=True, slots=True, order=True)
class Traced:
    """A model as one exporter writes it, with numbers as if trained or as it begins."""

    model: str
    exporter: str
    fresh: bool = False

    @property
    def name(self) -> str:
        """A name for files and tests."""
        return "-".join((self.model, self.exporter, "fresh" if self.fresh else "trained"))


def all_traced(fresh: bool) -> tuple[Traced, ...]:
    """Every model through every exporter."""
    return tuple(Traced(model, exporter, fresh) for model in MODELS for exporter in EXPORTERS)


def module_of(traced: Traced) -> tuple[nn.Module, Tensors]:
    """The module and its inputs, the same at every call."""
    model = MODELS[traced.model]
    torch.manual_seed(0)
    module = model.build()
    if not traced.fresh:
        perturb(module)
    module.train(model.training)
    return module, model.inputs()


def file_of(traced: Traced) -> Path:
    """The exported file, made where it is not in the cache yet. Raises what the exporter raises."""
    models = text_models if traced.model in text_models.TEXT else other_models
    made_by = [str(module.__file__) for module in (architectures, with_loss, models)]
    path = cache(Path(__file__), *map(Path, made_by)) / f"{traced.name}.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as draft:
            made = Path(draft) / path.name
            _export(traced, made)
            made.rename(path)
    return path


def _export(traced: Traced, path: Path) -> None:
    module, inputs = module_of(traced)
    training = MODELS[traced.model].training
    mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
    dynamo = traced.exporter != "torchscript"
    further: dict[str, Any] = {"external_data": False} if dynamo else {"training": mode}
    if traced.exporter == UNOPTIMIZED:
        further["optimize"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(inputs.values()),
            str(path),
            dynamo=dynamo,
            input_names=list(inputs),
            output_names=["loss"],
            verbose=False,
            **further,
        )
