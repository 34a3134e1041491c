"""ONNX files from torch's two exporters, and the networks that ship with onnx, kept on disk between
runs.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.exports.light import LIGHT, drawn, shipped

if TYPE_CHECKING:
    import torch
    from torch import nn

BATCH = 2
"""Samples of the traced batch, which a static export fixes."""


@dataclass(frozen=True, slots=True, order=True)
class Export:
    """One model as one exporter writes it."""

    model: str
    exporter: str
    """`torchscript` (dynamo=False), `dynamo` (dynamo=True), either with `@` and an opset that is
    not its default, `onnx` for a file that ships with onnx, or `hand`.
    """
    dynamic: bool
    loss: bool
    """A loss in the graph; for a network that ships with onnx, random weights and the YAML's loss
    behind its scores.
    """
    batch: int = BATCH
    """Samples of the traced batch."""
    dtype: str = "fp32"
    """Type of the weights: `fp32`, `fp16` or `bf16`."""

    @property
    def name(self) -> str:
        """A name for files and for `--only`."""
        shapes = "dynamic" if self.dynamic else "static"
        dtype = () if self.dtype == "fp32" else (self.dtype,)
        return "-".join(
            (self.model, self.exporter, shapes, "loss" if self.loss else "forward", *dtype)
        )


def all_exports() -> tuple[Export, ...]:
    """Every model, exporter, kind of shapes and kind of output."""
    from tests.exports.architectures import ARCHITECTURES

    light = [Export(name, "onnx", False, loss, batch=1) for name in LIGHT for loss in (False, True)]
    torch = [
        Export(model, exporter, dynamic, loss)
        for model in ARCHITECTURES
        for exporter in ("torchscript", "dynamo")
        for dynamic in (False, True)
        for loss in (False, True)
    ]
    return (*light, *torch)


def onnx_file(export: Export, scratch: Path) -> Path:
    """The export's file, made where it is not in the cache yet; `scratch` takes those that are too
    large to keep.
    """
    if export.exporter == "onnx":
        return drawn(export.model, scratch) if export.loss else shipped(export.model)
    from tests.exports.architectures import ARCHITECTURES

    if export.model in ARCHITECTURES:
        sources = (Path(__file__).with_name("architectures.py"),)
        write = _export
    else:
        from tests.exports.recent import sources_of, write

        sources = sources_of(export)
    path = cache(Path(__file__), *sources) / f"{export.name}-{export.batch}.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as draft:
            made = Path(draft) / path.name
            write(export, made)
            made.rename(path)
    return path


def cache(*sources: Path) -> Path:
    """A folder that a change of a version, or of the `sources` that make the exports, makes
    anew.
    """
    import onnx
    import onnxscript
    import torch
    import transformers

    made_by = hashlib.sha256()
    for source in sources:
        made_by.update(source.read_bytes())
    versions = (
        torch.__version__,
        transformers.__version__,
        onnx.__version__,
        onnxscript.__version__,
    )
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "autopipe-tests" / "-".join((*versions, made_by.hexdigest()[:12]))


def traced(export: Export) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The module that is exported, and the inputs that it is traced with, in its arguments'
    order.
    """
    import torch

    from tests.exports.architectures import (
        ARCHITECTURES,
        Called,
        LanguageModel,
        Recommender,
        perturb,
    )

    architecture = ARCHITECTURES[export.model]
    torch.manual_seed(0)
    model = architecture.build().eval()
    perturb(model)
    inputs = architecture.inputs(export.batch)
    if not export.loss:
        del inputs["labels"]
    elif export.model == "t5":
        del inputs["decoder_input_ids"]  # made from the labels
    if not isinstance(model, LanguageModel | Recommender):
        model = Called(model, tuple(inputs)).eval()
    return model, inputs


def _export(export: Export, path: Path) -> None:
    from tests.exports.architectures import ARCHITECTURES

    model, inputs = traced(export)
    sequences = ARCHITECTURES[export.model].sequences
    outputs = ("loss", "logits") if export.loss else ("logits",)
    write_torch(
        model,
        inputs,
        outputs,
        path,
        export,
        {name: {1: "sequence"} for name in sequences if name in inputs},
    )


def write_torch(
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    outputs: tuple[str, ...],
    path: Path,
    export: Export,
    dynamic: dict[str, dict[int, str]],
) -> None:
    """Export with one of torch's exporters; where shapes are dynamic, axis 0 is the batch of every
    input, and `dynamic` names further axes.
    """
    import torch

    axes = {name: {0: "batch", **dynamic.get(name, {})} for name in inputs}
    exporter, _, opset = export.exporter.partition("@")
    common: dict[str, Any] = {
        "input_names": list(inputs),
        "output_names": list(outputs),
        "verbose": False,
    }
    if opset:
        common["opset_version"] = int(opset)
    if exporter == "torchscript":
        training = (
            torch.onnx.TrainingMode.TRAINING if model.training else torch.onnx.TrainingMode.EVAL
        )
        symbolic = {**axes, **({outputs[-1]: {0: "batch"}} if outputs[-1] != "loss" else {})}
        common |= {"training": training, "dynamic_axes": symbolic if export.dynamic else None}
    else:
        shapes = _dynamic(axes)
        kinds = {each.kind for each in signature(model.forward).parameters.values()}
        variadic = Parameter.VAR_POSITIONAL in kinds
        common |= {
            "external_data": False,
            "dynamic_shapes": ((shapes,) if variadic else shapes) if export.dynamic else None,
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, tuple(inputs.values()), str(path), dynamo=exporter == "dynamo", **common
        )


def _dynamic(axes: dict[str, dict[int, str]]) -> tuple[dict[int, object], ...]:
    from torch.export import Dim

    return tuple(dict.fromkeys(each, Dim.AUTO) for each in axes.values())
