"""Base of the zoo's models: the settings that are not sizes, and the methods each must have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from autopipe.configs.schema import AtLeast, AtMost

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
