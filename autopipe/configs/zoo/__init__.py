"""The models of the papers as ONNX graphs of any size, with or without weights.

A model is a frozen dataclass of its sizes in a module of its own, imported when it is asked for:

    model = configure("gpt", {"size": "11b", "weights": "none"})
    build(model).save(Path("gpt.onnx"))
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from autopipe.configs.convert import nearest
from autopipe.configs.source import quote
from autopipe.configs.zoo import settings as zoo_settings
from autopipe.configs.zoo.model import Setting, ZooModel
from autopipe.ir.errors import ConfigurationError

if TYPE_CHECKING:
    from autopipe.configs.zoo.weights import BuiltModel

MODELS: Final[Mapping[str, tuple[str, str]]] = {
    "alexnet": ("alexnet:AlexNet", "convolutions and three large linear layers (PaSE)"),
    "bert": ("bert:Bert", "masked-language-model encoder; DNABert by its preset (TePDist)"),
    "candle-uno": ("candle_uno:CandleUno", "regression from several branches of linear layers (GraphPipe)"),
    "dlrm": ("dlrm:Dlrm", "recommendation: dense branches and embedding bags (GraphPipe)"),
    "flava": ("flava:Flava", "text and image encoders joined by a cross encoder (Tessel)"),
    "gpt": ("gpt:Gpt", "decoder-only language model with a tied head (Tessel, TePDist)"),
    "inceptionv3": ("inceptionv3:InceptionV3", "convolutional branches, no auxiliary head (PaSE)"),
    "llama": ("llama:Llama", "RMS norms, rotary positions, SwiGLU, grouped-query attention"),
    "mmt": ("mmt:MultiModalTransformer", "several transformer branches, concatenated (GraphPipe)"),
    "moe": ("moe:MixtureOfExperts", "language model whose feed-forward layers are gated experts (TePDist)"),
    "mt5": ("mt5:Mt5", "encoder-decoder with one shared embedding (Tessel)"),
    "rnnlm": ("rnnlm:RnnLm", "LSTM language model (PaSE)"),
    "transformer": ("transformer:Transformer", "the encoder-decoder translation model of 2017 (PaSE)"),
    "two-branch": ("two_branch:TwoBranch", "two branches of attention and linear layers (GraphPipe's case study)"),
    "unet": ("unet:UNet", "segmentation with skip connections (TePDist)"),
    "vgg19": ("vgg19:Vgg19", "convolutions and a classifier of any number of classes (TePDist)"),
    "wide-resnet": ("wide_resnet:WideResNet", "residual network of wide bottlenecks (TePDist)"),
}
"""A model's name -> (`module:class` in this package, what the list of models says of it)."""


def model_class(name: str) -> type[ZooModel]:
    """The class of model `name`; raises ConfigurationError with the nearest match where there is none."""
    if name not in MODELS:
        raise ConfigurationError(f"no model called {quote(name)} in the zoo", hint=nearest(name, MODELS))
    module, attribute = MODELS[name][0].split(":")
    kind: type[ZooModel] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    assert issubclass(kind, ZooModel), f"{attribute} is no model of the zoo"
    return kind


Settings = Mapping[str, Setting]
"""Keys of a model's fields, or `size`, -> values, which may be text as typed by a user."""


def configure(name: str, settings: Settings | None = None) -> ZooModel:
    """Model `name` with `settings`; `size` names a preset, which the other keys then change.

    Raises ConfigurationError for an unknown name, key or size and for values that do not fit.
    """
    return zoo_settings.configure(model_class(name), settings or {})


def build(model: ZooModel) -> BuiltModel:
    """The graph of `model`, with shapes for all values; its weights are drawn only when it is saved."""
    from autopipe.configs.zoo.builder import GraphBuilder
    from autopipe.configs.zoo.weights import BuiltModel

    target = f"{type(model).__module__.rpartition('.')[2]}:{type(model).__name__}"
    name = next(name for name, (place, _) in MODELS.items() if place == target)
    graph = GraphBuilder(name, "batch" if model.batch is None else model.batch, model.opset)
    model.build(graph)
    settings = json.dumps({"name": name, **dataclasses.asdict(model)})
    skeleton, parameters = graph.finish({"autopipe.zoo": settings})
    return BuiltModel(skeleton, parameters, model.seed if model.weights == "random" else None)
