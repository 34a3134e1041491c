"""Graphs as builders of generative models write them: operators of com.microsoft by their
specification, functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BATCH = 2
WIDTH = 64
HEADS = 4
KV_HEADS = 2
HEAD = 16
INNER = 48
VOCABULARY = 50
LAYERS = 2
PAST = 5
TOKENS = 1
BLOCK = 16
CONTRIB = "com.microsoft"


@dataclass(slots=True)
class Graph:
    """Nodes and weights as they are added, every result under a name of its own."""

    half: bool = False
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, onnx.TensorProto] = field(default_factory=dict)
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def add(
        self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: object
    ) -> str:
        """Add a node; the name of its first result, the others' end in .1 and so on."""
        name = f"{op}_{len(self.nodes)}"
        results = [name, *(f"{name}.{index}" for index in range(1, outputs))]
        self.nodes.append(helper.make_node(op, inputs, results, name, domain=domain, **attributes))
        return name

    def contrib(self, op: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        """Add a node of com.microsoft."""
        return self.add(op, *inputs, outputs=outputs, domain=CONTRIB, **attributes)

    def weight(self, name: str, *shape: int, scale: float = 0.3, around: float = 0.0) -> str:
        """A weight with random numbers."""
        array = (around + scale * self.generator.standard_normal(shape)).astype(
            np.float16 if self.half else np.float32
        )
        return self.constant(name, array)

    def constant(self, name: str, array: np.ndarray) -> str:
        """A tensor that the file holds."""
        self.weights[name] = numpy_helper.from_array(np.asarray(array), name)
        return name

    def linear(self, name: str, value: str, inner: int, outer: int) -> str:
        """A product with a weight."""
        return self.add("MatMul", value, self.weight(f"{name}.weight", inner, outer))

    def packed(self, name: str, value: str, inner: int, outer: int) -> str:
        """A product with a weight in blocks of 4-bit numbers."""
        blocks = inner // BLOCK
        packed = self.generator.integers(0, 256, (outer, blocks, BLOCK // 2)).astype(np.uint8)
        weight = self.constant(f"{name}.weight_q4", packed)
        scales = self.weight(f"{name}.scales", outer * blocks, scale=0.005, around=0.02)
        settings = {
            "K": inner,
            "N": outer,
            "bits": 4,
            "block_size": BLOCK,
            "accuracy_level": 4 if self.half else 0,
        }
        return self.contrib("MatMulNBits", value, weight, scales, **settings)

    def save(
        self,
        path: Path,
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
    ) -> None:
        """Write the file."""
        graph = helper.make_graph(
            self.nodes, "main_graph", inputs, outputs, list(self.weights.values())
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(CONTRIB, 1)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


def _value(name: str, kind: int, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _angles(graph: Graph) -> tuple[str, str]:
    angles = np.arange(32)[:, None] * 10000.0 ** (-np.arange(HEAD // 2) * 2 / HEAD)
    kind = np.float16 if graph.half else np.float32
    return graph.constant("cos_cache", np.cos(angles).astype(kind)), graph.constant(
        "sin_cache", np.sin(angles).astype(kind)
    )


def decoder(
    quantised: bool, half: bool = False, packed: bool = True, window: int = -1
) -> Callable[[Path], None]:
    """A decoder step as onnxruntime-genai's builder writes it: grouped attention with its cache and
    rotary positions inside, normalization with the sum in one node, weights of 4 bits.
    """

    def write(path: Path) -> None:
        graph = Graph(half)
        kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
        linear = graph.packed if quantised else graph.linear
        total, lengths = _lengths(graph)
        angles = _angles(graph)
        residual = graph.add(
            "Gather", graph.weight("embed", VOCABULARY, WIDTH, scale=1.0), "input_ids"
        )
        norm = graph.weight("norm.0", WIDTH, around=1.0)
        hidden = graph.add(
            "SimplifiedLayerNormalization", residual, norm, axis=-1, epsilon=1e-5, stash_type=1
        )
        outputs = []
        for layer in range(LAYERS):
            past = f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"
            sizes = WIDTH, KV_HEADS * HEAD, KV_HEADS * HEAD
            if packed:
                qkv = [linear(f"{layer}.qkv", hidden, WIDTH, sum(sizes)), "", ""]
            else:
                qkv = [
                    linear(f"{layer}.{part}", hidden, WIDTH, size)
                    for part, size in zip("qkv", sizes, strict=True)
                ]
            settings = {
                "num_heads": HEADS,
                "kv_num_heads": KV_HEADS,
                "do_rotary": 1,
                "local_window_size": window,
            }
            attended = graph.contrib(
                "GroupQueryAttention", *qkv, *past, lengths, total, *angles, outputs=3, **settings
            )
            for index, part in enumerate(("key", "value")):
                graph.nodes[-1].output[1 + index] = f"present.{layer}.{part}"
                outputs.append(
                    _value(f"present.{layer}.{part}", kind, BATCH, KV_HEADS, PAST + TOKENS, HEAD)
                )
            hidden, residual = _summed(
                graph, residual, linear(f"{layer}.o", attended, HEADS * HEAD, WIDTH), layer, "a"
            )
            gate, up = (linear(f"{layer}.{part}", hidden, WIDTH, INNER) for part in ("gate", "up"))
            inner = graph.add("Mul", graph.add("Mul", gate, graph.add("Sigmoid", gate)), up)
            hidden, residual = _summed(
                graph, residual, linear(f"{layer}.down", inner, INNER, WIDTH), layer, "b"
            )
        graph.nodes.append(
            helper.make_node("Identity", [linear("head", hidden, WIDTH, VOCABULARY)], ["logits"])
        )
        pasts = [_value(each.name.replace("present", "past_key_values"), kind, BATCH, KV_HEADS, PAST, HEAD)
                 for each in outputs]  # fmt: skip
        inputs = [_value("input_ids", TensorProto.INT64, BATCH, TOKENS),
                  _value("attention_mask", TensorProto.INT64, BATCH, PAST + TOKENS), *pasts]  # fmt: skip
        graph.save(path, inputs, [_value("logits", kind, BATCH, TOKENS, VOCABULARY), *outputs])

    return write


def _lengths(graph: Graph) -> tuple[str, str]:
    """From the mask the number of tokens in all, and of each sample those before its last."""
    one = graph.constant("one", np.array([1], np.int64))
    counts = graph.add("Sub", graph.add("ReduceSum", "attention_mask", one, keepdims=0), one)
    lengths = graph.add("Cast", counts, to=TensorProto.INT32)
    axis = graph.constant("axis", np.array(1, np.int64))
    total = graph.add("Gather", graph.add("Shape", "attention_mask"), axis, axis=0)
    return graph.add("Cast", total, to=TensorProto.INT32), lengths


def _summed(graph: Graph, residual: str, value: str, layer: int, part: str) -> tuple[str, str]:
    """The normalized sum, and the sum."""
    norm = graph.weight(f"norm.{layer}.{part}", WIDTH, around=1.0)
    name = graph.contrib(
        "SkipSimplifiedLayerNormalization", residual, value, norm, outputs=4, epsilon=1e-5
    )
    graph.nodes[-1].output[1] = graph.nodes[-1].output[2] = ""
    return name, f"{name}.3"


def encoder(path: Path) -> None:
    """An encoder of fused operators: attention of three products, bias and GELU, normalization with
    the sum.
    """
    graph = Graph()
    hidden = graph.add("Gather", graph.weight("embed", VOCABULARY, WIDTH, scale=1.0), "input_ids")
    lengths = graph.add(
        "ReduceSum", "attention_mask", graph.constant("one", np.array([1], np.int64)), keepdims=0
    )
    mask = graph.add("Cast", lengths, to=TensorProto.INT32)
    for layer in range(LAYERS):
        qkv = [graph.linear(f"{layer}.{part}", hidden, WIDTH, WIDTH) for part in "qkv"]
        bias = graph.weight(f"{layer}.bias", 3 * WIDTH)
        attended = graph.contrib("MultiHeadAttention", *qkv, bias, mask, num_heads=HEADS)
        hidden = _normalized(
            graph, hidden, graph.linear(f"{layer}.o", attended, WIDTH, WIDTH), f"{layer}.a"
        )
        inner = graph.linear(f"{layer}.up", hidden, WIDTH, INNER)
        inner = graph.contrib(
            "BiasGelu" if layer else "FastGelu", inner, graph.weight(f"{layer}.up.bias", INNER)
        )
        hidden = _normalized(
            graph, hidden, graph.linear(f"{layer}.down", inner, INNER, WIDTH), f"{layer}.b"
        )
    graph.nodes.append(helper.make_node("Identity", [hidden], ["last_hidden_state"]))
    inputs = [_value(name, TensorProto.INT64, BATCH, 8) for name in ("input_ids", "attention_mask")]
    graph.save(path, inputs, [_value("last_hidden_state", TensorProto.FLOAT, BATCH, 8, WIDTH)])


def _normalized(graph: Graph, skip: str, value: str, name: str) -> str:
    weights = (
        graph.weight(f"{name}.gamma", WIDTH, around=1.0),
        graph.weight(f"{name}.beta", WIDTH),
    )
    bias = graph.weight(f"{name}.bias", WIDTH)
    return graph.contrib("SkipLayerNormalization", skip, value, *weights, bias, epsilon=1e-5)


def pooled_regions(path: Path) -> None:
    """Of several classes and images the boxes that are kept, around their centers, and the features
    within: Fast R-CNN (arXiv:1504.08083) over boxes of its own.
    """
    graph = Graph()
    stem = graph.add(
        "Conv", "image", graph.weight("stem", 8, 3, 3, 3), strides=[2, 2], pads=[1] * 4
    )
    features = graph.add("Relu", stem)
    flat = graph.constant("flat", np.array([0, 0, -1]))
    boxes, scores = (
        graph.add(
            "Sigmoid",
            graph.add(
                "Reshape", graph.add("Conv", features, graph.weight(name, count, 8, 1, 1)), flat
            ),
        )
        for name, count in (("boxes", 4), ("scores", 3))
    )
    scaled = graph.add("Mul", boxes, graph.constant("extent", np.array(16, np.float32)))
    places = graph.add("Transpose", scaled, perm=[0, 2, 1])
    limits = (("most", 5, np.int64), ("overlap", 0.4, np.float32), ("least", 0.45, np.float32))
    settings = (graph.constant(name, np.array([number], kind)) for name, number, kind in limits)
    rows = graph.add("NonMaxSuppression", places, scores, *settings, center_point_box=1)
    found = graph.add(
        "GatherND",
        places,
        graph.add("Gather", rows, graph.constant("ends", np.array([0, 2])), axis=1),
    )
    owners = graph.add("Gather", rows, graph.constant("first", np.array([0])), axis=1)
    regions = graph.add("Concat", graph.add("Cast", owners, to=TensorProto.FLOAT), found, axis=1)
    pooled = graph.add("MaxRoiPool", features, regions, pooled_shape=[2, 2], spatial_scale=0.5)
    logits = graph.linear("head", graph.add("Flatten", pooled), 32, 3)
    for name, value in (
        ("rows", rows),
        ("logits", logits),
        ("scored", graph.add("GatherND", scores, rows)),
    ):
        graph.nodes.append(helper.make_node("Identity", [value], [name]))
    outputs = [
        _value("rows", TensorProto.INT64, "kept", 3),
        _value("logits", TensorProto.FLOAT, "kept", 3),
        _value("scored", TensorProto.FLOAT, "kept"),
    ]
    graph.save(path, [_value("image", TensorProto.FLOAT, BATCH, 3, 16, 16)], outputs)


FUNCTIONS = """<ir_version: 9, opset_import: ["": 20, "local": 1]>
network (float[2, 8, 16] x, float[16, 24] a, float[24] b, float[24, 16] c, float[16] g, float[16] h)
  => (float[2, 8, 16] y)
{
  one = local.Block(x, a, b, c, g, h)
  y = local.Block(one, a, b, c, h, g)
}
<opset_import: ["": 20, "local": 1], domain: "local">
Swish (x) => (y) { s = Sigmoid(x)  y = Mul(x, s) }
<opset_import: ["": 20, "local": 1], domain: "local">
Block (x, a, b, c, scale, bias) => (y)
{
  n = LayerNormalization <axis = -1> (x, scale, bias)
  p = MatMul(n, a)
  q = Add(p, b)
  r = local.Swish(q)
  s = MatMul(r, c)
  y = Add(x, s)
}
"""
"""Blocks that are functions which call a function."""


SELECTIVE_SCAN = """<ir_version: 9, opset_import: ["": 20]>
network (float[2, 600, 8] x, float[8, 8] d, float[8, 4] b, float[8, 4] c, float[8, 4] a, float[8] skip, float[8, 8] w)
  => (float[2, 600, 8] y)
{
  steps = MatMul(x, d)
  times = Softplus(steps)
  inward = MatMul(x, b)
  outward = MatMul(x, c)
  rates = Exp(a)
  decay = Neg(rates)
  inner = Constant <value_ints = [1]> ()
  last = Constant <value_ints = [-1]> ()
  size = Constant <value_ints = [2, 8, 4]> ()
  zero = ConstantOfShape(size)
  end, found = Scan(zero, x, times, inward, outward) <num_scan_inputs = 4, scan_input_axes = [1, 1, 1, 1],
      scan_output_axes = [1], body = run (float[n, 8, 4] h, float[n, 8] s, float[n, 8] t, float[n, 4] p, float[n, 4] q)
      => (float[n, 8, 4] g, float[n, 8] o) {
    t1 = Unsqueeze(t, last)
    z = Mul(t1, decay)
    e = Exp(z)
    kept = Mul(h, e)
    st = Mul(s, t)
    s1 = Unsqueeze(st, last)
    p1 = Unsqueeze(p, inner)
    new = Mul(s1, p1)
    g = Add(kept, new)
    q1 = Unsqueeze(q, inner)
    r = Mul(g, q1)
    u = ReduceSum <keepdims = 0> (r, last)
    v = Mul(s, skip)
    o = Add(u, v)
  }>
  y = MatMul(found, w)
}
"""
"""A selective state space layer (Mamba), step by step."""


def stored(text: str) -> Callable[[Path], None]:
    """Writes a network whose inputs but the first are stored weights."""

    def write(path: Path) -> None:
        proto = onnx.parser.parse_model(text)
        generator = np.random.default_rng(0)
        for each in list(proto.graph.input)[1:]:
            shape = [dimension.dim_value for dimension in each.type.tensor_type.shape.dim]
            array = generator.standard_normal(shape).astype(np.float32)
            proto.graph.initializer.append(numpy_helper.from_array(array, each.name))
            proto.graph.input.remove(each)
        onnx.save(proto, path)

    return write


HANDMADE: Mapping[str, Callable[[Path], None]] = {
    "genai_decoder": decoder(quantised=False),
    "genai_decoder_int4": decoder(quantised=True),
    "genai_decoder_window": decoder(quantised=False, packed=False, window=4),
    "genai_decoder_half": decoder(quantised=True, half=True),
    "fused_encoder": encoder,
    "functions": stored(FUNCTIONS),
    "selective_scan": stored(SELECTIVE_SCAN),
    "pooled_regions": pooled_regions,
}
"""By name what writes the file."""
