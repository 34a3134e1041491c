"""Decoders of `transformers` exported with their cache of keys and values, under the names of
Optimum's files, and the tokens that ONNX Runtime gives for them.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from tests.exports.export import cache

if TYPE_CHECKING:
    from torch import nn

LAYERS = 4
VOCABULARY = 256
POSITIONS = 128
_COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    # Weights so large that the likeliest token changes from step to step.
    "gpt2": ("GPT2LMHeadModel", {"n_positions": POSITIONS, "n_embd": 32, "n_layer": LAYERS, "n_head": 4}, 4),
    "llama": (
        "LlamaForCausalLM",
        {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": POSITIONS,
        },
        2,
    ),
}  # fmt: skip
"""By name the class, its settings, and heads of keys and values."""


def decoder_file(kind: str, exporter: str = "torchscript") -> Path:
    """The export, made where it is not on disk yet: symbolic batch, tokens and cached tokens."""
    path = cache(Path(__file__)) / f"decoder-{kind}-{exporter}.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as draft, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _export(kind, exporter, Path(draft) / path.name)
            (Path(draft) / path.name).rename(path)
    return path


def _module(kind: str) -> nn.Module:
    """The model called with its past as tensors one behind the other, as an export has them."""
    import torch
    import transformers

    class Decoder(torch.nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(
            self,
            ids: torch.Tensor,
            mask: torch.Tensor,
            positions: torch.Tensor,
            *past: torch.Tensor,
        ) -> tuple[torch.Tensor, ...]:
            pairs = tuple(zip(past[::2], past[1::2], strict=True))
            result = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=transformers.DynamicCache(pairs),
                use_cache=True,
            )
            return (
                result.logits,
                *(
                    each
                    for layer in result.past_key_values.layers
                    for each in (layer.keys, layer.values)
                ),
            )

    name, settings, _ = _KINDS[kind]
    made = getattr(transformers, name)
    torch.manual_seed(0)
    model = made._from_config(
        made.config_class(**_COMMON, **settings, initializer_range=0.4), attn_implementation="eager"
    )
    return Decoder(model.eval()).eval()


def _export(kind: str, exporter: str, path: Path) -> None:
    import torch

    heads = _KINDS[kind][2]
    batch = 2
    tokens = 3
    cached = 5
    caches = [f"{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")]
    past = [torch.randn(batch, heads, cached, 8) for _ in caches]
    mask = torch.ones(batch, cached + tokens, dtype=torch.int64)
    positions = torch.arange(cached, cached + tokens).expand(batch, tokens).contiguous()
    inputs = (torch.randint(0, VOCABULARY, (batch, tokens)), mask, positions, *past)
    names = [
        "input_ids",
        "attention_mask",
        "position_ids",
        *(f"past_key_values.{each}" for each in caches),
    ]
    outputs = ["logits", *(f"present.{each}" for each in caches)]
    if exporter == "dynamo":
        from torch.export import Dim

        rows = Dim("batch_size")
        columns = Dim("sequence_length")
        before = Dim("past_sequence_length")
        tokens_shape = {0: rows, 1: columns}
        shapes = (
            tokens_shape,
            {0: rows, 1: Dim.AUTO},
            tokens_shape,
            tuple({0: rows, 2: before} for _ in past),
        )
        torch.onnx.export(
            _module(kind), inputs, str(path), dynamo=True, input_names=names, output_names=outputs,
            dynamic_shapes=shapes, external_data=False, verbose=False,
        )  # fmt: skip
        return
    both = "past_sequence_length + sequence_length"
    tokens_axes = {0: "batch_size", 1: "sequence_length"}
    axes = {
        "input_ids": tokens_axes,
        "position_ids": tokens_axes,
        "attention_mask": {0: "batch_size", 1: both},
    }
    axes |= {name: {0: "batch_size", 2: "past_sequence_length"} for name in names[3:]}
    axes |= {"logits": tokens_axes, **{name: {0: "batch_size", 2: both} for name in outputs[1:]}}
    torch.onnx.export(
        _module(kind),
        inputs,
        str(path),
        dynamo=False,
        input_names=names,
        output_names=outputs,
        dynamic_axes=axes,
    )


def merge(source: Path, target: Path) -> None:
    """A step with a cache and the same step without in the branches of one If, as Optimum merges
    decoders: an input says which of them is run.
    """
    steps = onnx.load(source)
    graph = steps.graph
    first = onnx.compose.add_prefix_graph(
        _without_past(graph), "first/", rename_initializers=False, rename_inputs=False
    )
    branches = {}
    for name, nodes, outputs in (
        ("then", graph.node, graph.output),
        ("else", first.node, first.output),
    ):
        branches[f"{name}_branch"] = onnx.helper.make_graph(list(nodes), name, [], list(outputs))
    outputs = [onnx.helper.make_tensor_value_info(each.name, 1, None) for each in graph.output]
    chosen = onnx.helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1])
    node = onnx.helper.make_node(
        "If", ["use_cache_branch"], [each.name for each in outputs], "decoder", **branches
    )
    merged = onnx.helper.make_graph(
        [node], "merged", [*graph.input, chosen], outputs, list(graph.initializer)
    )
    onnx.save(
        onnx.helper.make_model(
            merged, opset_imports=steps.opset_import, ir_version=steps.ir_version
        ),
        target,
    )


def _without_past(graph: onnx.GraphProto) -> onnx.GraphProto:
    """The same step of the tokens alone, of whatever cache it is given none."""
    found = onnx.GraphProto()
    found.CopyFrom(graph)
    past = [each.name for each in graph.input if each.name.startswith("past")]
    for node in found.node:
        node.input[:] = [f"{name}/none" if name in past else name for name in node.input]
    limits = [
        onnx.numpy_helper.from_array(np.array([number]), f"limit/{number}") for number in (0, 2)
    ]
    constants = [onnx.helper.make_node("Constant", [], [each.name], value=each) for each in limits]
    parts = ["limit/0", "limit/0", "limit/2"]
    empty = [onnx.helper.make_node("Slice", [name, *parts], [f"{name}/none"]) for name in past]
    nodes = [*constants, *empty, *found.node]
    del found.node[:]
    found.node.extend(nodes)
    return found


def reference_tokens(path: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The likeliest tokens after each prompt as ONNX Runtime gives them, one sequence after the
    other, its cache grown from nothing.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    outputs = [each.name for each in session.get_outputs()]
    given = {each.name for each in session.get_inputs()}
    found = []
    for prompt in prompts:
        past = {
            each.name: np.zeros((1, each.shape[1], 0, each.shape[3]), np.float32)
            for each in session.get_inputs()
            if each.name.startswith("past")
        }
        ids = prompt
        start = 0
        tokens = []
        for _ in range(count):
            stop = start + len(ids)
            feed = {
                "input_ids": [ids],
                "attention_mask": [[1] * stop],
                "position_ids": [list(range(start, stop))],
            }
            arrays = {name: np.array(value) for name, value in feed.items() if name in given}
            results = dict(zip(outputs, session.run(None, arrays | past), strict=True))
            past = {name: results[name.replace("past_key_values", "present")] for name in past}
            tokens.append(int(results["logits"][0, -1].argmax()))
            ids = tokens[-1:]
            start = stop
        found.append(tokens)
    return found
