"""Models of speech and music, of `transformers`."""

from __future__ import annotations

from typing import Any

import torch

from tests.exports.with_loss import (
    BATCH,
    SEQUENCE,
    VOCABULARY,
    Tensors,
    WithLoss,
    hugging_face,
    tokens,
)

WIDTH = 16
BOOKS = BATCH


def _codes() -> Tensors:
    """One sample: a row for each book of codes."""
    return {"input_ids": tokens()}


def _spoken() -> Tensors:
    return {"input_ids": tokens(), "decoder_input_values": torch.randn(BATCH, SEQUENCE, 8)}


_SPEECH: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "num_mel_bins": 8, "speech_decoder_prenet_units": WIDTH, "speech_decoder_postnet_units": WIDTH,
    "speech_decoder_prenet_dropout": 0.0, "max_text_positions": 16, "max_speech_positions": 32,
    "speaker_embedding_dim": 0, "speech_decoder_prenet_layers": 2, "speech_decoder_postnet_layers": 2,
    "reduction_factor": 1,
}  # fmt: skip

SOUND: dict[str, WithLoss] = {
    "musicgen": hugging_face(
        "Musicgen", "ForCausalLM", _codes, configuration="MusicgenDecoderConfig", vocab_size=VOCABULARY,
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, num_codebooks=BOOKS, dropout=0.0,
        use_cache=False, max_position_embeddings=32, pad_token_id=0, bos_token_id=0,
    ),
    "vits_text": hugging_face(
        "Vits", "Model", lambda: {"input_ids": tokens()}, vocab_size=VOCABULARY, hidden_size=WIDTH,
        num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, flow_size=8, spectrogram_bins=9, output="waveform",
        upsample_initial_channel=32, speaking_rate=8.0,
        noise_scale=0.0, noise_scale_duration=0.0,  # ONNX Runtime draws other numbers.
    ),
    "speech_t5": hugging_face("SpeechT5", "ForTextToSpeech", _spoken, output="spectrogram", **_SPEECH),
    "sew": hugging_face(
        "SEW", "ForCTC", lambda: {"input_values": torch.randn(BATCH, 400)}, vocab_size=VOCABULARY, hidden_size=WIDTH,
        num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8), conv_stride=(5, 2),
        conv_kernel=(10, 3), squeeze_factor=1, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    ),
    "wav2vec2_conformer": hugging_face(
        "Wav2Vec2Conformer", "ForCTC", lambda: {"input_values": torch.randn(BATCH, 400)}, vocab_size=VOCABULARY,
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, conv_dim=(8, 8),
        conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, conv_depthwise_kernel_size=3,
        position_embeddings_type="rotary", rotary_embedding_base=10000,
    ),
}  # fmt: skip
"""By name."""
