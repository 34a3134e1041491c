"""ONNX files from torch's two exporters, and the networks that ship with onnx, kept on disk between runs."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
    """`torchscript` (dynamo=False), `dynamo` (dynamo=True), or `onnx` for a file that ships with onnx."""
    dynamic: bool
    loss: bool
    """A loss in the graph; for a network that ships with onnx, random weights and the YAML's loss behind its scores."""
    batch: int = BATCH
    """Samples of the traced batch."""

    @property
    def name(self) -> str:
        """A name for files and for `--only`."""
        shapes = "dynamic" if self.dynamic else "static"
        return "-".join((self.model, self.exporter, shapes, "loss" if self.loss else "forward"))


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
    """The export's file, made where it is not in the cache yet; `scratch` takes those that are too large to keep."""
    if export.exporter == "onnx":
        return drawn(export.model, scratch) if export.loss else shipped(export.model)
    sources = (Path(__file__), Path(__file__).with_name("architectures.py"))
    path = cache(*sources) / f"{export.name}-{export.batch}.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as draft:
            made = Path(draft) / path.name
            _export(export, made)
            made.rename(path)
    return path


def cache(*sources: Path) -> Path:
    """A folder that a change of a version, or of the `sources` that make the exports, makes anew."""
    import onnx
    import onnxscript
    import torch
    import transformers

    made_by = hashlib.sha256()
    for source in sources:
        made_by.update(source.read_bytes())
    versions = (torch.__version__, transformers.__version__, onnx.__version__, onnxscript.__version__)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "autopipe-tests" / "-".join((*versions, made_by.hexdigest()[:12]))


def traced(export: Export) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The module that is exported, and the inputs that it is traced with, in its arguments' order."""
    import torch

    from tests.exports.architectures import ARCHITECTURES, Called, LanguageModel, Recommender, perturb

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
    import torch

    from tests.exports.architectures import ARCHITECTURES, Called

    model, inputs = traced(export)
    names = tuple(inputs)
    sequences = ARCHITECTURES[export.model].sequences
    outputs = ["loss", "logits"] if export.loss else ["logits"]
    axes = {name: {0: "batch", 1: "sequence"} if name in sequences else {0: "batch"} for name in names}
    shapes = _dynamic(axes)
    common = {"input_names": list(names), "output_names": outputs, "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if export.exporter == "torchscript":
            torch.onnx.export(
                model,
                tuple(inputs.values()),
                str(path),
                dynamo=False,
                dynamic_axes={**axes, "logits": {0: "batch"}} if export.dynamic else None,
                **common,
            )
        else:
            torch.onnx.export(
                model,
                tuple(inputs.values()),
                str(path),
                dynamo=True,
                external_data=False,
                dynamic_shapes=((shapes,) if isinstance(model, Called) else shapes) if export.dynamic else None,
                **common,
            )


def _dynamic(axes: dict[str, dict[int, str]]) -> tuple[dict[int, object], ...]:
    from torch.export import Dim

    return tuple(dict.fromkeys(each, Dim.AUTO) for each in axes.values())
