"""Language models whose layers are of several kinds: state spaces beside attention, experts one by
one.
"""

from __future__ import annotations

from typing import Any

from tests.exports.text_models import EXPERTS, HEADS, WIDTH, bart_like, llama_like, sentences
from tests.exports.with_loss import VOCABULARY, WithLoss, hugging_face

_STATES: dict[str, Any] = {
    "mamba_d_state": 4,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "num_hidden_layers": 4,
}
"""Sizes of a Mamba layer."""
_HEADED = {
    **_STATES,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
"""Sizes of a Mamba-2 layer."""


TEXT: dict[str, WithLoss] = {
    "qwen3_moe_eager": llama_like("Qwen3Moe", num_experts=4, **{**EXPERTS, "num_experts_per_tok": 3}, experts="eager"),
    "qwen2_moe": llama_like("Qwen2Moe", num_experts=4, shared_expert_intermediate_size=16, **EXPERTS),
    "mixtral_eager": llama_like("Mixtral", num_local_experts=4, num_experts_per_tok=2, experts="eager"),
    "granite": llama_like("Granite"),
    "smollm3": llama_like("SmolLM3", no_rope_layer_interval=2),
    "olmo3": llama_like("Olmo3", sliding_window=4, num_hidden_layers=4),
    "glm4": llama_like("Glm4", head_dim=8),
    "jamba": llama_like(
        "Jamba", **_STATES, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, num_experts=2, num_experts_per_tok=1, use_mamba_kernels=False,
    ),
    "bamba": llama_like("Bamba", **_HEADED, attn_layer_indices=[1, 3]),
    "falcon_h1": llama_like("FalconH1", **_HEADED, mamba_d_ssm=32, head_dim=8),
    "granite_hybrid": llama_like(
        "GraniteMoeHybrid", **_HEADED, layer_types=["mamba", "attention", "mamba", "attention"], num_local_experts=0,
        shared_intermediate_size=24,
    ),
    "zamba2": llama_like(
        "Zamba2", **{**_STATES, "mamba_ngroups": 1, "n_mamba_heads": 4, "chunk_size": 4}, use_mamba_kernels=False,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], num_key_value_heads=HEADS, attention_head_dim=16,
        num_mem_blocks=1,
    ),
    "lfm2": llama_like(
        "Lfm2", block_multiple_of=4, layer_types=["conv", "full_attention", "conv", "full_attention"],
        num_hidden_layers=4,
    ),
    "recurrent_gemma": llama_like(
        "RecurrentGemma", block_types=("recurrent", "attention"), lru_width=WIDTH, attention_window_size=8,
        head_dim=8,
    ),
    "xlstm": hugging_face(
        "xLSTM", "ForCausalLM", sentences, vocab_size=VOCABULARY, hidden_size=32, num_heads=2, num_blocks=2,
        chunk_size=8, use_cache=False, mode="train",
    ),
    "mbart": bart_like("MBart"),
}  # fmt: skip
"""By name."""
