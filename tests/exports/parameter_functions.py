"""Small modules that use a parameter through a function, alone or beside the parameter itself, in torch's exports."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.exports.export import cache

WIDTH = 6
BATCH = 8
Function = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Probe:
    """A function that makes a matrix of WIDTH columns of parameters of these shapes."""

    shapes: tuple[tuple[int, ...], ...]
    function: Function


def _distances() -> Tensor:
    return torch.arange(WIDTH)[:, None] - torch.arange(WIDTH)[None] + WIDTH - 1


SQUARE = ((WIDTH, WIDTH),)
PROBES = {
    "plain": Probe(SQUARE, lambda p: p),
    "transposed": Probe(SQUARE, lambda p: p.t()),
    "flipped": Probe(SQUARE, lambda p: p.flip(0)),
    "view": Probe(((WIDTH * WIDTH,),), lambda p: p.view(WIDTH, WIDTH)),
    "scaled": Probe(SQUARE, lambda p: p * 0.125),
    "scaled and transposed": Probe(SQUARE, lambda p: 0.5 * p.t()),
    "negative": Probe(SQUARE, lambda p: -p),
    "shifted": Probe(SQUARE, lambda p: 1 + p),
    "complement": Probe(SQUARE, lambda p: 1 - p),
    "diagonal": Probe(((WIDTH,),), lambda p: p[:, None] * torch.eye(WIDTH)),
    "masked": Probe(SQUARE, lambda p: p * torch.tril(torch.ones(WIDTH, WIDTH))),
    "beside zeros": Probe(((3, WIDTH),), lambda p: torch.cat([p, torch.zeros(3, WIDTH)])),
    "part": Probe(((WIDTH + 2, WIDTH),), lambda p: p[1 : WIDTH + 1]),
    "sigmoid": Probe(SQUARE, torch.sigmoid),
    "softplus": Probe(SQUARE, functional.softplus),
    "exponential": Probe(SQUARE, torch.exp),
    "square": Probe(SQUARE, lambda p: p * p),
    "softmax": Probe(SQUARE, lambda p: torch.softmax(p, -1)),
    "normalized": Probe(SQUARE, lambda p: p / p.norm()),
    "symmetric": Probe(SQUARE, lambda p: p + p.t()),
    "relative positions": Probe(((2 * WIDTH - 1,),), lambda p: p[_distances()]),
    "table of relative positions": Probe(((2 * WIDTH - 1, 1),), lambda p: p[_distances()].permute(2, 0, 1)[0]),
    "product": Probe(((WIDTH, 3), (3, WIDTH)), lambda p, q: p @ q),
    "sum of two": Probe((*SQUARE, *SQUARE), lambda p, q: p + q),
    "joined": Probe(((2, WIDTH), (4, WIDTH)), lambda p, q: torch.cat([p, q])),
}
"""By name."""


class Module(nn.Module):
    """A linear layer behind a product with a function of parameters, with the mean square of its error as loss."""

    def __init__(self, probe: Probe, beside: bool) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in probe.shapes)
        self.function = probe.function
        self.head = nn.Linear(WIDTH, 3)
        self.beside = beside

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = x @ self.function(*self.parts)
        if self.beside:
            # A product with data, which no exporter computes.
            hidden = hidden + (x[:, :1, None] * self.parts[0]).sum((1, 2))[:, None]
        return ((self.head(torch.tanh(hidden)) - y) ** 2).mean()


@dataclass(frozen=True, slots=True)
class Case:
    """A probe through one exporter, alone or with the parameter itself `beside` it."""

    probe: str
    exporter: str
    beside: bool

    @property
    def name(self) -> str:
        """A name for files and tests."""
        return "-".join((self.probe.replace(" ", "_"), self.exporter, *(["beside"] if self.beside else [])))


CASES = tuple(
    Case(probe, exporter, beside)
    for probe in PROBES
    for exporter in ("dynamo", "torchscript")
    for beside in (False, True)
)


def module_of(case: Case) -> Module:
    """The module, the same at every call."""
    torch.manual_seed(len(case.probe))
    return Module(PROBES[case.probe], case.beside)


def batch_of(steps: int) -> tuple[Tensor, Tensor]:
    """The samples of some steps."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(BATCH * steps, width, generator=generator) for width in (WIDTH, 3))  # type: ignore[return-value]


def file_of(case: Case) -> Path:
    """The exported file, made where it is not in the cache yet."""
    path = cache(Path(__file__)) / f"{case.name}.onnx"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(".new")
    x, y = batch_of(1)
    module = module_of(case)
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case.exporter == "dynamo":
            batch = torch.export.Dim("batch")
            torch.onnx.export(
                module, (x, y), made, dynamo=True, input_names=["x", "y"], output_names=["loss"],
                dynamic_shapes=({0: batch}, {0: batch}), external_data=False, verbose=False,
            )  # fmt: skip
        else:
            torch.onnx.export(
                module, (x, y), str(made), dynamo=False, input_names=["x", "y"], output_names=["loss"],
                dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}}, opset_version=18,
            )  # fmt: skip
    logging.disable(level)
    made.rename(path)
    return path
