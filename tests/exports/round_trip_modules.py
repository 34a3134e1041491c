"""Small modules of forty kinds that are exported, trained and loaded again, each with its loss and
a batch.

Vision, text, sequences and graphs of training; parts that exporters spell in their own ways: tied
and normalised weights, transposed convolutions, experts, frozen parts, several losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

Batch = dict[str, torch.Tensor]
SAMPLES = 8
CLASSES = 5
WIDTH = 8
TOKENS = 6
VOCABULARY = 17


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """One module with the batch of two steps, and the loss that its results are compared by."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = F.cross_entropy
    """None for a module that returns its loss."""


def images(generator: torch.Generator, channels: int = 3, size: int = 8) -> Batch:
    pixels = torch.randn(2 * SAMPLES, channels, size, size, generator=generator)
    return {"input": pixels, "labels": torch.randint(CLASSES, (2 * SAMPLES,), generator=generator)}


def vectors(generator: torch.Generator) -> Batch:
    rows = torch.randn(2 * SAMPLES, WIDTH, generator=generator)
    return {"input": rows, "labels": torch.randint(CLASSES, (2 * SAMPLES,), generator=generator)}


def series(generator: torch.Generator) -> Batch:
    rows = torch.randn(2 * SAMPLES, TOKENS, WIDTH, generator=generator)
    return {"input": rows, "labels": torch.randint(CLASSES, (2 * SAMPLES,), generator=generator)}


def signals(generator: torch.Generator) -> Batch:
    rows = torch.randn(2 * SAMPLES, 2, 12, generator=generator)
    return {"input": rows, "labels": torch.randint(CLASSES, (2 * SAMPLES,), generator=generator)}


def text(generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (2 * SAMPLES, TOKENS), generator=generator)
    return {"input": tokens, "labels": torch.randint(CLASSES, (2 * SAMPLES,), generator=generator)}


def next_tokens(generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (2 * SAMPLES, TOKENS + 1), generator=generator)
    return {"input": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def copies(generator: torch.Generator) -> Batch:
    pixels = torch.randn(2 * SAMPLES, 1, 8, 8, generator=generator)
    return {"input": pixels, "labels": pixels.flip(2).contiguous()}


def pairs(generator: torch.Generator) -> Batch:
    first, second = torch.randn(2, 2 * SAMPLES, WIDTH, generator=generator)
    return {
        "first": first,
        "second": second,
        "labels": torch.rand(2 * SAMPLES, generator=generator).round(),
    }


def per_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)
    )


def square_perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH, bias=False),
        nn.Linear(WIDTH, CLASSES),
    )


def normalised_perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES)
    )


def layer_normalised() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 16),
        nn.SiLU(),
        nn.LayerNorm(16),
        nn.Linear(16, CLASSES),
    )


def rms_normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.RMSNorm(16), nn.Mish(), nn.Linear(16, CLASSES))


def leaky() -> nn.Module:
    layers = nn.Linear(WIDTH, 16), nn.PReLU(), nn.Linear(16, 16), nn.ELU(), nn.Linear(16, CLASSES)
    return nn.Sequential(*layers)


def bilinear() -> nn.Module:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.join = nn.Bilinear(WIDTH, WIDTH, 4)
            self.head = nn.Linear(4, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.join(x, x.flip(1))))

    return Joined()


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(32, CLASSES),
    )  # fmt: skip


def vgg() -> nn.Module:
    block = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
    )
    return nn.Sequential(*block, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(h)) + self.short(x))


def residual() -> nn.Module:
    blocks = ResidualBlock(3, 8, 1), ResidualBlock(8, 8, 2)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


def frozen_residual() -> nn.Module:
    """Fine-tuning: the first block and its statistics stay as they are."""
    module = residual()
    first = module.get_submodule("0")
    first.eval().requires_grad_(False)
    return module


def grouped() -> nn.Module:
    layers = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.Hardswish(),
    )
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 36, CLASSES))


def instance_normalised() -> nn.Module:
    layers = nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.LeakyReLU(0.2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4 * 36, CLASSES))


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU6(), nn.Conv2d(6, 6, 3, groups=6, bias=False),
        nn.BatchNorm2d(6), nn.ReLU6(), nn.Conv2d(6, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Flatten(),
        nn.Linear(4 * 36, CLASSES),
    )  # fmt: skip


def squeezed() -> nn.Module:
    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.down = nn.Conv2d(8, 2, 1)
            self.up = nn.Conv2d(2, 8, 1)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.relu(self.conv(x))
            scale = torch.sigmoid(self.up(F.relu(self.down(h.mean((2, 3), keepdim=True)))))
            return self.head((h * scale).mean((2, 3)))

    return Squeezed()


def dense() -> nn.Module:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Conv2d(3 + 4 * index, 4, 3, padding=1) for index in range(3)]
            )
            self.head = nn.Linear(15, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.cat([x, F.relu(layer(x))], 1)
            return self.head(x.mean((2, 3)))

    return Dense()


class ContractingExpanding(nn.Module):
    """A small U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(1, 4, 3, padding=1)
        self.down2 = nn.Conv2d(4, 8, 3, 2, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.last = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.relu(self.down1(x))
        deep = F.relu(self.down2(wide))
        return self.last(torch.cat([wide, self.up(deep)], 1))


def autoencoder() -> nn.Module:
    coder = (
        nn.Conv2d(1, 4, 3, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 1, 3, 2, 1, output_padding=1),
        nn.Tanh(),
    )
    return nn.Sequential(*coder)


def upsampled() -> nn.Module:
    coder = (
        nn.Conv2d(1, 4, 3, 2, 1),
        nn.ReLU(),
        nn.Upsample(scale_factor=2.0),
        nn.Conv2d(4, 4, 3, padding=1),
    )
    return nn.Sequential(*coder, nn.PixelShuffle(2), nn.AvgPool2d(2))


def weight_normalised() -> nn.Module:
    return nn.Sequential(
        weight_norm(nn.Linear(WIDTH, 16)), nn.ReLU(), weight_norm(nn.Linear(16, CLASSES))
    )


def spectrally_normalised() -> nn.Module:
    return nn.Sequential(
        spectral_norm(nn.Linear(WIDTH, 16)).eval(), nn.ReLU(), nn.Linear(16, CLASSES)
    )


def signal_convolutional() -> nn.Module:
    layers = (
        nn.Conv1d(2, 8, 3, dilation=2),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.AdaptiveMaxPool1d(1),
        nn.Flatten(),
    )
    return nn.Sequential(*layers, nn.Linear(8, CLASSES))


class SavedState(nn.Module):
    """A `state_dict` whose entries no node of an exported file holds, or that the file holds under
    other names.
    """

    counted: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.again = self.layer
        self.back = nn.Linear(WIDTH, WIDTH, bias=False)
        self.back.weight = self.layer.weight
        self.unused = nn.Linear(WIDTH, 3)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("unread", torch.randn(4))
        self.register_buffer("counted", torch.randint(9, (2, 1)))
        self.register_buffer("is_ready", torch.tensor(True))
        self.register_buffer("scale", torch.full((WIDTH,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counted += 3
        h = self.norm(self.back(torch.tanh(self.layer(x))) * self.scale)
        return self.head(self.norm(self.again(h)))


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **settings: Any) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, batch_first=True, **settings)
        self.head = nn.Linear(WIDTH * (2 if settings.get("bidirectional") else 1), CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


class TextClassifier(nn.Module):
    """Embeddings, their positions, a transformer's encoder, and the mean of its tokens."""

    def __init__(self, padding: int | None = None, layers: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH) / 4)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.words(tokens) + self.positions).mean(1))


class CausalBlock(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(WIDTH)
        self.joined = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (
            self.joined(self.norm1(x))
            .unflatten(-1, (3, self.heads, WIDTH // self.heads))
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self, tied: bool, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([CausalBlock() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GatedBlock(nn.Module):
    """A decoder's block of Llama's kind: rotary positions, grouped heads, a gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 16, bias=False)
        self.up = nn.Linear(WIDTH, 16, bias=False)
        self.down = nn.Linear(16, WIDTH, bias=False)
        self.register_buffer(
            "frequencies", 1 / 100 ** (torch.arange(0, 4, 2) / 4), persistent=False
        )

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            angles = torch.outer(torch.arange(x.shape[-2]).float(), self.frequencies).repeat(1, 2)
        half = torch.cat([-x[..., 2:], x[..., :2]], -1)
        return x * angles.cos() + half * angles.sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        mixed = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def llama() -> nn.Module:
    blocks = GatedBlock(), GatedBlock()
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
    )


class Experts(nn.Module):
    """Two experts, each weighted by a router for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = torch.softmax(self.router(x), -1)
        mixed = sum(
            shares[:, index : index + 1] * F.relu(expert(x))
            for index, expert in enumerate(self.experts)
        )
        return self.head(mixed)


class StackedExperts(nn.Module):
    """Experts whose weights are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(WIDTH, 3) / 3)
        self.weights = nn.Parameter(torch.randn(3, WIDTH, CLASSES) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("be,bd,edc->bc", torch.softmax(x @ self.router, -1), x, self.weights)


class WindowBlock(nn.Module):
    """Attention within windows of an image, with a table of relative positions, of Swin's kind."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.table = nn.Parameter(torch.randn(9, 2) / 4)
        places = torch.stack(
            torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")
        ).flatten(1)
        apart = places[:, :, None] - places[:, None, :] + 1
        self.register_buffer("places", apart[0] * 3 + apart[1])
        self.joined = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = self.patches(x).permute(0, 2, 3, 1)
        windows = (
            grid.unflatten(1, (2, 2))
            .unflatten(3, (2, 2))
            .permute(0, 1, 3, 2, 4, 5)
            .flatten(3, 4)
            .flatten(1, 2)
        )
        q, k, v = self.joined(windows).unflatten(-1, (3, 2, 4)).permute(3, 0, 1, 4, 2, 5)
        bias = self.table[self.places.flatten()].reshape(4, 4, 2).permute(2, 0, 1)
        scores = torch.softmax(q @ k.transpose(-1, -2) / 2 + bias, -1)
        mixed = self.out((scores @ v).transpose(2, 3).flatten(3))
        return self.head((windows + mixed).mean((1, 2)))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.start = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH) / 4)
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.start.expand(len(x), -1, -1), patches], 1) + self.positions
        return self.head(self.layer(tokens)[:, 0])


class MixedTokens(nn.Module):
    """An MLP-Mixer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(TOKENS, 12), nn.GELU(), nn.Linear(12, TOKENS))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return self.head((x + self.channels(x)).mean(1))


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 2, 2)
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        h = self.down(F.gelu(self.up(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))))
        return self.head((x + (self.scale * h).permute(0, 3, 1, 2)).mean((2, 3)))


class Siamese(nn.Module):
    """One tower that two inputs share, and a loss of their distance."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(
        self, first: torch.Tensor, second: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        distance = (self.tower(first) - self.tower(second)).square().sum(-1)
        return (labels * distance + (1 - labels) * F.relu(2 - distance)).mean()


class SeveralLosses(nn.Module):
    """A classification and a reconstruction of one code, their losses added up."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Linear(WIDTH, 6)
        self.back = nn.Linear(6, WIDTH)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, input: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # noqa: A002
        code = torch.tanh(self.code(input))
        return F.cross_entropy(self.head(code), labels) + 0.5 * F.mse_loss(self.back(code), input)


class Teacher(nn.Module):
    """A student that follows a frozen teacher, whose values are detached."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(WIDTH, CLASSES)
        self.teacher = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, CLASSES))
        self.teacher.requires_grad_(False)

    def forward(self, input: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # noqa: A002
        with torch.no_grad():
            target = torch.softmax(self.teacher(input), -1)
        scores = self.student(input)
        return (
            F.cross_entropy(scores, labels)
            - (target * torch.log_softmax(scores, -1)).sum(-1).mean()
        )


class Quantised(nn.Module):
    """A code that is rounded, with the gradient of the code itself."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Linear(WIDTH, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = self.code(x)
        return self.head(code + (torch.round(4 * code) / 4 - code).detach())


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Recommender(nn.Module):
    """Tables for the parts of a row, their products, and a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(VOCABULARY, 4) for _ in range(3)])
        self.network = nn.Sequential(nn.Linear(15, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.stack([table(x[:, index]) for index, table in enumerate(self.tables)], 1)
        products = (rows @ rows.transpose(1, 2))[:, [0, 0, 1], [1, 2, 2]]
        return self.network(torch.cat([rows.flatten(1), products], 1))


class PackedProjections(nn.Module):
    """Attention of three axes whose projections are one parameter, as a stack or one below the
    other.
    """

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.joined = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 3)
        if not stacked:
            self.joined = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 3)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.joined if self.joined.dim() == 3 else self.joined.chunk(3)
        q = x @ parts[0].t()
        k = x @ parts[1].t()
        v = x @ parts[2]
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True).mean(1))


class NamedAsOperators(nn.Module):
    """Parameters with the names that traced operators, inputs and the batch axis have in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        for name in ("mean", "mul", "tanh", "val_0", "batch", "matmul"):
            self.register_parameter(name, nn.Parameter(torch.randn(WIDTH) / 3))
        self.add = nn.Linear(WIDTH, WIDTH)
        self.loss = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = (
            torch.tanh(torch.tanh(x @ self.linear) * self.mul + self.mean * x.mean(1, keepdim=True))
            * self.tanh
        )
        return self.loss(h + self.add(x) * self.val_0 + self.batch + self.matmul)


class MomentumEncoder(nn.Module):
    """A frozen encoder whose BatchNorm is in training, under `no_grad`; the trained one is called
    both ways.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.key = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.key.requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.key(x) + self.query(x.flip(1))
        return self.head(self.query(x) - target)


def repeated_block() -> nn.Module:
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
    return nn.Sequential(block, block, block, nn.Linear(WIDTH, CLASSES))


class RoutedExperts(nn.Module):
    """Stacked experts, of which each sample takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.weights = nn.Parameter(torch.randn(3, WIDTH, CLASSES) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, expert = torch.softmax(self.router(x), -1).max(-1)
        return torch.bmm(x[:, None], self.weights[expert])[:, 0] * share[:, None]


class LowRank(nn.Module):
    """A frozen layer, to whose weight a trained product is added."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) / 3)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) / 3)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.linear(x, self.layer.weight + self.up @ self.down, self.layer.bias))


class SparseTable(nn.Module):
    """An embedding with sparse gradients, whose padding is its last row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, padding_idx=-1, sparse=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens).mean(1))


class Detaching(nn.Module):
    """Values that are detached in place, beside a part that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x).detach_() + self.layer(2 * x))


def pruned() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    prune.random_unstructured(layer, "weight", 0.4)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def soft_labels(found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the weighted cross-entropy with smoothed probabilities, as of mixed samples."""
    mixed = torch.softmax(2 * F.one_hot(labels, CLASSES).float(), -1)
    return F.cross_entropy(
        found, mixed, weight=torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0]), label_smoothing=0.2
    )


def mean_squared(found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(found, labels)


ROUND_TRIPS: dict[str, RoundTrip] = {
    "perceptron": RoundTrip(perceptron, vectors),
    "square perceptron": RoundTrip(square_perceptron, vectors),
    "batch norm": RoundTrip(normalised_perceptron, vectors),
    "layer norm": RoundTrip(layer_normalised, vectors),
    "RMS norm": RoundTrip(rms_normalised, vectors),
    "PReLU": RoundTrip(leaky, vectors),
    "bilinear": RoundTrip(bilinear, vectors),
    "saved state": RoundTrip(SavedState, vectors),
    "stacked projections": RoundTrip(lambda: PackedProjections(stacked=True), series),
    "packed projections": RoundTrip(lambda: PackedProjections(stacked=False), series),
    "named as operators": RoundTrip(NamedAsOperators, vectors),
    "momentum encoder": RoundTrip(MomentumEncoder, vectors),
    "repeated block": RoundTrip(repeated_block, vectors),
    "routed experts": RoundTrip(RoutedExperts, vectors),
    "low rank": RoundTrip(LowRank, vectors),
    "sparse table": RoundTrip(SparseTable, text),
    "detached in place": RoundTrip(Detaching, vectors),
    "pruned": RoundTrip(pruned, vectors),
    "compiled": RoundTrip(lambda: torch.compile(perceptron(), backend="eager"), vectors),
    "probabilities for labels": RoundTrip(perceptron, vectors, soft_labels),
    "smoothed labels": RoundTrip(perceptron, vectors, nn.CrossEntropyLoss(label_smoothing=0.1)),
    "weight norm": RoundTrip(weight_normalised, vectors),
    "spectral norm": RoundTrip(spectrally_normalised, vectors),
    "mixture of experts": RoundTrip(Experts, vectors),
    "stacked experts": RoundTrip(StackedExperts, vectors),
    "several losses": RoundTrip(SeveralLosses, vectors, None),
    "teacher and student": RoundTrip(Teacher, vectors, None),
    "straight-through": RoundTrip(Quantised, vectors),
    "siamese": RoundTrip(Siamese, pairs, None),
    "convolutions": RoundTrip(convolutional, images),
    "VGG": RoundTrip(vgg, images),
    "ResNet": RoundTrip(residual, images),
    "frozen ResNet": RoundTrip(frozen_residual, images),
    "group norm": RoundTrip(grouped, images),
    "instance norm": RoundTrip(instance_normalised, images),
    "MobileNet": RoundTrip(depthwise, images),
    "squeeze and excitation": RoundTrip(squeezed, images),
    "DenseNet": RoundTrip(dense, images),
    "ConvNeXt": RoundTrip(ConvNext, images),
    "ViT": RoundTrip(VisionTransformer, images),
    "Swin": RoundTrip(WindowBlock, images),
    "U-Net": RoundTrip(ContractingExpanding, copies, mean_squared),
    "autoencoder": RoundTrip(autoencoder, copies, mean_squared),
    "pixel shuffle": RoundTrip(upsampled, copies, mean_squared),
    "signal": RoundTrip(signal_convolutional, signals),
    "LSTM": RoundTrip(lambda: Recurrent(nn.LSTM), series),
    "bidirectional LSTM": RoundTrip(lambda: Recurrent(nn.LSTM, bidirectional=True), series),
    "GRU": RoundTrip(lambda: Recurrent(nn.GRU), series),
    "RNN": RoundTrip(lambda: Recurrent(nn.RNN), series),
    "attention": RoundTrip(Attentive, series),
    "MLP-Mixer": RoundTrip(MixedTokens, series),
    "BERT": RoundTrip(TextClassifier, text),
    "padded BERT": RoundTrip(lambda: TextClassifier(padding=0), text),
    "GPT": RoundTrip(lambda: LanguageModel(tied=False), next_tokens, per_token),
    "tied GPT": RoundTrip(lambda: LanguageModel(tied=True), next_tokens, per_token),
    "Llama": RoundTrip(llama, next_tokens, per_token),
    "recommender": RoundTrip(Recommender, text),
}
"""By name."""
