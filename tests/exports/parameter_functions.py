"""Small modules that use parameters through a function, alone or beside the parameters, in torch's
exports.
"""

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
    layer: bool = False
    """True if the parameters are the weight and the bias of a module, which calls the function with
    its input first.
    """


def _distances() -> Tensor:
    return torch.arange(WIDTH)[:, None] - torch.arange(WIDTH)[None] + WIDTH - 1


SQUARE = ((WIDTH, WIDTH),)
LAYER = (*SQUARE, (WIDTH,))
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
    "table of relative positions": Probe(
        ((2 * WIDTH - 1, 1),), lambda p: p[_distances()].permute(2, 0, 1)[0]
    ),
    "product": Probe(((WIDTH, 3), (3, WIDTH)), lambda p, q: p @ q),
    "sum of two": Probe((*SQUARE, *SQUARE), lambda p, q: p + q),
    "joined": Probe(((2, WIDTH), (4, WIDTH)), lambda p, q: torch.cat([p, q])),
    "joined columns": Probe(((WIDTH, 2), (WIDTH, 4)), lambda p, q: torch.cat([p, q], 1)),
    "product of elements": Probe((*SQUARE, *SQUARE), lambda p, q: p * q),
    "scaled rows": Probe((*SQUARE, (WIDTH,)), lambda p, q: p * q[:, None]),
    "low rank": Probe(((WIDTH, 3), (WIDTH, 3)), lambda p, q: p @ q.t()),
    "adapted": Probe((*SQUARE, (WIDTH, 2), (2, WIDTH)), lambda w, p, q: w + 0.5 * (p @ q)),
    "rows of a multiple": Probe(SQUARE, lambda p: (2 * p)[torch.arange(WIDTH)]),
    "rows of a multiple, some twice": Probe(SQUARE, lambda p: (2 * p)[torch.arange(WIDTH) // 2]),
    "relative positions of a multiple": Probe(((2 * WIDTH - 1,),), lambda p: (2 * p)[_distances()]),
    "cosines and sines": Probe(((WIDTH, 3),), lambda p: torch.cat([p.cos(), p.sin()], 1)),
    "sines": Probe(SQUARE, torch.sin),
    "straight through": Probe(SQUARE, lambda p: p + (torch.round(4 * p) / 4 - p).detach()),
    "straight through of a multiple": Probe(
        SQUARE, lambda p: p + ((p / 0.3).round() * 0.3 - p).detach()
    ),
    "layer": Probe(LAYER, functional.linear, layer=True),
    "product with a weight": Probe(LAYER, lambda x, w, b: x @ w + b, layer=True),
    "product with a multiple": Probe(LAYER, lambda x, w, b: x @ (0.5 * w) + b, layer=True),
    "scaled layer": Probe(LAYER, lambda x, w, b: functional.linear(x, 0.37 * w, b), layer=True),
    "scaled layer without bias": Probe(
        SQUARE, lambda x, w: functional.linear(x, 0.37 * w), layer=True
    ),
    "negated layer": Probe(LAYER, lambda x, w, b: functional.linear(x, -w, b), layer=True),
    "masked layer": Probe(
        LAYER,
        lambda x, w, b: functional.linear(x, w * torch.tril(torch.ones(WIDTH, WIDTH)), b),
        layer=True,
    ),
    "layer beside the identity": Probe(
        LAYER, lambda x, w, b: functional.linear(x, w + torch.eye(WIDTH), b), layer=True
    ),
    "exponential layer": Probe(LAYER, lambda x, w, b: functional.linear(x, w.exp(), b), layer=True),
}
"""By name."""


class Layer(nn.Module):
    """A module with a weight and perhaps a bias, whose result is a function of its input and of
    both.
    """

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        for name, shape in zip(("weight", "bias"), probe.shapes, strict=False):
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.function = probe.function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parameters())


class Module(nn.Module):
    """A linear layer behind a product with a function of parameters, with the mean square of its
    error as loss.
    """

    def __init__(self, probe: Probe, beside: bool) -> None:
        super().__init__()
        self.layer = Layer(probe) if probe.layer else None
        self.parts = nn.ParameterList(
            [] if probe.layer else [nn.Parameter(torch.randn(each)) for each in probe.shapes]
        )
        self.function = probe.function
        self.head = nn.Linear(WIDTH, 3)
        self.beside = beside

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.layer is not None:
            # Exporters write a layer of two-dimensional data as one operator, which reads the
            # parameter itself.
            hidden = self.layer(x[:, None]).squeeze(1)
        else:
            hidden = x @ self.function(*self.parts)
        if self.beside:
            for part in self.parts if self.layer is None else self.layer.parameters():
                # A product with data, which no exporter computes.
                hidden = (
                    hidden
                    + (x[:, :1].reshape(-1, *[1] * part.dim()) * part).flatten(1).sum(1)[:, None]
                )
        return ((self.head(torch.tanh(hidden)) - y) ** 2).mean()


@dataclass(frozen=True, slots=True)
class Case:
    """A probe through one exporter, alone or with the parameters themselves `beside` it."""

    probe: str
    exporter: str
    beside: bool

    @property
    def name(self) -> str:
        """A name for files and tests."""
        return "-".join(
            (
                self.probe.replace(",", "").replace(" ", "_"),
                self.exporter,
                *(["beside"] if self.beside else []),
            )
        )


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
