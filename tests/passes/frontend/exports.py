"""Small random models of `transformers` as ONNX, through both of torch's exporters."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS = ("gpt2", "llama", "bert", "t5", "vit", "resnet")
CASES = [
    (name, exporter, dynamic)
    for name in MODELS
    for exporter in ("dynamo", "script")
    for dynamic in (False, True)
]
BATCH = 2
LENGTH = 16
VOCABULARY = 99


def export(name: str, exporter: str, dynamic: bool, folder: Path) -> Path:
    """The model's file, made once in `folder`."""
    path = folder / f"{name}-{exporter}-{'dynamic' if dynamic else 'static'}.onnx"
    if not path.exists():
        draft = path.with_suffix(f".{os.getpid()}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            try:
                _write(name, exporter, dynamic, draft)
            finally:
                logging.disable(logging.NOTSET)
        draft.rename(path)
    return path


def _write(name: str, exporter: str, dynamic: bool, path: Path) -> None:
    import torch

    torch.manual_seed(0)
    model, arguments = _model(name)
    names = [f"input_{index}" for index in range(len(arguments))]
    if exporter == "script":
        axes = {each: {0: "batch"} for each in names} if dynamic else None
        torch.onnx.export(
            model, arguments, str(path), dynamo=False, input_names=names, dynamic_axes=axes
        )
        return
    shapes = (({0: torch.export.Dim("batch")},) * len(arguments),) if dynamic else None
    torch.onnx.export(
        model, arguments, str(path), dynamo=True, input_names=names, dynamic_shapes=shapes, verbose=False,
        external_data=False,
    )  # fmt: skip


def _model(name: str) -> tuple[Any, tuple[Any, ...]]:
    import torch
    import transformers as hf

    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    mask = torch.ones_like(tokens)
    image = torch.randn(BATCH, 3, 32, 32)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    words = {"vocab_size": VOCABULARY}
    if name == "gpt2":
        gpt2 = hf.GPT2LMHeadModel(
            hf.GPT2Config(**words, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        )
        return _wrapped(gpt2, _language_loss), (tokens, mask, tokens)
    if name == "llama":
        llama = hf.LlamaForCausalLM(hf.LlamaConfig(**words, **sizes, num_key_value_heads=2))
        return _wrapped(llama, _language_loss), (tokens, mask, tokens)
    if name == "bert":
        bert = hf.BertForMaskedLM(hf.BertConfig(**words, **sizes))
        return _wrapped(bert, lambda m, i, k: m(input_ids=i, attention_mask=k)[0]), (tokens, mask)
    if name == "t5":
        # The newer exporter takes T5's attention only where it is spelt out.
        small = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        t5 = hf.T5ForConditionalGeneration(
            hf.T5Config(**words, **small, attn_implementation="eager", decoder_start_token_id=0)
        )
        return _wrapped(t5, lambda m, i, k: m(input_ids=i, labels=k, use_cache=False)[:2]), (
            tokens,
            tokens,
        )
    if name == "vit":
        vit = hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=32, patch_size=8))
        return _wrapped(vit, lambda m, i: m(i)[0]), (image,)
    small = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}
    resnet = hf.ResNetForImageClassification(hf.ResNetConfig(**small))
    return _wrapped(resnet, lambda m, i: m(i)[0]), (image,)


def _language_loss(model: Any, tokens: Any, mask: Any, labels: Any) -> Any:
    return model(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False)[:2]


def _wrapped(model: Any, forward: Callable[..., Any]) -> Any:
    """A module with positional inputs, no two of whose weights are equal (exporters merge equal
    ones).
    """
    import torch

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *arguments: Any) -> Any:
            return forward(self.model, *arguments)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return Wrapped().eval()
