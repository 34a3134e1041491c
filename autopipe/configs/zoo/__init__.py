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

from autopipe.configs.zoo import settings as zoo_settings
from autopipe.configs.zoo.settings import Setting, ZooModel
from autopipe.ir.errors import ConfigurationError, nearest, quote

if TYPE_CHECKING:
    from autopipe.configs.zoo.builder import BuiltModel

MODELS: Final[Mapping[str, tuple[str, str]]] = {
    "alexnet": ("vision:AlexNet", "convolutions and three large linear layers (PaSE)"),
    "bert": ("transformers:Bert", "masked-language-model encoder; DNABert by its preset (TePDist)"),
    "candle-uno": ("multimodal:CandleUno", "regression from several branches of linear layers (GraphPipe)"),
    "dlrm": ("recommender:Dlrm", "recommendation: dense branches and embedding bags (GraphPipe)"),
    "flava": ("multimodal:Flava", "text and image encoders joined by a cross encoder (Tessel)"),
    "gpt": ("transformers:Gpt", "decoder-only language model with a tied head (Tessel, TePDist)"),
    "inceptionv3": ("vision:InceptionV3", "convolutional branches, no auxiliary head (PaSE)"),
    "llama": ("transformers:Llama", "RMS norms, rotary positions, SwiGLU, grouped-query attention"),
    "mmt": ("multimodal:MultiModalTransformer", "several transformer branches, concatenated (GraphPipe)"),
    "moe": ("transformers:MixtureOfExperts", "language model whose feed-forward layers are gated experts (TePDist)"),
    "mt5": ("encoder_decoder:Mt5", "encoder-decoder with one shared embedding (Tessel)"),
    "rnnlm": ("recommender:RnnLm", "LSTM language model (PaSE)"),
    "transformer": ("encoder_decoder:Transformer", "the encoder-decoder translation model of 2017 (PaSE)"),
    "two-branch": ("multimodal:TwoBranch", "two branches of attention and linear layers (GraphPipe's case study)"),
    "unet": ("vision:UNet", "segmentation with skip connections (TePDist)"),
    "vgg19": ("vision:Vgg19", "convolutions and a classifier of any number of classes (TePDist)"),
    "wide-resnet": ("vision:WideResNet", "residual network of wide bottlenecks (TePDist)"),
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
    from autopipe.configs.zoo.builder import BuiltModel, GraphBuilder

    target = f"{type(model).__module__.rpartition('.')[2]}:{type(model).__name__}"
    name = next(name for name, (place, _) in MODELS.items() if place == target)
    graph = GraphBuilder(name, "batch" if model.batch is None else model.batch, model.opset)
    model.build(graph)
    settings = json.dumps({"name": name, **dataclasses.asdict(model)})
    skeleton, parameters = graph.finish({"autopipe.zoo": settings})
    return BuiltModel(skeleton, parameters, model.seed if model.weights == "random" else None)
