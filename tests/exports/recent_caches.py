"""Steps of decoders that are given the keys and values of former tokens, as files for generation
have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.exports.with_loss import BATCH, VOCABULARY, Tensors, WithLoss, tokens

WIDTH = 16
HEADS = 2
HEAD = 8
LAYERS = 2
PAST = 5


class Step(nn.Module):
    """One more token of a decoder: its scores, and the cache with it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, text: torch.Tensor, mask: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        from transformers import DynamicCache

        cache = DynamicCache(tuple(zip(past[::2], past[1::2], strict=True)))
        result = self.model(
            input_ids=text, attention_mask=mask, past_key_values=cache, use_cache=True
        )
        return result.logits, *_tensors(result.past_key_values)


class CrossStep(nn.Module):
    """One more token of a decoder that reads an encoder, whose keys and values are cached too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, text: torch.Tensor, encoded: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        from transformers import DynamicCache, EncoderDecoderCache

        pairs = list(zip(past[::2], past[1::2], strict=True))
        cache = EncoderDecoderCache(DynamicCache(pairs[::2]), DynamicCache(pairs[1::2]))
        for layer in range(len(pairs) // 2):
            cache.is_updated[layer] = True
        result = self.model(
            decoder_input_ids=text,
            encoder_outputs=(encoded,),
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
        return result.logits, *_tensors(result.past_key_values.self_attention_cache)


def _tensors(cache: Any) -> Sequence[torch.Tensor]:
    return [each for layer in cache.layers for each in (layer.keys, layer.values)]


def _model(name: str, configuration: str = "", **settings: Any) -> nn.Module:
    import transformers

    common = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    kind = getattr(transformers, name)
    made = getattr(transformers, configuration) if configuration else kind.config_class
    model: nn.Module = kind._from_config(made(**common, **settings), attn_implementation="eager")
    return model


def _step(name: str, heads: int = HEADS, **settings: Any) -> WithLoss:
    """A decoder's step with a cache of this many heads."""

    def inputs() -> Tensors:
        mask = torch.ones(BATCH, PAST + 1, dtype=torch.int64)
        mask[1, :2] = 0
        return {"input_ids": tokens(length=1), "attention_mask": mask, **_past(heads, {"": PAST})}

    return WithLoss(lambda: Step(_model(name, **settings)), inputs)


def _past(heads: int, lengths: dict[str, int]) -> Tensors:
    return {
        f"past_key_values.{layer}.{kind}{part}": torch.randn(BATCH, heads, length, HEAD)
        for layer in range(LAYERS)
        for kind, length in lengths.items()
        for part in ("key", "value")
    }


def _cross_step(build: Callable[[], nn.Module], encoded: int) -> WithLoss:
    """A step of the decoder behind an encoder that gave this many places."""

    def inputs() -> Tensors:
        places = torch.randn(BATCH, encoded, WIDTH)
        past = _past(HEADS, {"decoder.": PAST, "encoder.": encoded})
        return {"decoder_input_ids": tokens(length=1), "encoder_hidden_states": places, **past}

    return WithLoss(lambda: CrossStep(build()), inputs)


_LLAMA: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip
_BART: dict[str, Any] = {
    "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 1,
}  # fmt: skip


def _whisper() -> nn.Module:
    settings = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}
    return _model("WhisperForConditionalGeneration", **_BART, **settings)


def _t5() -> nn.Module:
    return _model(
        "T5ForConditionalGeneration", d_model=WIDTH, d_kv=HEAD, d_ff=24, num_layers=LAYERS, num_heads=HEADS,
        decoder_start_token_id=0,
    )  # fmt: skip


CACHES: dict[str, WithLoss] = {
    "gpt2_step": _step(
        "GPT2LMHeadModel", n_positions=32, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS
    ),
    "qwen3_step": _step("Qwen3ForCausalLM", heads=1, head_dim=HEAD, **_LLAMA),
    "gemma2_step": _step("Gemma2ForCausalLM", heads=1, head_dim=HEAD, **_LLAMA),
    "phi3_step": _step("Phi3ForCausalLM", heads=1, **_LLAMA),
    "falcon_step": _step(
        "FalconForCausalLM",
        heads=1,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
    ),
    "bloom_step": _step("BloomForCausalLM", hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS),
    "whisper_step": _cross_step(_whisper, 8),
    "bart_step": _cross_step(
        lambda: _model("BartForConditionalGeneration", max_position_embeddings=32, **_BART), 6
    ),
    "t5_step": _cross_step(_t5, 6),
}
"""By name."""
