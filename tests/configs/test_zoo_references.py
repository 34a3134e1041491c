"""Models of the zoo, run by onnxruntime, against the same models written in torch from the same
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.configs import zoo

BATCH = 3
Parameters = Mapping[str, Tensor]
Inputs = Mapping[str, Tensor]
Reference = Callable[[Parameters, Inputs], Tensor]


def test_gpt() -> None:
    sizes = {"layers": 2, "hidden": 48, "heads": 3, "vocabulary": 61, "sequence": 10}

    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        x = p["token_embedding.weight"][inputs["tokens"]] + p["position_embedding.weight"]
        for index in range(2):
            x = pre_norm_block(p, f"layers.{index}", x, heads=3, causal=True)
        x = layer_norm(p, "norm", x)
        return x @ p["token_embedding.weight"].T

    agrees("gpt", sizes, {"tokens": 61}, reference)


def test_llama() -> None:
    sizes = {
        "layers": 2,
        "hidden": 48,
        "heads": 6,
        "key_value_heads": 2,
        "feed_forward": 40,
        "vocabulary": 61,
        "sequence": 10,
        "rotary_base": 500,
    }

    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequency = 500.0 ** (-torch.arange(half) / half)
        turn = torch.polar(torch.ones(10, half), torch.outer(torch.arange(10.0), frequency))
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        x = p["embedding.weight"][inputs["tokens"]]
        for index in range(2):
            name = f"layers.{index}"
            y = F.rms_norm(x, (48,), p[f"{name}.attention_norm.weight"], 1e-5)
            q = heads_first(y @ p[f"{name}.attention.query.weight"], 6)
            k = heads_first(y @ p[f"{name}.attention.key.weight"], 2)
            v = heads_first(y @ p[f"{name}.attention.value.weight"], 2)
            y = F.scaled_dot_product_attention(
                rotate(q), rotate(k), v, is_causal=True, enable_gqa=True
            )
            x = x + heads_last(y) @ p[f"{name}.attention.output.weight"]
            y = F.rms_norm(x, (48,), p[f"{name}.feed_forward_norm.weight"], 1e-5)
            gate = F.silu(y @ p[f"{name}.feed_forward.gate.weight"])
            x = (
                x
                + (gate * (y @ p[f"{name}.feed_forward.up.weight"]))
                @ p[f"{name}.feed_forward.down.weight"]
            )
        return F.rms_norm(x, (48,), p["norm.weight"], 1e-5) @ p["head.weight"]

    agrees("llama", sizes, {"tokens": 61}, reference)


def test_bert_ignores_padding() -> None:
    sizes = {"layers": 2, "hidden": 48, "heads": 3, "vocabulary": 61, "sequence": 10}

    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        x = p["embeddings.word.weight"][inputs["tokens"]] + p["embeddings.position.weight"]
        x = layer_norm(
            p,
            "embeddings.norm",
            x + p["embeddings.token_type.weight"][inputs["token_types"]],
            1e-12,
        )
        mask = torch.where(inputs["attention_mask"].bool(), 0.0, -1e9)[:, None, None, :]
        for index in range(2):
            name = f"layers.{index}"
            mixed = attention(p, f"{name}.attention", x, heads=3, mask=mask)
            x = layer_norm(p, f"{name}.attention_norm", x + mixed, 1e-12)
            raised = feed_forward(p, f"{name}.feed_forward", x, F.gelu)
            x = layer_norm(p, f"{name}.feed_forward_norm", x + raised, 1e-12)
        x = layer_norm(p, "head.norm", F.gelu(linear(p, "head.transform", x)), 1e-12)
        return x @ p["embeddings.word.weight"].T + p["head.bias"]

    agrees("bert", sizes, {"tokens": 61, "token_types": 2, "attention_mask": 2}, reference)


def test_mt5() -> None:
    sizes = {"layers": 2, "hidden": 48, "heads": 3, "vocabulary": 61, "source": 150, "target": 200}

    def bucket(distance: int, buckets: int) -> int:
        exact = buckets // 2
        if distance < exact:
            return distance
        far = exact + int(math.log(distance / exact) / math.log(128 / exact) * (buckets - exact))
        return min(far, buckets - 1)

    def bias(table: Tensor, length: int, causal: bool) -> Tensor:
        rows = torch.empty(length, length, dtype=torch.int64)
        for query in range(length):
            for key in range(length):
                if causal:
                    rows[query, key] = bucket(max(query - key, 0), 32)
                else:
                    rows[query, key] = bucket(abs(query - key), 16) + (16 if key > query else 0)
        return table[rows].permute(2, 0, 1)[None]

    def norm(p: Parameters, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (48,), p[f"{name}.weight"], 1e-6)

    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        memory = p["embedding.weight"][inputs["source"]]
        mask = bias(p["encoder.position_bias.weight"], 150, causal=False)
        for index in range(2):
            name = f"encoder.{index}"
            y = norm(p, f"{name}.attention_norm", memory)
            memory = memory + attention(p, f"{name}.attention", y, heads=3, mask=mask, scale=1.0)
            y = norm(p, f"{name}.feed_forward_norm", memory)
            memory = memory + feed_forward(p, f"{name}.feed_forward", y, F.relu)
        memory = norm(p, "encoder.norm", memory)
        x = p["embedding.weight"][inputs["target"]]
        mask = bias(p["decoder.position_bias.weight"], 200, causal=True)
        mask = mask + torch.full((200, 200), -1e9).triu(1)
        for index in range(2):
            name = f"decoder.{index}"
            y = norm(p, f"{name}.attention_norm", x)
            x = x + attention(p, f"{name}.attention", y, heads=3, mask=mask, scale=1.0)
            y = norm(p, f"{name}.cross_attention_norm", x)
            x = x + attention(p, f"{name}.cross_attention", y, heads=3, memory=memory, scale=1.0)
            y = norm(p, f"{name}.feed_forward_norm", x)
            x = x + feed_forward(p, f"{name}.feed_forward", y, F.relu)
        return norm(p, "decoder.norm", x) @ p["embedding.weight"].T

    agrees("mt5", sizes, {"source": 61, "target": 61}, reference)


def test_transformer() -> None:
    sizes = {
        "layers": 2,
        "hidden": 48,
        "heads": 3,
        "feed_forward": 56,
        "vocabulary": 61,
        "sequence": 10,
    }

    def embedded(p: Parameters, name: str, tokens: Tensor) -> Tensor:
        place = torch.arange(10.0)[:, None]
        angle = place / 10000.0 ** (torch.arange(24.0) / 24)
        return p[f"{name}.weight"][tokens] * math.sqrt(48) + torch.cat(
            [angle.sin(), angle.cos()], dim=-1
        )

    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        memory = embedded(p, "source_embedding", inputs["source"])
        for index in range(2):
            name = f"encoder.{index}"
            mixed = attention(p, f"{name}.attention", memory, heads=3)
            memory = layer_norm(p, f"{name}.attention_norm", memory + mixed)
            raised = feed_forward(p, f"{name}.feed_forward", memory, F.relu)
            memory = layer_norm(p, f"{name}.feed_forward_norm", memory + raised)
        x = embedded(p, "target_embedding", inputs["target"])
        for index in range(2):
            name = f"decoder.{index}"
            x = layer_norm(
                p,
                f"{name}.attention_norm",
                x + attention(p, f"{name}.attention", x, heads=3, causal=True),
            )
            mixed = attention(p, f"{name}.cross_attention", x, heads=3, memory=memory)
            x = layer_norm(p, f"{name}.cross_attention_norm", x + mixed)
            raised = feed_forward(p, f"{name}.feed_forward", x, F.relu)
            x = layer_norm(p, f"{name}.feed_forward_norm", x + raised)
        return x @ p["projection.weight"]

    agrees("transformer", sizes, {"source": 61, "target": 61}, reference)


@pytest.mark.parametrize("capacity", [3, 12])
def test_mixture_of_experts_seats_tokens_in_order(capacity: int) -> None:
    sizes = {
        "layers": 2,
        "hidden": 48,
        "heads": 3,
        "experts": 4,
        "choices": 2,
        "capacity": capacity,
        "vocabulary": 61,
        "sequence": 12,
    }

    def mixture(p: Parameters, name: str, sample: Tensor) -> Tensor:
        shares = torch.softmax(sample @ p[f"{name}.gate.projection.weight"], dim=-1)
        weights, experts = shares.topk(2)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        taken = [0] * 4
        result = torch.zeros_like(sample)
        for choice in range(2):
            for token in range(len(sample)):
                expert = int(experts[token, choice])
                taken[expert] += 1
                if taken[expert] > capacity:
                    continue
                inner = F.gelu(
                    sample[token] @ p[f"{name}.up"][expert] + p[f"{name}.up_bias"][expert, 0]
                )
                outer = inner @ p[f"{name}.down"][expert] + p[f"{name}.down_bias"][expert, 0]
                result[token] += weights[token, choice] * outer
        return result

    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        x = p["token_embedding.weight"][inputs["tokens"]] + p["position_embedding.weight"]
        for index in range(2):
            name = f"layers.{index}"
            y = layer_norm(p, f"{name}.attention_norm", x)
            x = x + attention(p, f"{name}.attention", y, heads=3, causal=True)
            y = layer_norm(p, f"{name}.experts_norm", x)
            x = x + torch.stack([mixture(p, f"{name}.experts", sample) for sample in y])
        return layer_norm(p, "norm", x) @ p["head.weight"]

    agrees("moe", sizes, {"tokens": 61}, reference)


def test_rnnlm() -> None:
    sizes = {"layers": 2, "hidden": 24, "vocabulary": 61, "sequence": 10}

    def gates(weight: Tensor) -> Tensor:
        entry, output, forget, cell = weight.chunk(4)
        return torch.cat([entry, forget, cell, output])

    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        x = p["embedding.weight"][inputs["tokens"]]
        for index in range(2):
            lstm = torch.nn.LSTM(24, 24, batch_first=True)
            biases = p[f"layers.{index}.bias"][0].chunk(2)
            values = [p[f"layers.{index}.weight"][0], p[f"layers.{index}.recurrence"][0], *biases]
            with torch.no_grad():
                for own, value in zip(lstm.parameters(), values, strict=True):
                    own.copy_(gates(value))
                x, _ = lstm(x)
        return linear(p, "projection", x)

    agrees("rnnlm", sizes, {"tokens": 61}, reference)


def test_alexnet() -> None:
    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        x = F.max_pool2d(F.relu(conv(p, "conv1", inputs["image"], stride=4)), 3, 2)
        x = F.max_pool2d(F.relu(conv(p, "conv2", x, padding=2)), 3, 2)
        for name in ("conv3", "conv4", "conv5"):
            x = F.relu(conv(p, name, x, padding=1))
        x = F.max_pool2d(x, 3, 2).flatten(1)
        x = F.relu(dense(p, "fc7", F.relu(dense(p, "fc6", x))))
        return dense(p, "fc8", x)

    agrees("alexnet", {"image": 99}, {}, reference)


def test_vgg19() -> None:
    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        x = inputs["image"]
        for group, depth in enumerate((2, 2, 4, 4, 4)):
            for index in range(depth):
                x = F.relu(conv(p, f"features.{group}.{index}", x, padding=1))
            x = F.max_pool2d(x, 2)
        x = x.flatten(1)
        for index in range(2):
            x = F.relu(dense(p, f"classifier.{index}", x))
        return dense(p, "classifier.2", x)

    agrees("vgg19", {"width": 4, "image": 70}, {}, reference)


def test_wide_resnet() -> None:
    def unit(p: Parameters, name: str, x: Tensor, stride: int = 1) -> Tensor:
        padding = p[f"{name}.conv.weight"].shape[-1] // 2
        return batch_norm(
            p, f"{name}.norm", conv(p, f"{name}.conv", x, stride=stride, padding=padding), 1e-5
        )

    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        x = F.max_pool2d(F.relu(unit(p, "stem", inputs["image"], stride=2)), 3, 2, 1)
        for stage, depth in enumerate((2, 1, 1, 2)):
            for index in range(depth):
                name = f"stages.{stage}.{index}"
                stride = 2 if stage > 0 and index == 0 else 1
                y = F.relu(unit(p, f"{name}.1", x))
                y = unit(p, f"{name}.3", F.relu(unit(p, f"{name}.2", y, stride=stride)))
                short = unit(p, f"{name}.shortcut", x, stride=stride) if index == 0 else x
                x = F.relu(y + short)
        return dense(p, "classifier", x.mean(dim=(2, 3)))

    agrees("wide-resnet", {"stages": (2, 1, 1, 2), "image": 48}, {}, reference)


def test_inceptionv3_module_by_module() -> None:
    def unit(p: Parameters, name: str, x: Tensor, stride: int = 1, same: bool = True) -> Tensor:
        height, width = p[f"{name}.conv.weight"].shape[2:]
        x = F.pad(x, (width // 2, width // 2, height // 2, height // 2)) if same else x
        return F.relu(
            batch_norm(p, f"{name}.norm", conv(p, f"{name}.conv", x, stride=stride), 1e-3)
        )

    def chain(p: Parameters, name: str, x: Tensor) -> Tensor:
        index = 0
        while f"{name}.{index}.conv.weight" in p:
            x = unit(p, f"{name}.{index}", x)
            index += 1
        if f"{name}.reduce.conv.weight" in p:
            x = unit(p, f"{name}.reduce", x, stride=2, same=False)
        return x

    def joined(p: Parameters, name: str, x: Tensor, branches: tuple[str, ...]) -> Tensor:
        return torch.cat([chain(p, f"{name}.{branch}", x) for branch in branches], dim=1)

    def pooled(p: Parameters, name: str, x: Tensor) -> Tensor:
        return chain(p, f"{name}.pool", F.avg_pool2d(x, 3, 1, 1))

    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        x = unit(p, "stem.0", inputs["image"], stride=2, same=False)
        x = unit(p, "stem.2", unit(p, "stem.1", x, same=False))
        x = unit(p, "stem.3", F.max_pool2d(x, 3, 2))
        x = F.max_pool2d(unit(p, "stem.4", x, same=False), 3, 2)
        for index in range(3):
            name = f"mixed_a.{index}"
            x = torch.cat([joined(p, name, x, ("one", "five", "three")), pooled(p, name, x)], dim=1)
        three = unit(p, "mixed_b.three", x, stride=2, same=False)
        x = torch.cat([three, chain(p, "mixed_b.double", x), F.max_pool2d(x, 3, 2)], dim=1)
        for index in range(4):
            name = f"mixed_c.{index}"
            x = torch.cat(
                [joined(p, name, x, ("one", "seven", "double")), pooled(p, name, x)], dim=1
            )
        x = torch.cat([joined(p, "mixed_d", x, ("three", "seven")), F.max_pool2d(x, 3, 2)], dim=1)
        for index in range(2):
            name = f"mixed_e.{index}"
            fans = [
                unit(p, f"{name}.{branch}.{side}", chain(p, f"{name}.{branch}", x))
                for branch in ("three", "double")
                for side in ("row", "column")
            ]
            x = torch.cat([chain(p, f"{name}.one", x), *fans, pooled(p, name, x)], dim=1)
        return dense(p, "classifier", x.mean(dim=(2, 3)))

    agrees("inceptionv3", {"image": 107, "width": 8}, {}, reference)


def test_unet() -> None:
    def pair(p: Parameters, name: str, x: Tensor) -> Tensor:
        return F.relu(conv(p, f"{name}.1", F.relu(conv(p, f"{name}.0", x, padding=1)), padding=1))

    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        first = pair(p, "down.0", inputs["image"])
        second = pair(p, "down.1", F.max_pool2d(first, 2))
        x = pair(p, "bottom", F.max_pool2d(second, 2))
        for level, skipped in ((1, second), (0, first)):
            name = f"up.{level}"
            x = F.conv_transpose2d(
                x, p[f"{name}.transposed.weight"], p[f"{name}.transposed.bias"], stride=2
            )
            x = pair(p, name, torch.cat([skipped, x], dim=1))
        return conv(p, "head", x)

    agrees("unet", {"image": 20}, {}, reference)


def test_dlrm_and_its_cross_entropy() -> None:
    def logits(p: Parameters, inputs: Inputs) -> Tensor:
        parts = []
        for index in range(3):
            x = inputs[f"dense_{index}"]
            for layer in range(2):
                x = F.relu(dense(p, f"dense.{index}.layers.{layer}", x))
            parts.append(x)
        parts += [
            p[f"tables.{index}.weight"][inputs[f"sparse_{index}"]].flatten(1) for index in range(3)
        ]
        x = torch.cat(parts, dim=1)
        for layer in range(2):
            x = F.relu(dense(p, f"top.{layer}", x))
        return dense(p, "click", x)

    rows = {f"sparse_{index}": 1000 for index in range(3)}
    agrees("dlrm", {}, rows, lambda p, inputs: torch.sigmoid(logits(p, inputs)), logits_loss=False)
    model, parameters = perturbed("dlrm", {"loss": True})
    inputs = drawn_inputs(model, rows)
    inputs["labels"] = np.array([[0.0], [1.0], [1.0]], dtype=np.float32)
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    expected = F.binary_cross_entropy_with_logits(logits(parameters, tensors), tensors["labels"])
    assert_close(run(model, inputs), expected)


def test_candle_uno_and_its_squared_error() -> None:
    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        parts = []
        for index in range(7):
            x = inputs[f"features_{index}"]
            for layer in range(2):
                x = F.relu(dense(p, f"branches.{index}.layers.{layer}", x))
            parts.append(x)
        x = torch.cat(parts, dim=1)
        for layer in range(2):
            x = F.relu(dense(p, f"top.{layer}", x))
        return dense(p, "effect", x)

    agrees("candle-uno", {}, {}, reference, logits_loss=False)
    model, parameters = perturbed("candle-uno", {"loss": True})
    inputs = drawn_inputs(model, {})
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    assert_close(run(model, inputs), F.mse_loss(reference(parameters, tensors), tensors["labels"]))


def test_mmt() -> None:
    sizes = {
        "branches": 3,
        "layers": 2,
        "hidden": 48,
        "heads": 3,
        "feed_forward": 192,
        "sequence": 5,
    }

    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        parts = []
        for index in range(3):
            x = linear(p, f"branches.{index}.projection", inputs[f"modality_{index}"])
            for layer in range(2):
                x = pre_norm_block(p, f"branches.{index}.layers.{layer}", x, heads=3)
            parts.append(layer_norm(p, f"branches.{index}.norm", x))
        return linear(p, "classifier", torch.cat(parts, dim=-1).mean(dim=1))

    agrees("mmt", sizes, {}, reference)


def test_two_branch() -> None:
    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        parts = []
        for index in range(2):
            x = inputs[f"input_{index}"]
            for repeat in range(4):
                name = f"branches.{index}.blocks.{repeat}"
                x = attention(p, f"{name}.attention", x, heads=4)
                x = linear(p, f"{name}.down", F.relu(linear(p, f"{name}.up", x)))
            parts.append(x)
        return linear(p, "classifier", torch.cat(parts, dim=-1).mean(dim=1))

    agrees("two-branch", {}, {}, reference)


def test_flava() -> None:
    def encoded(p: Parameters, name: str, x: Tensor) -> Tensor:
        for layer in range(2):
            x = pre_norm_block(p, f"{name}.layers.{layer}", x, heads=4)
        return layer_norm(p, f"{name}.norm", x)

    def reference(p: Parameters, inputs: Inputs) -> Tensor:
        text = (
            p["text.token_embedding.weight"][inputs["tokens"]] + p["text.position_embedding.weight"]
        )
        picture = conv(p, "image.patches", inputs["image"], stride=8).flatten(2).transpose(1, 2)
        picture = encoded(p, "image", picture + p["image.position_embedding.weight"])
        text = linear(p, "cross.text_projection", encoded(p, "text", text))
        picture = linear(p, "cross.image_projection", picture)
        both = encoded(p, "cross", torch.cat([text, picture], dim=1))
        return linear(p, "classifier", both[:, 0])

    agrees("flava", {}, {"tokens": 256}, reference)


# What the references share.


def linear(p: Parameters, name: str, x: Tensor) -> Tensor:
    result = x @ p[f"{name}.weight"]
    return result + p[f"{name}.bias"] if f"{name}.bias" in p else result


def dense(p: Parameters, name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def conv(p: Parameters, name: str, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    return F.conv2d(x, p[f"{name}.weight"], p.get(f"{name}.bias"), stride, padding)


def batch_norm(p: Parameters, name: str, x: Tensor, epsilon: float) -> Tensor:
    statistics = p[f"{name}.running_mean"], p[f"{name}.running_var"]
    return F.batch_norm(x, *statistics, p[f"{name}.weight"], p[f"{name}.bias"], eps=epsilon)


def layer_norm(p: Parameters, name: str, x: Tensor, epsilon: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], epsilon)


def heads_first(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def heads_last(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attention(
    p: Parameters,
    name: str,
    x: Tensor,
    *,
    heads: int,
    memory: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    source = x if memory is None else memory
    q = heads_first(linear(p, f"{name}.query", x), heads)
    k = heads_first(linear(p, f"{name}.key", source), heads)
    v = heads_first(linear(p, f"{name}.value", source), heads)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    return linear(p, f"{name}.output", heads_last(mixed))


def feed_forward(
    p: Parameters, name: str, x: Tensor, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    return linear(p, f"{name}.down", activation(linear(p, f"{name}.up", x)))


def pre_norm_block(p: Parameters, name: str, x: Tensor, heads: int, causal: bool = False) -> Tensor:
    y = layer_norm(p, f"{name}.attention_norm", x)
    x = x + attention(p, f"{name}.attention", y, heads=heads, causal=causal)
    return x + feed_forward(
        p, f"{name}.feed_forward", layer_norm(p, f"{name}.feed_forward_norm", x), F.gelu
    )


# How they are compared.


def agrees(
    name: str,
    settings: zoo.Settings,
    below: Mapping[str, int],
    reference: Reference,
    logits_loss: bool = True,
) -> None:
    """The model's outputs equal the reference's, and its loss torch's cross-entropy of them."""
    model, parameters = perturbed(name, settings)
    inputs = drawn_inputs(model, below)
    expected = reference(
        parameters, {key: torch.from_numpy(value) for key, value in inputs.items()}
    )
    actual = run(model, inputs)
    assert_close(actual, expected)
    assert actual.std() > 1e-3, "the comparison needs outputs that differ from one another"
    if not logits_loss:
        return
    classes_last = expected if expected.dim() != 4 else expected.permute(0, 2, 3, 1)
    labels = np.random.default_rng(1).integers(0, classes_last.shape[-1], classes_last.shape[:-1])
    model, _ = perturbed(name, {**settings, "loss": True})
    loss = F.cross_entropy(classes_last.flatten(0, -2), torch.from_numpy(labels).flatten())
    assert_close(run(model, {**inputs, "labels": labels}), loss)


def perturbed(name: str, settings: zoo.Settings) -> tuple[onnx.ModelProto, dict[str, Tensor]]:
    """The model with noise on every parameter, so that no bias is 0 and no scale 1, and its
    parameters.
    """
    model = zoo.build(zoo.configure(name, settings)).to_proto()
    generator = np.random.default_rng(0)
    parameters = {}
    for tensor in model.graph.initializer:
        value = onnx.numpy_helper.to_array(tensor)
        value = value + np.float32(0.1) * generator.standard_normal(value.shape, dtype=np.float32)
        if tensor.name.endswith("running_var"):
            value = np.abs(value)
        tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
        parameters[tensor.name] = torch.from_numpy(value)
    return model, parameters


def drawn_inputs(model: onnx.ModelProto, below: Mapping[str, int]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(2)
    inputs = {}
    for value in model.graph.input:
        shape = [dim.dim_value or BATCH for dim in value.type.tensor_type.shape.dim]
        if value.name in below:
            inputs[value.name] = generator.integers(0, below[value.name], shape)
        else:
            inputs[value.name] = generator.standard_normal(shape, dtype=np.float32)
    return inputs


def run(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    [result] = session.run(None, dict(inputs))
    return np.asarray(result)


def assert_close(actual: np.ndarray, expected: Tensor) -> None:
    wanted = expected.detach().double()
    distance = torch.linalg.vector_norm(torch.from_numpy(np.asarray(actual)).double() - wanted)
    assert actual.shape == tuple(wanted.shape)
    assert distance <= 2e-5 * torch.linalg.vector_norm(wanted)
