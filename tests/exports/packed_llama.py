"""Llama with weights of 4 bits, as onnxruntime-genai's builder lays it out: any size, with numbers
or without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnx.numpy_helper as onh


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extents of the model; `block` weights share a scale."""

    layers: int
    hidden: int
    inner: int
    heads: int
    vocabulary: int
    sequence: int
    block: int = 32


LLAMA_7B = Sizes(32, 4096, 11008, 32, 32000, 2048)
SMALL = Sizes(2, 512, 1408, 8, 512, 32)
"""A 64th of 7 billion parameters in each matrix."""


class Builder:
    """Collects the nodes and tensors of one model; without `numbers` tensors have shapes alone."""

    def __init__(self, sizes: Sizes, numbers: bool) -> None:
        self.sizes = sizes
        self.random = np.random.default_rng(0) if numbers else None
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []

    def model(self) -> onnx.ModelProto:
        """The whole model, from tokens to logits."""
        sizes = self.sizes
        angles = np.arange(sizes.sequence)[:, None] / 10000 ** (
            np.arange(0, 1, 2 * sizes.heads / sizes.hidden)[None].astype(np.float32)
        )
        self.tensors += [
            onh.from_array(f(angles).astype("f4"), f.__name__) for f in (np.cos, np.sin)
        ]
        blocks = sizes.hidden // sizes.block
        table = self._bytes("embed", sizes.vocabulary, sizes.hidden // 2)
        scales = self._floats("embed.scales", sizes.vocabulary, blocks, scale=0.1)
        zeros = self._bytes("embed.zeros", sizes.vocabulary, blocks // 2)
        axes = {"gather_axis": 0, "quantize_axis": 1}
        state = self._node(
            "GatherBlockQuantized",
            "embedding",
            table,
            "tokens",
            scales,
            zeros,
            bits=4,
            block_size=sizes.block,
            **axes,
        )
        for layer in range(sizes.layers):
            state = self._layer(f"layer.{layer}", state)
        self._linear("logits", self._norm("norm", state), sizes.hidden, sizes.vocabulary)
        shape = ["batch", sizes.sequence]
        inputs = [
            oh.make_tensor_value_info(name, onnx.TensorProto.INT64, shape)
            for name in ("tokens", "positions")
        ]
        logits = oh.make_tensor_value_info(
            "logits", onnx.TensorProto.FLOAT, [*shape, sizes.vocabulary]
        )
        graph = oh.make_graph(self.nodes, "llama", inputs, [logits], self.tensors)
        opsets = [oh.make_opsetid("", 23), oh.make_opsetid("com.microsoft", 1)]
        return oh.make_model(graph, opset_imports=opsets, ir_version=10)

    def _layer(self, name: str, state: str) -> str:
        sizes = self.sizes
        x = self._norm(f"{name}.before", state)
        query, key, value = (
            self._linear(f"{name}.{each}", x, sizes.hidden, sizes.hidden) for each in "qkv"
        )
        query, key = (
            self._node(
                "RotaryEmbedding",
                f"{each}.turned",
                each,
                "positions",
                "cos",
                "sin",
                num_heads=sizes.heads,
            )
            for each in (query, key)
        )
        heads = {"q_num_heads": sizes.heads, "kv_num_heads": sizes.heads}
        seen = self._node(
            "Attention", f"{name}.attention", query, key, value, domain="", is_causal=1, **heads
        )
        seen = self._linear(f"{name}.o", seen, sizes.hidden, sizes.hidden)
        state = self._node("Add", f"{name}.middle", state, seen, domain="")
        x = self._norm(f"{name}.behind", state)
        gate, up = (
            self._linear(f"{name}.{each}", x, sizes.hidden, sizes.inner) for each in ("gate", "up")
        )
        gated = self._node(
            "Mul",
            f"{name}.gated",
            self._node("QuickGelu", f"{gate}.silu", gate, alpha=1.0),
            up,
            domain="",
        )
        down = self._linear(f"{name}.down", gated, sizes.inner, sizes.hidden)
        return self._node("Add", f"{name}.end", state, down, domain="")

    def _linear(self, name: str, x: str, inner: int, rows: int) -> str:
        blocks = inner // self.sizes.block
        block = self.sizes.block
        weight = self._bytes(f"{name}.weight", rows, blocks, block // 2)
        scales = self._floats(f"{name}.scales", rows, blocks, scale=0.1 / inner**0.5)
        zeros = self._bytes(f"{name}.zeros", rows, -(-blocks // 2))
        settings = {"K": inner, "N": rows, "bits": 4, "block_size": block, "accuracy_level": 4}
        return self._node("MatMulNBits", name, x, weight, scales, zeros, **settings)

    def _norm(self, name: str, x: str) -> str:
        scale = self._floats(f"{name}.scale", self.sizes.hidden, scale=0.1)
        return self._node(
            "SimplifiedLayerNormalization", name, x, scale, domain="", axis=-1, epsilon=1e-5
        )

    def _node(
        self,
        operator: str,
        name: str,
        *operands: str,
        domain: str = "com.microsoft",
        **attributes: Any,
    ) -> str:
        self.nodes.append(
            oh.make_node(operator, operands, [name], name=name, domain=domain, **attributes)
        )
        return name

    def _bytes(self, name: str, *shape: int) -> str:
        numbers = (
            None if self.random is None else self.random.integers(0, 256, shape, dtype=np.uint8)
        )
        return self._tensor(name, shape, onnx.TensorProto.UINT8, numbers)

    def _floats(self, name: str, *shape: int, scale: float) -> str:
        numbers = (
            None
            if self.random is None
            else (self.random.standard_normal(shape) * scale).astype("f4")
        )
        return self._tensor(name, shape, onnx.TensorProto.FLOAT, numbers)

    def _tensor(
        self, name: str, shape: tuple[int, ...], kind: int, numbers: np.ndarray | None
    ) -> str:
        bare = onnx.TensorProto(name=name, data_type=kind, dims=shape)
        self.tensors.append(bare if numbers is None else onh.from_array(numbers, name))
        return name
