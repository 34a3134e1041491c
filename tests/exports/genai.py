"""A decoder as onnxruntime-genai's model builder writes it, by hand: GroupQueryAttention with its
cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import onnx.numpy_helper as onh

DOMAIN = "com.microsoft"
VOCABULARY = 256
HIDDEN = 64
HEADS = 4
GROUPS = 2
SIZE = 16
PLACES = 96
INNER = 96


def decoder(file: Path, layers: int = 2, packed: bool = False, **settings: object) -> Path:
    """Write a decoder with random weights whose samples, tokens and cached tokens are symbols."""
    random = np.random.default_rng(0)
    held: dict[str, np.ndarray] = {}
    nodes: list[onnx.NodeProto] = []

    def weight(name: str, *shape: int) -> str:
        held[name] = (random.standard_normal(shape) * 0.4).astype(np.float32)
        return name

    def add(op: str, *operands: str, to: str, domain: str = "", **attributes: object) -> str:
        results = to.split()
        nodes.append(
            oh.make_node(
                op, operands, results, name=f"/{results[0]}/{op}", domain=domain, **attributes
            )
        )
        return results[0]

    def constant(name: str, *numbers: int) -> str:
        held[name] = np.array(
            numbers if len(numbers) != 1 or name == "one" else numbers[0], np.int64
        )
        return name

    angles = np.arange(PLACES)[:, None] / 10000 ** (np.arange(SIZE // 2) * 2 / SIZE)
    held["cos_cache"], held["sin_cache"] = (
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
    )
    total = add("ReduceSum", "attention_mask", constant("one", 1), to="mask_sum", keepdims=0)
    total = add("Cast", add("Sub", total, "one", to="less"), to="seqlens_k", to_=6)
    extent = add(
        "Gather",
        add("Shape", "attention_mask", to="mask_shape"),
        constant("axis", 1),
        to="extent",
        axis=0,
    )
    extent = add("Cast", extent, to="total_seq_len", to_=6)
    x = add("Gather", weight("embed.weight", VOCABULARY, HIDDEN), "input_ids", to="embedded")
    normal = add(
        "SimplifiedLayerNormalization",
        x,
        weight("norm0.weight", HIDDEN),
        to="n0",
        axis=-1,
        epsilon=1e-5,
    )
    widths = {"q": HEADS * SIZE, "k": GROUPS * SIZE, "v": GROUPS * SIZE}
    for layer in range(layers):
        at = f"layers.{layer}"
        if packed:
            product = add(
                "MatMul",
                normal,
                weight(f"{at}.qkv.weight", HIDDEN, sum(widths.values())),
                to=f"{at}.qkv",
            )
            words = [product, "", ""]
        else:
            words = [
                add(
                    "MatMul",
                    normal,
                    weight(f"{at}.{each}.weight", HIDDEN, width),
                    to=f"{at}.{each}",
                )
                for each, width in widths.items()
            ]
        past = [f"past_key_values.{layer}.{each}" for each in ("key", "value")]
        present = [f"present.{layer}.{each}" for each in ("key", "value")]
        result = add(
            "GroupQueryAttention",
            *(*words, *past, total, extent, "cos_cache", "sin_cache"),
            to=" ".join([f"{at}.attended", *present]),
            domain=DOMAIN,
            **{"num_heads": HEADS, "kv_num_heads": GROUPS, "do_rotary": 1, **settings},
        )
        result = add("MatMul", result, weight(f"{at}.o.weight", HEADS * SIZE, HIDDEN), to=f"{at}.o")
        nodes.append(_skip(x, result, weight(f"{at}.norm1.weight", HIDDEN), f"{at}.n1", f"{at}.x1"))
        gate = add(
            "MatMul", f"{at}.n1", weight(f"{at}.gate.weight", HIDDEN, INNER), to=f"{at}.gate"
        )
        up = add("MatMul", f"{at}.n1", weight(f"{at}.up.weight", HIDDEN, INNER), to=f"{at}.up")
        act = add("Mul", gate, add("Sigmoid", gate, to=f"{at}.sigmoid"), to=f"{at}.silu")
        inner = add("Mul", act, up, to=f"{at}.inner")
        down = add("MatMul", inner, weight(f"{at}.down.weight", INNER, HIDDEN), to=f"{at}.down")
        nodes.append(
            _skip(f"{at}.x1", down, weight(f"{at}.norm2.weight", HIDDEN), f"{at}.n2", f"{at}.x2")
        )
        normal = f"{at}.n2"
        x = f"{at}.x2"
    add("MatMul", normal, weight("lm_head.weight", HIDDEN, VOCABULARY), to="logits")
    graph = oh.make_graph(
        [_cast(node) for node in nodes],
        "decoder",
        [*_inputs(layers)],
        [
            oh.make_tensor_value_info(
                "logits", onnx.TensorProto.FLOAT, ["batch_size", "sequence_length", VOCABULARY]
            ),
            *(
                _cache("present", layer, "total_sequence_length", each)
                for layer, each in _places(layers)
            ),
        ],
        [onh.from_array(array, name) for name, array in held.items()],
    )
    opsets = [oh.make_opsetid("", 21), oh.make_opsetid(DOMAIN, 1)]
    onnx.save(oh.make_model(graph, opset_imports=opsets, ir_version=10), file)
    return file


def _skip(x: str, y: str, scale: str, normal: str, total: str) -> onnx.NodeProto:
    results = [normal, "", "", total]
    op = "SkipSimplifiedLayerNormalization"
    return oh.make_node(op, [x, y, scale], results, name=f"/{normal}", domain=DOMAIN, epsilon=1e-5)


def _cast(node: onnx.NodeProto) -> onnx.NodeProto:
    for attribute in node.attribute:
        if attribute.name == "to_":
            attribute.name = "to"
    return node


def _places(layers: int) -> Iterator[tuple[int, str]]:
    return ((layer, each) for layer in range(layers) for each in ("key", "value"))


def _cache(prefix: str, layer: int, tokens: str, each: str) -> onnx.ValueInfoProto:
    shape = ["batch_size", GROUPS, tokens, SIZE]
    return oh.make_tensor_value_info(f"{prefix}.{layer}.{each}", onnx.TensorProto.FLOAT, shape)


def _inputs(layers: int) -> Iterator[onnx.ValueInfoProto]:
    for name, tokens in (
        ("input_ids", "sequence_length"),
        ("attention_mask", "total_sequence_length"),
    ):
        yield oh.make_tensor_value_info(name, onnx.TensorProto.INT64, ["batch_size", tokens])
    yield from (
        _cache("past_key_values", layer, "past_sequence_length", each)
        for layer, each in _places(layers)
    )
