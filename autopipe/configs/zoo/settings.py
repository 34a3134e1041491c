"""From `KEY=VALUE` words to a model of the zoo; its fields say which keys there are.

Base of the zoo's models: the settings that are not sizes, and the methods each must have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, TypeVar

from autopipe.configs.schema import convert, unknown_key
from autopipe.configs.yaml_source import Entry, Place, read_setting
from autopipe.ir.codec import AtLeast, AtMost, keys
from autopipe.ir.errors import ConfigurationError, nearest, quote

if TYPE_CHECKING:
    from autopipe.configs.zoo.builder import GraphBuilder


Count = Annotated[int, AtLeast(1), AtMost(2**28)]
"""A size; the product of two still counts bytes in 64 bits."""

Setting = int | float | bool | str | tuple[int, ...] | None
"""The value of a field of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel(ABC):
    """A model as a value: its fields are its sizes and what `zoo build --set KEY=VALUE` changes."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {}
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


Model = TypeVar("Model", bound=ZooModel)

SIZE_KEY: Final = "size"


def parse_words(words: Iterable[str]) -> dict[str, str]:
    """`KEY=VALUE` words as a mapping; a later word for the same key wins."""
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigurationError(f"--set {quote(word)} is not of the form KEY=VALUE")
        settings[key] = value
    return settings


def configure(kind: type[Model], settings: Mapping[str, Setting]) -> Model:
    """The model of class `kind` with `settings`; `size` names a preset, which the other keys then change.

    A value that is text is read as YAML, as on a command line. Raises ConfigurationError for an unknown key or preset
    (with the nearest match), a value of the wrong type, and sizes that contradict each other.
    """
    given = dict(settings)
    chosen = _preset(kind, str(given.pop(SIZE_KEY))) if SIZE_KEY in given else {}
    known = [key.name for key in keys(kind)]
    entries = {}
    for name, value in {**chosen, **given}.items():
        entries[name] = _entry(name, value)
        if name not in known:
            raise unknown_key(name, [*known, SIZE_KEY], entries[name].place, "")
    model = convert(Entry(entries, Place("--set")), kind)
    for whole, part in kind.multiples:
        _require_multiple(model, whole, part)
    for lower, upper in kind.limits:
        _require_limit(model, lower, upper)
    return model


def _entry(name: str, value: Setting) -> Entry:
    """`value` as what was read; text is YAML that is still to be read."""
    if isinstance(value, str):
        return read_setting(value, f"--set {name}={value}")
    place = Place(f"--set {name}")
    if isinstance(value, tuple):
        return Entry(tuple(_entry(name, item) for item in value), place)
    return Entry(value, place, str(value))


def _preset(kind: type[ZooModel], size: str) -> Mapping[str, Setting]:
    """The fields that preset `size` sets."""
    if size not in kind.presets:
        raise ConfigurationError(f"no such size {quote(size)}", hint=nearest(size, kind.presets), where="--set size")
    return kind.presets[size]


def _require_multiple(model: ZooModel, whole: str, part: str) -> None:
    """Raise ConfigurationError unless field `whole` of `model` is a multiple of its field `part`."""
    extent, divisor = getattr(model, whole), getattr(model, part)
    if extent % divisor:
        nearest_multiple = max(1, round(extent / divisor)) * divisor
        message = f"{whole} = {extent} is not a multiple of {part} = {divisor}"
        raise ConfigurationError(message, hint=f"{whole}={nearest_multiple} would be", where="--set")


def _require_limit(model: ZooModel, lower: str, upper: str) -> None:
    """Raise ConfigurationError unless field `lower` of `model` is at most its field `upper`."""
    extent, limit = getattr(model, lower), getattr(model, upper)
    if extent > limit:
        raise ConfigurationError(f"{lower} = {extent} exceeds {upper} = {limit}", where="--set")
