"""Models of images, sound and tables, each with its loss, as small as keeps every part."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.exports.architectures import LanguageModel, Recommender
from tests.exports.with_loss import (
    BATCH,
    CLASSES,
    SEQUENCE,
    VOCABULARY,
    Tensors,
    WithLoss,
    hugging_face,
    tokens,
)

WIDTH = 16


def _images(size: int = 32) -> Tensors:
    return {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        "labels": torch.randint(0, CLASSES, (BATCH,)),
    }


def _scenes() -> Tensors:
    return {
        "pixel_values": torch.randn(BATCH, 3, 32, 32),
        "labels": torch.randint(0, CLASSES, (BATCH, 32, 32)),
    }


def _captions() -> Tensors:
    return {"input_ids": tokens(), "pixel_values": torch.randn(BATCH, 3, 32, 32)}


def _sounds() -> Tensors:
    return {"input_values": torch.randn(BATCH, 400)}


def _spectra() -> Tensors:
    return {
        "input_features": torch.randn(BATCH, 8, 16),
        "decoder_input_ids": tokens(),
        "decoder_attention_mask": torch.ones(BATCH, SEQUENCE, dtype=torch.int64),
        "labels": tokens(),
    }


_ENCODER: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_CLASSIFIER: dict[str, Any] = {
    **_ENCODER, "num_labels": CLASSES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0
}  # fmt: skip
_TOWER = {**_ENCODER, "projection_dim": 12, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "bos_token_id": 1,
          "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
_LISTENER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0,
    "final_dropout": 0.0, "layerdrop": 0.0,
}  # fmt: skip


def _similarity(result: Any) -> torch.Tensor:
    """The contrastive loss of CLIP (arXiv:2103.00020, figure 3)."""
    scores = result.logits_per_text
    own = torch.arange(scores.shape[0])
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.t(), own)) / 2


def _loudness(result: Any) -> torch.Tensor:
    """A loss in place of CTC, which neither exporter knows."""
    loss: torch.Tensor = result.logits.square().mean()
    return loss


def _pairwise(result: Any) -> torch.Tensor:
    """The sigmoid loss of SigLIP (arXiv:2303.15343, section 3.2)."""
    scores = result.logits_per_text
    signs = 2 * torch.eye(scores.shape[0]) - 1
    return -F.logsigmoid(signs * scores).sum(dim=1).mean()


class Regression(nn.Module):
    """A network and the squared error of what it gives."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.network(*tensors[:-1]), tensors[-1])


class Classification(nn.Module):
    """A network and the cross-entropy of its scores, the classes last."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        scores = self.network(*tensors[:-1])
        return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), tensors[-1].reshape(-1))


class OnlyLoss(nn.Module):
    """A network that gives its loss first."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.network(*tensors)[0]
        return loss


class Residual(nn.Module):
    """Two normalized convolutions, between them the time's embedding (DDPM, arXiv:2006.11239)."""

    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(4, inner), nn.SiLU(), nn.Conv2d(inner, outer, 3, padding=1)
        )
        self.time = nn.Linear(time, outer)
        self.second = nn.Sequential(
            nn.GroupNorm(4, outer), nn.SiLU(), nn.Conv2d(outer, outer, 3, padding=1)
        )
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.first(image) + self.time(time)[:, :, None, None]
        result: torch.Tensor = self.skip(image) + self.second(hidden)
        return result


class Unet(nn.Module):
    """A diffusion model's U-Net with group normalization and attention at the bottom."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.entry = nn.Conv2d(3, 8, 3, padding=1)
        self.down = Residual(8, 8, 16)
        self.smaller = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.middle = Residual(16, 16, 16)
        self.norm = nn.GroupNorm(4, 16)
        self.qkv = nn.Conv2d(16, 48, 1)
        self.out = nn.Conv2d(16, 16, 1)
        self.up = Residual(24, 8, 16)
        self.exit = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))
        self.register_buffer("frequencies", torch.exp(-torch.arange(4) * 2.0))

    def forward(self, image: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        angles = step[:, None] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        left = self.down(self.entry(image), time)
        hidden = self.middle(self.smaller(left), time)
        query, key, value = self.qkv(self.norm(hidden)).flatten(2).chunk(3, dim=1)
        weights = (query.transpose(1, 2) @ key / 4).softmax(dim=-1)
        hidden = hidden + self.out((value @ weights.transpose(1, 2)).reshape(hidden.shape))
        hidden = F.interpolate(hidden, scale_factor=2.0, mode="nearest")
        result: torch.Tensor = self.exit(self.up(torch.cat([hidden, left], dim=1), time))
        return result


class DiffusionTransformer(nn.Module):
    """Patches, blocks whose scales and shifts are computed from time and class (DiT,
    arXiv:2212.09748).
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        places = torch.arange(16).float()[:, None] * torch.exp(-torch.arange(8).float())
        self.register_buffer("positions", torch.cat([places.sin(), places.cos()], dim=1)[None])
        self.time = nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.kind = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(AdaptiveBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.exit = nn.Linear(WIDTH, 48)

    def forward(self, image: torch.Tensor, step: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        hidden = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        angles = step[:, None] * torch.exp(-torch.arange(4) * 2.0).to(hidden)
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=1)) + self.kind(kind)
        for block in self.blocks:
            hidden = block(hidden, condition)
        result: torch.Tensor = self.exit(self.norm(hidden))
        return result


class AdaptiveBlock(nn.Module):
    """Attention and MLP behind normalizations without weights of their own (adaLN-Zero)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.second = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.GELU(approximate="tanh"), nn.Linear(32, WIDTH)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, hidden: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        parts = self.modulation(condition)[:, None].chunk(6, dim=-1)
        inner = self.first(hidden) * (1 + parts[0]) + parts[1]
        hidden = hidden + parts[2] * self.attention(inner, inner, inner, need_weights=False)[0]
        inner = self.second(hidden) * (1 + parts[3]) + parts[4]
        result: torch.Tensor = hidden + parts[5] * self.mlp(inner)
        return result


class StyleGenerator(nn.Module):
    """Instance normalization whose scale comes from a style (AdaIN, arXiv:1703.06868), and one with
    its own scale.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 8, 4, 4))
        self.mapping = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2), nn.Linear(12, 16))
        self.noise = nn.Parameter(torch.zeros(8, 1, 1))
        self.plain = nn.InstanceNorm2d(8)
        self.grow = nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1)
        self.scaled = nn.InstanceNorm2d(8, affine=True)
        self.exit = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, style: torch.Tensor) -> torch.Tensor:
        scale, shift = self.mapping(style)[:, :, None, None].chunk(2, dim=1)
        hidden = self.start.expand(style.shape[0], -1, -1, -1)
        hidden = self.plain(self.grow(hidden) + self.noise) * (1 + scale) + shift
        result: torch.Tensor = self.exit(F.leaky_relu(self.scaled(hidden), 0.2)).tanh()
        return result


class Detector(nn.Module):
    """A convolutional backbone, and a decoder of learned queries over its places (DETR,
    arXiv:2005.12872).
    """

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=4, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, WIDTH, 3, stride=2),
        )
        self.queries = nn.Parameter(torch.randn(4, WIDTH))
        self.rows = nn.Parameter(torch.rand(4, WIDTH // 2))
        self.columns = nn.Parameter(torch.rand(4, WIDTH // 2))
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 24, dropout=0.0, batch_first=True)
        self.kinds = nn.Linear(WIDTH, CLASSES)
        self.boxes = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))

    def forward(
        self, image: torch.Tensor, kinds: torch.Tensor, boxes: torch.Tensor
    ) -> torch.Tensor:
        features = self.backbone(image)
        height, width = features.shape[-2:]
        places = torch.cat(
            [
                self.columns[:width][None].expand(height, -1, -1),
                self.rows[:height][:, None].expand(-1, width, -1),
            ],
            dim=-1,
        )
        memory = features.flatten(2).transpose(1, 2) + places.flatten(0, 1)[None]
        found = self.transformer(memory, self.queries[None].expand(image.shape[0], -1, -1))
        return F.cross_entropy(self.kinds(found).transpose(1, 2), kinds) + F.mse_loss(
            self.boxes(found).sigmoid(), boxes
        )


class Gates(nn.Module):
    """A GRU, both directions, over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.gru = nn.GRU(12, 10, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(20, VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.gru(self.embedding(text))[0])
        return result


class TiedGates(nn.Module):
    """A GRU without biases whose table is its head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.gru = nn.GRU(12, 12, batch_first=True, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return F.linear(self.gru(self.embedding(text))[0], self.embedding.weight)


class Recurrence(nn.Module):
    """A plain recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.rnn = nn.RNN(12, 12, batch_first=True)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.rnn(self.embedding(text))[0])
        return result


class Mixer(nn.Module):
    """An MLP over places, and one over channels (MLP-Mixer, arXiv:2105.01601)."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.places = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(image).flatten(2).transpose(1, 2)
        hidden = hidden + self.places(self.norms[0](hidden).transpose(1, 2)).transpose(1, 2)
        hidden = hidden + self.channels(self.norms[1](hidden))
        result: torch.Tensor = self.head(self.norms[2](hidden).mean(dim=1))
        return result


class Rational(nn.Module):
    """Learned numbers of every kind: slopes, temperatures, gates, a prototype for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.utils.parametrizations.weight_norm(nn.Linear(6, WIDTH))
        self.slopes = nn.PReLU(WIDTH)
        self.slope = nn.PReLU()
        self.log_scale = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.gate = nn.Parameter(torch.full((1, WIDTH), 1e-2))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.prototypes = nn.Parameter(torch.randn(CLASSES, WIDTH))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.slopes(self.entry(features)) * self.log_scale.exp()
        hidden = hidden + self.gate * self.slope(self.hidden(hidden))
        result: torch.Tensor = (
            -(hidden[:, None] - self.prototypes).square().sum(dim=-1) * self.temperature
        )
        return result


class Shared(nn.Module):
    """An autoencoder whose decoder is its encoder transposed, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(12, 6)
        self.again = nn.Linear(6, 6)
        self.offset = nn.Parameter(torch.zeros(12))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.again(self.again(self.encoder(features).relu()).relu()).relu()
        return hidden @ self.encoder.weight + self.offset


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.PReLU(8),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 12, 1)), nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10), nn.BatchNorm1d(10), nn.Hardswish(),
        nn.Linear(10, CLASSES),
    )  # fmt: skip


def _noisy() -> Tensors:
    return {
        "image": torch.randn(BATCH, 3, 16, 16),
        "step": torch.tensor([3, 7]),
        "noise": torch.randn(BATCH, 3, 16, 16),
    }


def _noisy_patches() -> Tensors:
    return {
        "image": torch.randn(BATCH, 3, 16, 16),
        "step": torch.tensor([3, 7]),
        "kind": torch.tensor([1, 4]),
        "noise": torch.randn(BATCH, 16, 48),
    }


def _text() -> Tensors:
    return {"text": tokens(), "labels": tokens()}


def _clicks() -> Tensors:
    labels = torch.randint(0, 2, (BATCH,)).float()
    return {
        "dense": torch.randn(BATCH, 13),
        "category": torch.randint(0, 30, (BATCH, 3)),
        "labels": labels,
    }


def _boxes() -> Tensors:
    return {
        "image": torch.randn(BATCH, 3, 32, 32),
        "kinds": torch.randint(0, CLASSES, (BATCH, 4)),
        "boxes": torch.rand(BATCH, 4, 4),
    }


def _features(width: int, target: int = 0) -> Tensors:
    wanted = torch.randn(BATCH, target) if target else torch.randint(0, CLASSES, (BATCH,))
    return {"features": torch.randn(BATCH, width), "labels": wanted}


OTHER: dict[str, WithLoss] = {
    "vit": hugging_face("ViT", "ForImageClassification", _images, **_CLASSIFIER),
    "deit": hugging_face("DeiT", "ForImageClassification", _images, **_CLASSIFIER),
    "beit": hugging_face(
        "Beit", "ForImageClassification", _images, **_CLASSIFIER, use_relative_position_bias=True,
        layer_scale_init_value=0.1,
    ),
    "beit_shared": hugging_face(
        "Beit", "ForImageClassification", _images, **_CLASSIFIER, use_shared_relative_position_bias=True,
        use_absolute_position_embeddings=True, layer_scale_init_value=0.1,
    ),
    "dinov2": hugging_face("Dinov2", "ForImageClassification", _images, **_CLASSIFIER),
    "swin": hugging_face(
        "Swin", "ForImageClassification", _images, image_size=32, patch_size=4, embed_dim=8, depths=[2, 1],
        num_heads=[2, 2], window_size=4, num_labels=CLASSES, drop_path_rate=0.0,
    ),
    "swinv2": hugging_face(
        "Swinv2", "ForImageClassification", _images, image_size=32, patch_size=4, embed_dim=8, depths=[2, 1],
        num_heads=[2, 2], window_size=4, num_labels=CLASSES, drop_path_rate=0.0,
    ),
    "convnext": hugging_face(
        "ConvNext", "ForImageClassification", _images, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
        image_size=32, num_labels=CLASSES,
    ),
    "convnextv2": hugging_face(
        "ConvNextV2", "ForImageClassification", _images, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2,
        image_size=32, num_labels=CLASSES,
    ),
    "segformer": hugging_face(
        "Segformer", "ForSemanticSegmentation", _scenes, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
        hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
        decoder_hidden_size=12, num_labels=CLASSES, drop_path_rate=0.0, classifier_dropout_prob=0.0, training=True,
    ),
    "mobilevit": hugging_face(
        "MobileViT", "ForImageClassification", _images, image_size=32, hidden_sizes=[8, 12, 16],
        neck_hidden_sizes=[4, 4, 8, 8, 12, 16, 16], num_attention_heads=2, num_labels=CLASSES, training=True,
        hidden_dropout_prob=0.0, classifier_dropout_prob=0.0,
    ),
    "resnet": hugging_face(
        "ResNet", "ForImageClassification", _images, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
        layer_type="basic", num_labels=CLASSES, training=True,
    ),
    "regnet": hugging_face(
        "RegNet", "ForImageClassification", _images, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
        groups_width=4, num_labels=CLASSES, training=True,
    ),
    "mobilenet_v2": hugging_face(
        "MobileNetV2", "ForImageClassification", _images, image_size=32, depth_multiplier=0.25, num_labels=CLASSES,
        classifier_dropout_prob=0.0, training=True,
    ),
    "poolformer": hugging_face(
        "PoolFormer", "ForImageClassification", _images, hidden_sizes=[8, 16], depths=[1, 1], num_encoder_blocks=2,
        patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1], num_labels=CLASSES, drop_path_rate=0.0,
    ),
    "clip": hugging_face("CLIP", "Model", _captions, of=_similarity, output="logits_per_text", text_config=_TOWER,
                         vision_config=_TOWER, projection_dim=12),
    "siglip": hugging_face("Siglip", "Model", _captions, of=_pairwise, output="logits_per_text",
                           text_config={**_TOWER, "max_position_embeddings": SEQUENCE, "projection_size": WIDTH},
                           vision_config=_TOWER),
    "wav2vec2": hugging_face("Wav2Vec2", "ForCTC", _sounds, of=_loudness, **_LISTENER),
    "hubert": hugging_face("Hubert", "ForCTC", _sounds, of=_loudness, **_LISTENER),
    "whisper": hugging_face(
        "Whisper", "ForConditionalGeneration", _spectra, vocab_size=VOCABULARY, num_mel_bins=8, d_model=WIDTH,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, max_source_positions=8, max_target_positions=16, dropout=0.0, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ),
    "audio_transformer": hugging_face(
        "AST", "ForAudioClassification",
        lambda: {"input_values": torch.randn(BATCH, 24, 16), "labels": torch.randint(0, CLASSES, (BATCH,))},
        **{**_CLASSIFIER, "max_length": 24, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
    ),
    "dit": WithLoss(lambda: Regression(DiffusionTransformer()), _noisy_patches),
    "unet": WithLoss(lambda: Regression(Unet()), _noisy),
    "style": WithLoss(
        lambda: Regression(StyleGenerator()),
        lambda: {"style": torch.randn(BATCH, 6), "image": torch.rand(BATCH, 3, 8, 8)},
    ),
    "detr": WithLoss(Detector, _boxes, training=True),
    "lstm": WithLoss(lambda: OnlyLoss(LanguageModel()), _text),
    "gru": WithLoss(lambda: Classification(Gates()), _text),
    "gru_tied": WithLoss(lambda: Classification(TiedGates()), _text),
    "rnn": WithLoss(lambda: Classification(Recurrence()), _text),
    "dlrm": WithLoss(lambda: OnlyLoss(Recommender()), _clicks),
    "mixer": WithLoss(lambda: Classification(Mixer()), _images),
    "rational": WithLoss(lambda: Classification(Rational()), lambda: _features(6)),
    "autoencoder": WithLoss(lambda: Regression(Shared()), lambda: _features(12, 12)),
    "convolutions": WithLoss(lambda: Classification(_convolutions()), _images, training=True),
}  # fmt: skip
"""By name."""
