"""Models of plain torch as papers have them: detectors, generators, speech."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.exports.other_models import Classification, Regression
from tests.exports.with_loss import BATCH, CLASSES, SEQUENCE, VOCABULARY, Tensors, WithLoss, tokens

WIDTH = 16


class Convolution(nn.Module):
    """Convolution, batch normalization and SiLU, as YOLO has them everywhere."""

    def __init__(self, inner: int, outer: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outer)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(self.convolution(image)))


class CrossStage(nn.Module):
    """Half of the channels through bottlenecks, each of whose results is joined (C2f of YOLOv8)."""

    def __init__(self, inner: int, outer: int, shortcut: bool) -> None:
        super().__init__()
        half = outer // 2
        self.entry = Convolution(inner, outer)
        self.exit = Convolution(3 * half, outer)
        self.bottleneck = nn.Sequential(Convolution(half, half, 3), Convolution(half, half, 3))
        self.shortcut = shortcut

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        left, right = self.entry(image).chunk(2, dim=1)
        deeper = self.bottleneck(right)
        joined = [left, right, right + deeper if self.shortcut else deeper]
        result: torch.Tensor = self.exit(torch.cat(joined, dim=1))
        return result


class PyramidPooling(nn.Module):
    """The same maximum three times over, all of it joined (SPPF)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.entry = Convolution(width, width // 2)
        self.exit = Convolution(2 * width, width)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        pooled = [self.entry(image)]
        for _ in range(3):
            pooled.append(self.pool(pooled[-1]))
        result: torch.Tensor = self.exit(torch.cat(pooled, dim=1))
        return result


class Yolo(nn.Module):
    """Backbone, feature pyramid and decoupled heads over two scales; boxes from distributions over
    distances.
    """

    BINS = 4

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            Convolution(3, 8, 3, 2), Convolution(8, 16, 3, 2), CrossStage(16, 16, True)
        )
        self.deep = nn.Sequential(
            Convolution(16, 32, 3, 2), CrossStage(32, 32, True), PyramidPooling(32)
        )
        self.up = CrossStage(48, 16, False)
        self.down = Convolution(16, 16, 3, 2)
        self.out = CrossStage(48, 32, False)
        self.boxes = nn.ModuleList(nn.Conv2d(width, 4 * self.BINS, 1) for width in (16, 32))
        self.kinds = nn.ModuleList(nn.Conv2d(width, CLASSES, 1) for width in (16, 32))
        self.register_buffer("bins", torch.arange(self.BINS).float())

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        shallow = self.stem(image)
        deep = self.deep(shallow)
        grown = F.interpolate(deep, scale_factor=2.0, mode="nearest")
        fine = self.up(torch.cat([grown, shallow], dim=1))
        coarse = self.out(torch.cat([self.down(fine), deep], dim=1))
        found = []
        for scale, box, kind in zip((fine, coarse), self.boxes, self.kinds, strict=True):
            distances = box(scale).flatten(2).unflatten(1, (4, self.BINS)).softmax(dim=2)
            expected = (distances * self.bins[:, None]).sum(dim=2)
            found.append(torch.cat([expected, kind(scale).flatten(2).sigmoid()], dim=1))
        return torch.cat(found, dim=2)


class JointBlock(nn.Module):
    """Text and image with weights of their own and one attention over both (MMDiT,
    arXiv:2403.03206).
    """

    HEADS = 2

    def __init__(self) -> None:
        super().__init__()
        self.modulations = nn.ModuleList(nn.Linear(WIDTH, 6 * WIDTH) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH // self.HEADS) for _ in range(4))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(approximate="tanh"), nn.Linear(24, WIDTH))
            for _ in range(2)
        )

    def forward(self, both: list[torch.Tensor], condition: torch.Tensor) -> list[torch.Tensor]:
        parts = [layer(F.silu(condition))[:, None].chunk(6, dim=-1) for layer in self.modulations]
        streams = []
        for index, (hidden, part) in enumerate(zip(both, parts, strict=True)):
            inner = F.layer_norm(hidden, (WIDTH,)) * (1 + part[1]) + part[0]
            heads = self.qkv[index](inner).unflatten(-1, (3, self.HEADS, -1)).permute(2, 0, 3, 1, 4)
            query, key, value = heads.unbind()
            streams.append((self.norms[2 * index](query), self.norms[2 * index + 1](key), value))
        query, key, value = (torch.cat(pair, dim=2) for pair in zip(*streams, strict=True))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        sizes = [hidden.shape[1] for hidden in both]
        results = []
        for index, (hidden, part, attended) in enumerate(
            zip(both, parts, mixed.split(sizes, dim=1), strict=True)
        ):
            hidden = hidden + part[2] * self.out[index](attended)
            inner = F.layer_norm(hidden, (WIDTH,)) * (1 + part[4]) + part[3]
            results.append(hidden + part[5] * self.mlp[index](inner))
        return results


class JointDiffusion(nn.Module):
    """Patches of an image and embedded text through joint blocks, as Stable Diffusion 3 and FLUX
    do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, WIDTH, 2, stride=2)
        self.places = nn.Parameter(torch.randn(1, 16, WIDTH))
        self.context = nn.Linear(12, WIDTH)
        self.time = nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.pooled = nn.Linear(10, WIDTH)
        self.blocks = nn.ModuleList(JointBlock() for _ in range(2))
        self.exit = nn.Linear(WIDTH, 16)
        self.register_buffer("frequencies", torch.exp(-torch.arange(4) * 2.0))

    def forward(
        self, latent: torch.Tensor, text: torch.Tensor, pooled: torch.Tensor, step: torch.Tensor
    ) -> torch.Tensor:
        angles = step[:, None] * self.frequencies
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=1)) + self.pooled(pooled)
        both = [self.context(text), self.patches(latent).flatten(2).transpose(1, 2) + self.places]
        for block in self.blocks:
            both = block(both, condition)
        patches = (
            self.exit(F.layer_norm(both[1], (WIDTH,))).unflatten(1, (4, 4)).unflatten(3, (2, 2, 4))
        )
        return patches.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def discriminator() -> nn.Module:
    """The critic of a GAN: strided convolutions with spectral normalization (arXiv:1802.05957)."""
    layers: list[nn.Module] = []
    for inner, outer in ((3, 8), (8, 16), (16, 32)):
        convolution = nn.utils.parametrizations.spectral_norm(nn.Conv2d(inner, outer, 4, 2, 1))
        layers += [convolution, nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 1))


def generator() -> nn.Module:
    """The generator of a DCGAN (arXiv:1511.06434)."""
    return nn.Sequential(
        nn.Unflatten(1, (8, 1, 1)), nn.ConvTranspose2d(8, 16, 4), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


class Tacotron(nn.Module):
    """Characters through convolutions and a bidirectional LSTM; frames by an LSTM that attends to
    them; a post-net (Tacotron 2, arXiv:1712.05884), the former frames given.
    """

    BANDS = 8

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.convolutions = nn.Sequential(
            nn.Conv1d(WIDTH, WIDTH, 5, padding=2), nn.ReLU(), nn.Dropout(0.0)
        )
        self.encoder = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.before = nn.Sequential(nn.Linear(self.BANDS, WIDTH), nn.ReLU())
        self.decoder = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.query = nn.Linear(WIDTH, 12)
        self.key = nn.Linear(WIDTH, 12, bias=False)
        self.energy = nn.Linear(12, 1)
        self.frame = nn.Linear(2 * WIDTH, self.BANDS)
        self.stop = nn.Linear(2 * WIDTH, 1)
        self.after = nn.Sequential(
            nn.Conv1d(self.BANDS, WIDTH, 5, padding=2),
            nn.Tanh(),
            nn.Conv1d(WIDTH, self.BANDS, 5, padding=2),
        )

    def forward(self, text: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        hidden = self.convolutions(self.embedding(text).transpose(1, 2)).transpose(1, 2)
        memory = self.encoder(hidden)[0]
        state = self.decoder(self.before(F.pad(frames, (0, 0, 1, -1))))[0]
        scores = self.energy(
            torch.tanh(self.query(state)[:, :, None] + self.key(memory)[:, None])
        ).squeeze(-1)
        joined = torch.cat([state, scores.softmax(dim=-1) @ memory], dim=-1)
        found = self.frame(joined)
        found = found + self.after(found.transpose(1, 2)).transpose(1, 2)
        return torch.cat([found, self.stop(joined)], dim=-1)


class Matcha(nn.Module):
    """Characters last as many frames as is told of each; of the frames an even number, halved and
    doubled by convolutions, attend to one another (Matcha-TTS, arXiv:2309.03199).
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.length = nn.Conv1d(WIDTH, 1, 1)
        self.down = nn.Conv1d(WIDTH, WIDTH, 3, 2, 1)
        self.up = nn.ConvTranspose1d(WIDTH, WIDTH, 4, 2, 1)
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.joined = nn.Linear(WIDTH, WIDTH)
        self.exit = nn.Conv1d(2 * WIDTH, 8, 3, padding=1)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.encoder(self.embedding(text).transpose(1, 2)))
        lengths = torch.ceil(torch.exp(self.length(hidden.detach()).squeeze(1)))
        total = lengths.sum(dim=1)
        steps = torch.arange(((total.max() / 2).ceil() * 2).long())
        inside = (steps < total[:, None]).to(hidden.dtype)
        until = (steps < lengths.cumsum(dim=1)[..., None]).to(hidden.dtype)
        frames = hidden @ (until - F.pad(until, (0, 0, 1, 0))[:, :-1])
        deep = self.down(frames * inside[:, None])
        query, key, value = self.heads(self.norm(deep.transpose(1, 2))).chunk(3, dim=-1)
        scores = (query @ key.transpose(1, 2) / WIDTH**0.5).masked_fill(
            inside[:, None, ::2] == 0, -1e4
        )
        deep = deep + self.joined(scores.softmax(dim=-1) @ value).transpose(1, 2)
        result: torch.Tensor = (
            self.exit(torch.cat([self.up(deep), frames], dim=1)) * inside[:, None]
        )
        return result


class Vocoder(nn.Module):
    """A spectrum becomes a wave: transposed convolutions and dilated residual ones (HiFi-GAN,
    arXiv:2010.05646).
    """

    def __init__(self) -> None:
        super().__init__()
        normalized = nn.utils.parametrizations.weight_norm
        self.entry = normalized(nn.Conv1d(8, 16, 7, padding=3))
        self.grow = nn.ModuleList(
            normalized(nn.ConvTranspose1d(16 >> index, 8 >> index, 8, 4, 2)) for index in range(2)
        )
        self.residual = nn.ModuleList(
            nn.ModuleList(
                normalized(
                    nn.Conv1d(8 >> index, 8 >> index, 3, dilation=dilation, padding=dilation)
                )
                for dilation in (1, 3, 5)
            )
            for index in range(2)
        )
        self.exit = normalized(nn.Conv1d(4, 1, 7, padding=3))

    def forward(self, spectrum: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(spectrum)
        for grow, layers in zip(self.grow, self.residual, strict=True):
            hidden = grow(F.leaky_relu(hidden, 0.1))
            for layer in layers:
                hidden = hidden + layer(F.leaky_relu(hidden, 0.1))
        return torch.tanh(self.exit(F.leaky_relu(hidden)))


class Flow(nn.Module):
    """Affine couplings over halves of channels, as VITS and Glow-TTS have them, conditioned by a
    gated WaveNet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.ModuleList(nn.Conv1d(4, 8, 1) for _ in range(3))
        self.gates = nn.ModuleList(nn.Conv1d(8, 16, 3, padding=1) for _ in range(3))
        self.exit = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        for entry, gate, exit_ in zip(self.entry, self.gates, self.exit, strict=True):
            kept, moved = latent.chunk(2, dim=1)
            left, right = gate(entry(kept)).chunk(2, dim=1)
            shift, scale = exit_(torch.tanh(left) * torch.sigmoid(right)).chunk(2, dim=1)
            latent = torch.flip(torch.cat([kept, moved * scale.exp() + shift], dim=1), dims=(1,))
        return latent


class Separator(nn.Module):
    """Temporal convolutions that mask a learned spectrum (Conv-TasNet, arXiv:1809.07454)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, 12, 8, 4, bias=False)
        self.decoder = nn.ConvTranspose1d(12, 1, 8, 4, bias=False)
        self.norm = nn.GroupNorm(1, 12)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(12, 16, 1), nn.PReLU(), nn.GroupNorm(1, 16),
                          nn.Conv1d(16, 16, 3, dilation=2**index, padding=2**index, groups=16), nn.PReLU(),
                          nn.Conv1d(16, 12, 1)) for index in range(3)
        )  # fmt: skip
        self.masks = nn.Conv1d(12, 24, 1)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        spectrum = self.encoder(wave[:, None])
        hidden = self.norm(spectrum)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        masks = torch.sigmoid(self.masks(hidden)).unflatten(1, (2, 12))
        found = self.decoder((masks * spectrum[:, None]).flatten(0, 1))
        return found.unflatten(0, (-1, 2)).squeeze(2)


class Graph(nn.Module):
    """Two graph convolutions over each sample's adjacency (arXiv:1609.02907)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.second = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        degrees = adjacency.sum(dim=-1).clamp(min=1.0).rsqrt()
        mixing = degrees[:, :, None] * adjacency * degrees[:, None]
        result: torch.Tensor = self.second(mixing @ F.relu(self.first(mixing @ features)))
        return result


class Forecaster(nn.Module):
    """A series in patches through a transformer encoder, normalized by its own mean and deviation
    (PatchTST).
    """

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(8, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.exit = nn.Linear(7 * WIDTH, 6)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        mean = series.mean(dim=1, keepdim=True)
        deviation = series.std(dim=1, keepdim=True) + 1e-5
        patches = ((series - mean) / deviation).unfold(1, 8, 4)
        result: torch.Tensor = self.exit(self.encoder(self.entry(patches)).flatten(1))
        return result * deviation + mean


@torch.jit.script
def recurrent(
    series: torch.Tensor, gates: torch.Tensor, candidates: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """A gated recurrent unit of one's own, in a loop over as many steps as there are, which no
    trace unrolls.
    """
    states: list[torch.Tensor] = []
    for step in range(series.size(1)):
        reset, update = torch.sigmoid(torch.cat([series[:, step], state], 1) @ gates).chunk(2, 1)
        candidate = torch.tanh(torch.cat([series[:, step], reset * state], 1) @ candidates)
        state = state + update * (candidate - state)
        states.append(state)
    return torch.stack(states, 1)


class Recurrence(nn.Module):
    """The layers around such a loop, whose weights are this module's."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(3, 4)
        self.exit = nn.Linear(WIDTH, 2)
        self.gates, self.candidates = (
            nn.Parameter(torch.randn(4 + WIDTH, times * WIDTH) / 4) for times in (2, 1)
        )

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(series.shape[0], WIDTH)
        result: torch.Tensor = self.exit(
            recurrent(self.entry(series), self.gates, self.candidates, state)
        )
        return result


def _drawn(**shapes: tuple[int, ...]) -> Tensors:
    return {name: torch.randn(BATCH, *shape) for name, shape in shapes.items()}


def _spoken() -> Tensors:
    return {"text": tokens(), **_drawn(frames=(12, 8), target=(12, 9))}


TORCH: dict[str, WithLoss] = {
    "yolo": WithLoss(lambda: Regression(Yolo()), lambda: _drawn(image=(3, 32, 32), target=(9, 80))),
    "joint_diffusion": WithLoss(
        lambda: Regression(JointDiffusion()),
        lambda: _drawn(
            latent=(4, 8, 8), text=(SEQUENCE, 12), pooled=(10,), step=(), target=(4, 8, 8)
        ),
    ),
    "gan_generator": WithLoss(
        lambda: Regression(generator()), lambda: _drawn(noise=(8,), target=(3, 16, 16))
    ),
    "gan_discriminator": WithLoss(
        lambda: Regression(discriminator()), lambda: _drawn(image=(3, 32, 32), target=(1,))
    ),
    "tacotron": WithLoss(lambda: Regression(Tacotron()), _spoken),
    "matcha": WithLoss(
        lambda: Regression(Matcha()), lambda: {"text": tokens(), **_drawn(target=(8, 1))}
    ),
    "vocoder": WithLoss(
        lambda: Regression(Vocoder()), lambda: _drawn(spectrum=(8, 10), target=(1, 160))
    ),
    "flow": WithLoss(lambda: Regression(Flow()), lambda: _drawn(latent=(8, 12), target=(8, 12))),
    "separator": WithLoss(
        lambda: Regression(Separator()), lambda: _drawn(wave=(64,), target=(2, 64))
    ),
    "graph": WithLoss(
        lambda: Classification(Graph()),
        lambda: {
            "features": torch.randn(BATCH, 7, 6),
            "adjacency": torch.randint(0, 2, (BATCH, 7, 7)).float(),
            "labels": torch.randint(0, CLASSES, (BATCH, 7)),
        },
    ),
    "forecaster": WithLoss(
        lambda: Regression(Forecaster()), lambda: _drawn(series=(32,), target=(6,))
    ),
    "recurrence": WithLoss(
        lambda: Regression(Recurrence()), lambda: _drawn(series=(1000, 3), target=(1000, 2))
    ),
}
"""By name."""
