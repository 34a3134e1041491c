"""Result of reading an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from autopipe.ir.graph import Graph, Value
from autopipe.ir.problem import Mode
from autopipe.passes.annotations.sharding import Configuration
from autopipe.passes.frontend.origins import Provenance, origins_of

if TYPE_CHECKING:
    from autopipe.passes.frontend.load import Source


@dataclass(frozen=True, slots=True)
class Unsupported:
    """An operator that autopipe has no row for."""

    operator: str
    count: int
    node: str
    """The first node of this kind."""
    nearest: str
    """The supported operator with the most similar name, or ""."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A floating-point tensor of the file as the graph has it."""

    value: Value
    trained: bool
    why: str
    doubtful: bool = False
    """Whether the evidence for it is weak."""


@dataclass(frozen=True, slots=True)
class Model:
    """The graph of one evaluation (one micro-batch) of an ONNX file."""

    graph: Graph
    path: Path
    digest: str
    """SHA-256 of the file without the numbers of its large tensors."""
    batch: int | None
    """Samples of one evaluation; None where no input carries samples."""
    loss: str
    """Name of the output that is the loss, "" where there is none."""
    mode: Mode
    nodes_before: int
    """Nodes in the file; `len(graph.nodes)` are left."""
    configurations: tuple[Configuration, ...]
    """The file's multi-device annotations."""
    unsupported: tuple[Unsupported, ...]
    warnings: tuple[str, ...]
    source: Source | None = field(default=None, repr=False, compare=False)
    """The parsed file, from which the graph on other numbers of samples is made; None for a graph of no file."""
    aliases: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Values of the file that are other names of values, by name."""
    tensors: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)
    """The file's floating-point tensors that the graph reads: what is trained, what is not, and why."""

    @property
    def origins(self) -> Provenance:
        """Provenance of the file's nodes and values, worked out when it is first asked for."""
        return Provenance(()) if self.source is None else origins_of(self.source, self.aliases, self.graph)
