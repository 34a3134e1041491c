"""The models of the papers as ONNX graphs of any size, with or without weights. This package may
import `autopipe.ir` and the YAML schema.

A model is a frozen dataclass whose fields are its sizes. Its module is imported when the model is
requested:

    model = configure("gpt", {"size": "11b", "weights": "none"})
    build(model).save(Path("gpt.onnx"))
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from autopipe.configs.schema import convert, unknown_key
from autopipe.configs.yaml_source import Entry, Place, read_setting
from autopipe.ir.codec import AtLeast, AtMost, schema_keys
from autopipe.ir.errors import ConfigurationError, quote, similar_name_hint

if TYPE_CHECKING:
    from autopipe.configs.zoo.builder import BuiltModel, GraphBuilder

MODELS: Final[Mapping[str, tuple[str, str]]] = {
    "alexnet": ("vision:AlexNet", "convolutions and three large linear layers (PaSE)"),
    "bert": ("transformers:Bert", "masked-language-model encoder; DNABert by its preset (TePDist)"),
    "candle-uno": (
        "branches:CandleUno",
        "regression from several branches of linear layers (GraphPipe)",
    ),
    "dlrm": ("branches:Dlrm", "recommendation: dense branches and embedding bags (GraphPipe)"),
    "flava": ("branches:Flava", "text and image encoders joined by a cross encoder (Tessel)"),
    "gpt": ("transformers:Gpt", "decoder-only language model with a tied head (Tessel, TePDist)"),
    "inceptionv3": ("vision:InceptionV3", "convolutional branches, no auxiliary head (PaSE)"),
    "llama": ("transformers:Llama", "RMS norms, rotary positions, SwiGLU, grouped-query attention"),
    "mmt": (
        "branches:MultiModalTransformer",
        "several transformer branches, concatenated (GraphPipe)",
    ),
    "moe": (
        "transformers:MixtureOfExperts",
        "language model whose feed-forward layers are gated experts (TePDist)",
    ),
    "mt5": ("sequences:Mt5", "encoder-decoder with one shared embedding (Tessel)"),
    "rnnlm": ("sequences:RnnLm", "LSTM language model (PaSE)"),
    "transformer": (
        "sequences:Transformer",
        "the encoder-decoder translation model of 2017 (PaSE)",
    ),
    "two-branch": (
        "branches:TwoBranch",
        "two branches of attention and linear layers (GraphPipe's case study)",
    ),
    "unet": ("vision:UNet", "segmentation with skip connections (TePDist)"),
    "vgg19": ("vision:Vgg19", "convolutions and a classifier of any number of classes (TePDist)"),
    "wide-resnet": ("vision:WideResNet", "residual network of wide bottlenecks (TePDist)"),
}
"""The names of the models, each with (`module:class` in this package, description for the list of
models).
"""

Count = Annotated[int, AtLeast(1), AtMost(2**28)]
"""A positive size. The product of two sizes still fits in 64 bits as a number of bytes."""
Setting = int | float | bool | str | tuple[int, ...] | None
"""The value of a field of a model."""
Settings = Mapping[str, Setting]
"""Values of a model's fields by name, and the name of a preset under `size`. Values may be text
that a user typed.
"""


def preset(names: str, *values: Setting) -> Settings:
    """Return settings that assign `values` to the fields in `names`, a space-separated list."""
    return dict(zip(names.split(), values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel(ABC):
    """A model of the zoo. Its fields are its sizes, which `zoo build --set KEY=VALUE` sets."""

    presets: ClassVar[Mapping[str, Settings]] = {}
    """A published size's name -> the fields it sets, for `--set size=NAME`."""
    multiples: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of fields of which the first must be a multiple of the second."""
    limits: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of fields of which the first must not exceed the second."""
    batch: Count | None = None
    """Extent of axis 0 of every data input; null leaves it a dimension called `batch`."""
    loss: bool = False
    """True if labels are an input and the scalar `loss` is the output."""
    weights: Literal["random", "none"] = "random"
    """`random` initialises the parameters; `none` writes the graph without their data."""
    seed: Annotated[int, AtLeast(0), AtMost(2**63 - 1)] = 0
    """Seed of the initial values."""
    opset: Annotated[int, AtLeast(20), AtMost(23)] = 20
    """Version of the operator set."""

    @abstractmethod
    def build(self, graph: GraphBuilder) -> None:
        """Add the model's inputs, operators and outputs to `graph`."""


def model_class(name: str) -> type[ZooModel]:
    """Return the class of the model `name`. Raise ConfigurationError with the most similar name if
    there is no such model.
    """
    if name not in MODELS:
        raise ConfigurationError(
            f"model {quote(name)} is not in the zoo", hint=similar_name_hint(name, MODELS)
        )
    module, attribute = MODELS[name][0].split(":")
    kind: type[ZooModel] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return kind


def parse_words(words: Iterable[str]) -> dict[str, str]:
    """Return {key: value} of words `KEY=VALUE`; a later word overrides an earlier one."""
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigurationError(f"--set is {quote(word)}, expected KEY=VALUE")
        settings[key] = value
    return settings


def configure(name: str, settings: Settings | None = None) -> ZooModel:
    """Return the model `name` with `settings`. The key `size` names a preset, which the other keys
    override. Text values are read as YAML. Raise ConfigurationError for an unknown name, key or
    preset (with the most similar one), a value of a wrong type, and inconsistent sizes.
    """
    kind = model_class(name)
    given = dict(settings or {})
    chosen: Settings = {}
    if "size" in given:
        size = str(given.pop("size"))
        if size not in kind.presets:
            hint = similar_name_hint(size, kind.presets)
            raise ConfigurationError(
                f"size {quote(size)} of the model is unknown", hint=hint, where="--set size"
            )
        chosen = kind.presets[size]
    known = [key.name for key in schema_keys(kind)]
    entries = {}
    for field, value in {**chosen, **given}.items():
        entries[field] = _as_entry(field, value)
        if field not in known:
            raise unknown_key(field, [*known, "size"], entries[field].place, "")
    model = convert(Entry(entries, Place("--set")), kind)
    for whole, part in kind.multiples:
        extent = getattr(model, whole)
        divisor = getattr(model, part)
        if extent % divisor:
            message = f"{whole} = {extent} is not a multiple of {part} = {divisor}"
            hint = f"{whole}={max(1, round(extent / divisor)) * divisor} would be"
            raise ConfigurationError(message, hint=hint, where="--set")
    for lower, upper in kind.limits:
        extent = getattr(model, lower)
        limit = getattr(model, upper)
        if extent > limit:
            raise ConfigurationError(f"{lower} = {extent} exceeds {upper} = {limit}", where="--set")
    return model


def _as_entry(name: str, value: Setting) -> Entry:
    """Return `value` as an Entry. Text is read as YAML."""
    if isinstance(value, str):
        return read_setting(value, f"--set {name}={value}")
    place = Place(f"--set {name}")
    if isinstance(value, tuple):
        return Entry(tuple(_as_entry(name, item) for item in value), place)
    return Entry(value, place, str(value))


def build(model: ZooModel) -> BuiltModel:
    """Return the graph of `model`, with inferred shapes. Its weights are initialised when it is
    saved.
    """
    from autopipe.configs.zoo.builder import BuiltModel, GraphBuilder

    target = f"{type(model).__module__.rpartition('.')[2]}:{type(model).__name__}"
    name = next(name for name, (place, _) in MODELS.items() if place == target)
    graph = GraphBuilder(
        name, "batch" if model.batch is None else model.batch, model.opset, model.loss
    )
    model.build(graph)
    settings = json.dumps({"name": name, **dataclasses.asdict(model)})
    skeleton, parameters = graph.finish({"autopipe.zoo": settings})
    return BuiltModel(skeleton, parameters, model.seed if model.weights == "random" else None)
