"""Language models of `transformers`, each with its loss, as small as keeps every part."""

from __future__ import annotations

from typing import Any

import torch

from tests.exports.with_loss import SEQUENCE, VOCABULARY, Tensors, WithLoss, hugging_face, tokens

WIDTH = 16
HEADS = 2
LAYERS = 2


def sentences() -> Tensors:
    """Tokens and what they are to be."""
    return {"input_ids": tokens(), "labels": tokens()}


def _masked() -> Tensors:
    mask = torch.ones(2, SEQUENCE, dtype=torch.int64)
    mask[1, -2:] = 0
    return {"input_ids": tokens(), "attention_mask": mask, "labels": tokens()}


def _pairs() -> Tensors:
    return {"input_ids": tokens(), "decoder_input_ids": tokens(), "labels": tokens()}


def llama_like(name: str, head: str = "ForCausalLM", **settings: Any) -> WithLoss:
    """Rotary positions, grouped heads and a gated MLP."""
    common = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": 1, "max_position_embeddings": 16, "use_cache": False,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return hugging_face(name, head, _masked, **{**common, **settings})


def _bert_like(name: str, head: str = "ForMaskedLM", **settings: Any) -> WithLoss:
    """Learned positions, and layer normalization behind each sum."""
    common = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "intermediate_size": 24, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
    }  # fmt: skip
    return hugging_face(name, head, _masked, **{**common, **settings})


def bart_like(name: str, **settings: Any) -> WithLoss:
    """An encoder and a decoder that share one table."""
    common = {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
        "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24, "max_position_embeddings": 16, "dropout": 0.0, "use_cache": False, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    }  # fmt: skip
    head = "MTModel" if name == "Marian" else "ForConditionalGeneration"
    return hugging_face(name, head, _pairs, **{**common, **settings})


def _t5_like(name: str, **settings: Any) -> WithLoss:
    """An encoder and a decoder with relative positions."""
    common = {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": LAYERS,
        "num_decoder_layers": LAYERS, "num_heads": HEADS, "dropout_rate": 0.0, "use_cache": False,
        "decoder_start_token_id": 0,
    }  # fmt: skip
    return hugging_face(name, "ForConditionalGeneration", _pairs, **{**common, **settings})


EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
"""Sizes of a mixture of experts."""

TEXT: dict[str, WithLoss] = {
    "gpt2": hugging_face(
        "GPT2", "LMHeadModel", _masked, vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=LAYERS,
        n_head=HEADS, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "gpt_neo": hugging_face(
        "GPTNeo", "ForCausalLM", _masked, vocab_size=VOCABULARY, max_position_embeddings=16, hidden_size=WIDTH,
        num_layers=LAYERS, attention_types=[[["global", "local"], 1]], num_heads=HEADS, window_size=4, use_cache=False,
    ),
    "gptj": hugging_face(
        "GPTJ", "ForCausalLM", _masked, vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=LAYERS,
        n_head=HEADS, rotary_dim=4, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "gpt_neox": hugging_face(
        "GPTNeoX", "ForCausalLM", _masked, vocab_size=VOCABULARY, max_position_embeddings=16, hidden_size=WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=24, use_cache=False,
    ),
    "opt": hugging_face(
        "OPT", "ForCausalLM", _masked, vocab_size=VOCABULARY, max_position_embeddings=16, hidden_size=WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, ffn_dim=24, word_embed_proj_dim=WIDTH, use_cache=False,
        dropout=0.0,
    ),
    "bloom": hugging_face(
        "Bloom", "ForCausalLM", _masked, vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS,
        use_cache=False,
    ),
    "falcon": hugging_face(
        "Falcon", "ForCausalLM", _masked, vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, use_cache=False,
    ),
    "llama": llama_like("Llama"),
    "mistral": llama_like("Mistral", sliding_window=4),
    "qwen2": llama_like("Qwen2"),
    "qwen3": llama_like("Qwen3", head_dim=8),
    "qwen3_moe": llama_like("Qwen3Moe", num_experts=4, **EXPERTS),
    "deepseek_v3": llama_like(
        "DeepseekV3", n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=12,
        n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=8, num_key_value_heads=2,
    ),
    "mixtral": llama_like("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "olmo2": llama_like("Olmo2"),
    "olmoe": llama_like("Olmoe", num_experts=4, num_experts_per_tok=2),
    "gpt_oss": llama_like("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8),
    "phi": llama_like("Phi", num_key_value_heads=2),
    "phi3": llama_like("Phi3"),
    "gemma2": llama_like("Gemma2", head_dim=8),
    "gemma3": llama_like("Gemma3", configuration="Gemma3TextConfig", head_dim=8, sliding_window=4),
    "stablelm": llama_like("StableLm"),
    "starcoder2": llama_like("Starcoder2"),
    "cohere": llama_like("Cohere"),
    "mamba": hugging_face(
        "Mamba", "ForCausalLM", sentences, vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4,
        num_hidden_layers=LAYERS, use_cache=False,
    ),
    "mamba2": hugging_face(
        "Mamba2", "ForCausalLM", sentences, vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4,
        num_hidden_layers=LAYERS, num_heads=4, head_dim=8, n_groups=1, chunk_size=4, use_cache=False,
    ),
    "rwkv": hugging_face(
        "Rwkv", "ForCausalLM", sentences, vocab_size=VOCABULARY, hidden_size=WIDTH, context_length=16,
        num_hidden_layers=LAYERS, use_cache=False,
    ),
    "bert": _bert_like("Bert"),
    "albert": _bert_like("Albert", embedding_size=8),
    "roberta": _bert_like("Roberta"),
    "electra": _bert_like("Electra", embedding_size=8),
    "deberta": _bert_like("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=8),
    "deberta_v2": _bert_like(
        "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=8,
        position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True,
    ),
    "mpnet": _bert_like("MPNet"),
    "convbert": _bert_like("ConvBert", embedding_size=WIDTH, conv_kernel_size=3),
    "layoutlm": _bert_like("LayoutLM", max_2d_position_embeddings=16),
    "longformer": _bert_like("Longformer", attention_window=4),
    "modernbert": _bert_like("ModernBert", cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
    "distilbert": hugging_face(
        "DistilBert", "ForMaskedLM", _masked, vocab_size=VOCABULARY, max_position_embeddings=16, dim=WIDTH,
        n_layers=LAYERS, n_heads=HEADS, hidden_dim=24, dropout=0.0, attention_dropout=0.0,
    ),
    "xlnet": hugging_face(
        "XLNet", "LMHeadModel", sentences, vocab_size=VOCABULARY, d_model=WIDTH, n_layer=LAYERS, n_head=HEADS,
        d_inner=24, dropout=0.0,
    ),
    "fnet": hugging_face(
        "FNet", "ForMaskedLM", sentences, vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS,
        intermediate_size=24, max_position_embeddings=16, hidden_dropout_prob=0.0,
    ),
    "bart": bart_like("Bart"),
    "pegasus": bart_like("Pegasus"),
    "marian": bart_like("Marian"),
    "m2m_100": bart_like("M2M100", encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    "t5": _t5_like("T5"),
    "mt5": _t5_like("MT5"),
    "switch_transformers": _t5_like("SwitchTransformers", num_experts=2, num_sparse_encoder_layers=1,
                                     num_sparse_decoder_layers=1),
}  # fmt: skip
"""By name."""
