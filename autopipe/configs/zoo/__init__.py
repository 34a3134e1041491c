"""The models of the papers as ONNX graphs of any size, with or without weights.

A model is a frozen dataclass of its sizes in a module of its own, imported when it is asked for:

    model = configure("gpt", {"size": "11b", "weights": "none"})
    build(model).save(Path("gpt.onnx"))
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from autopipe.configs.zoo import settings as zoo_settings
from autopipe.configs.zoo.model import Setting, ZooModel
from autopipe.ir.errors import ConfigurationError

if TYPE_CHECKING:
    from autopipe.configs.zoo.weights import BuiltModel

MODELS: Final[Mapping[str, tuple[str, str]]] = {
    "gpt": ("gpt:Gpt", "decoder-only language model with a tied head (Tessel, TePDist)"),
    "llama": ("llama:Llama", "RMS norms, rotary positions, SwiGLU, grouped-query attention"),
}
"""A model's name -> (`module:class` in this package, what the list of models says of it)."""


def model_class(name: str) -> type[ZooModel]:
    """The class of model `name`; raises ConfigurationError with the nearest match where there is none."""
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(MODELS)}"
        raise ConfigurationError(f"no model called '{name}' in the zoo", hint=hint)
    module, attribute = MODELS[name][0].split(":")
    kind: type[ZooModel] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    assert issubclass(kind, ZooModel), f"{attribute} is no model of the zoo"
    return kind


def configure(name: str, settings: Mapping[str, Setting] | None = None) -> ZooModel:
    """Model `name` with `settings`, whose values may be text as typed by a user; `size` names a preset.

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
