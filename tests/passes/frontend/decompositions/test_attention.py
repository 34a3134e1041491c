"""Attention operators of com.microsoft: numbers against onnxruntime's kernels, or, if there is no
CPU kernel, against the specification.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopipe.ir.problem import Mode
from autopipe.passes.frontend import read_model
from tests.passes.frontend.building import floats
from tests.passes.frontend.evaluated import both, emitted, node_file

BATCH = 2
TOKENS = 4
KEYS = 5
HEADS = 4
GROUPS = 2
SIZE = 16
HIDDEN = HEADS * SIZE
ANGLES = np.arange(16)[:, None] / 100 ** (np.arange(SIZE // 2) / 8)
COSINES = np.cos(ANGLES).astype(np.float32)
SINES = np.sin(ANGLES).astype(np.float32)
RAW = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], np.int32)
LEFT = np.array([[1, 1, 1, 1], [0, 0, 1, 1]], np.int32)


def whole(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def three(tokens: int = TOKENS, keys: int = TOKENS, width: int = HIDDEN) -> list[np.ndarray | None]:
    return [
        floats(BATCH, tokens, HIDDEN),
        floats(BATCH, keys, HIDDEN, seed=1),
        floats(BATCH, keys, width, seed=2),
    ]


def caches(places: int, batch: int = BATCH, heads: int = HEADS) -> list[np.ndarray | None]:
    return [floats(batch, heads, places, SIZE, seed=seed) for seed in (3, 4)]


def check(
    folder: Path, op: str, arrays: list[np.ndarray | None], results: str = "y", **settings: Any
) -> None:
    found, expected = both(folder, op, arrays, results, **settings)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, 1e-4, 1e-5, err_msg=name)


MULTI: dict[str, tuple[list[np.ndarray | None], dict[str, Any]]] = {
    "self": (three(), {}),
    "values of another width": (three(keys=KEYS, width=24), {}),
    "bias": ([*three(keys=KEYS), floats(3 * HIDDEN)], {"known": [3]}),
    "lengths": ([*three(keys=KEYS), None, whole(5, 3)], {}),
    "lengths and places": (
        [*three(keys=KEYS), None, whole(5, 3, 0, 4, 8, 0, 5, 8)],
        {"known": [4]},
    ),
    "raw mask": ([*three(keys=KEYS), None, RAW], {}),
    "nothing to see": ([*three(keys=KEYS), None, np.stack([RAW[0], 0 * RAW[0]])], {}),
    "mask by query": (
        [*three(keys=KEYS), None, (floats(BATCH, TOKENS, KEYS) > -1).astype(np.int32)],
        {},
    ),
    "bias of scores": (
        [*three(keys=KEYS), None, RAW, floats(1, HEADS, TOKENS, KEYS)],
        {"mask_filter_value": -50.0},
    ),
    "causal": (three(), {"unidirectional": 1, "scale": 0.5}),
    "causal, padded left": ([*three(), None, LEFT], {"unidirectional": 1}),
    "keys by head": ([three()[0], *caches(KEYS), floats(3 * HIDDEN)], {"known": [3]}),
    "past": ([*three(), None, None, None, *caches(6)], {"results": "y keys values"}),
    "past of a causal model": (
        [
            *three(),
            floats(3 * HIDDEN),
            np.hstack([LEFT, LEFT]),
            floats(1, 1, TOKENS, 8),
            *caches(4),
        ],
        {"results": "y keys values", "unidirectional": 1, "known": [3]},
    ),
    "written in place": (
        [*three(1, 1), None, None, None, *caches(6), whole(3)],
        {"results": "y keys values", "known": [8]},
    ),
    "scores": ([*three(keys=KEYS), None, RAW], {"results": "y _ _ scores"}),
}


@pytest.mark.parametrize("name", MULTI)
def test_multi_head_attention(name: str, tmp_path: Path) -> None:
    arrays, settings = MULTI[name]
    check(tmp_path, "MultiHeadAttention", arrays, num_heads=HEADS, **settings)


def projected(width: int = 3 * HIDDEN) -> list[np.ndarray | None]:
    return [floats(BATCH, TOKENS, 12), floats(12, width, scale=0.3), floats(width)]


MERGED: dict[str, tuple[list[np.ndarray | None], dict[str, Any]]] = {
    "plain": (projected(), {}),
    "sizes": (projected(2 * HIDDEN + 24), {"qkv_hidden_sizes": [HIDDEN, HIDDEN, 24]}),
    "ends": ([*projected(), whole(4, 2)], {}),
    "ends and starts": ([*projected(), whole(4, 4, 0, 2)], {"known": [1, 2, 3]}),
    "raw mask": ([*projected(), LEFT], {"unidirectional": 1}),
    "raw mask of gpt2": (
        [*projected(), LEFT],
        {"unidirectional": 1, "mask_filter_value": -3.4028234663852886e38},
    ),
    "mask by query": ([*projected(), (floats(BATCH, TOKENS, TOKENS) > -1).astype(np.int32)], {}),
    "a stand-in": ([*projected(), np.zeros((BATCH, 1), np.int32)], {"unidirectional": 1}),
    "past": (
        [*projected(), None, floats(2, BATCH, HEADS, 3, SIZE)],
        {"unidirectional": 1, "results": "y present"},
    ),
    "no past yet": (
        [*projected(), None, floats(2, BATCH, HEADS, 0, SIZE)],
        {"results": "y present"},
    ),
}


@pytest.mark.parametrize("name", MERGED)
def test_attention(name: str, tmp_path: Path) -> None:
    arrays, settings = MERGED[name]
    check(tmp_path, "Attention", arrays, num_heads=HEADS, **{"known": [1, 2], **settings})


DECODER: dict[str, tuple[list[np.ndarray | None], dict[str, Any]]] = {
    "in place": (
        [*three(1, 1), LEFT, None, *caches(6), whole(3), None, None, floats(3 * HIDDEN)],
        {"results": "y keys values", "known": [7, 10], "past_present_share_buffer": 1},
    ),
    "across": ([three(1)[0], *caches(KEYS), RAW], {"results": "y _ _ scores", "output_qk": 1}),
}


@pytest.mark.parametrize("name", DECODER)
def test_decoder_masked_attention(name: str, tmp_path: Path) -> None:
    arrays, settings = DECODER[name]
    check(tmp_path, "DecoderMaskedMultiHeadAttention", arrays, num_heads=HEADS, **settings)


GROUPED: dict[str, tuple[tuple[int, int, list[int]], dict[str, Any]]] = {
    "prompt": ((4, 0, [4, 4]), {}),
    "prompts of different lengths": ((4, 0, [4, 2]), {}),
    "prompt into a buffer": ((4, 9, [4, 3]), {}),
    "token": ((1, 5, [6, 6]), {}),
    "tokens at different places": ((1, 5, [6, 3]), {}),
    "tokens in a buffer": ((1, 9, [6, 3]), {}),
    "tokens, the longest told as it runs": ((1, 9, [6, 3]), {"known": [7, 8]}),
    "prompt, told as it runs": ((4, 9, [4, 3]), {"known": [7, 8]}),
    "a prompt goes on": ((4, 5, [9]), {}),
    "packed": ((1, 5, [6, 3]), {"packed": True}),
    "window": ((4, 5, [9]), {"local_window_size": 3}),
    "window of one": ((4, 5, [9]), {"local_window_size": 1}),
    "cap and scale": ((1, 5, [6, 3]), {"softcap": 2.0, "scale": 0.7}),
    "neighbours turned": ((1, 5, [6, 3]), {"rotary_interleaved": 1}),
    "not turned": ((1, 5, [6, 3]), {"do_rotary": 0}),
    "positions": ((1, 5, [6, 3]), {"positions": np.array([[3], [7]])}),
    "positions of a prompt": (
        (4, 0, [4, 4]),
        {"positions": np.array([[3, 4, 5, 6], [3, 7, 8, 9]])},
    ),
    "bias of scores": ((1, 5, [6, 3]), {"bias": floats(2, HEADS, 1, 6), "softcap": 1.0}),
    "sink": ((1, 5, [6, 3]), {"sink": floats(HEADS)}),
    "sink and window": ((4, 0, [4, 4]), {"sink": floats(HEADS), "local_window_size": 2}),
    "smooth softmax": ((1, 5, [6, 3]), {"smooth_softmax": 1}),
    "both ways": ((4, 0, [4, 2]), {"causal": 0}),
    "bias of a prompt's scores": ((4, 0, [4, 2]), {"bias": floats(1, 1, 4, 4)}),
    "scores": ((1, 5, [6, 6]), {"results": "y keys values scores", "qk_output": 1}),
    "probabilities": ((4, 0, [4, 4]), {"results": "y keys values scores", "qk_output": 2}),
}


@pytest.mark.parametrize("name", GROUPED)
def test_group_query_attention(name: str, tmp_path: Path) -> None:
    (tokens, places, lengths), settings = GROUPED[name]
    batch = len(lengths)
    width = GROUPS * SIZE
    words: list[np.ndarray | None] = [
        floats(batch, tokens, each, seed=each) for each in (HIDDEN, width, width)
    ]
    if settings.get("packed"):
        words = [floats(batch, tokens, HIDDEN + 2 * width), None, None]
    turned = settings.get("do_rotary", 1)
    arrays = [
        *words,
        *caches(places, batch, GROUPS),
        whole(*lengths) - 1,
        whole(max(lengths)),
        *([COSINES, SINES] if turned else [None, None]),
        *(settings.get(each) for each in ("positions", "bias", "sink")),
    ]
    attributes = {
        key: value
        for key, value in settings.items()
        if key not in ("packed", "positions", "bias", "sink")
    }
    attributes = {"results": "y keys values", "known": [6, 7, 8, 11], "do_rotary": 1, **attributes}
    found, expected = both(
        tmp_path, "GroupQueryAttention", arrays, num_heads=HEADS, kv_num_heads=GROUPS, **attributes
    )
    if tokens == max(lengths) and 6 not in attributes["known"]:
        # The results for padding behind a prompt are undefined.
        counted = np.arange(tokens) < np.array(lengths)[:, None]
        found["y"], expected["y"] = found["y"][counted], expected["y"][counted]
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, 1e-4, 1e-5, err_msg=key)


def test_query_and_key_normalization(tmp_path: Path) -> None:
    """There is no CPU kernel with normalization: the reference normalizes in separate operators
    before the attention.
    """
    words = [
        floats(BATCH, TOKENS, each, seed=each) for each in (HIDDEN, GROUPS * SIZE, GROUPS * SIZE)
    ]
    behind = [*caches(0, heads=GROUPS), whole(3, 3), whole(4), COSINES, SINES]
    scales = floats(SIZE), floats(SIZE, seed=1)
    settings: dict[str, Any] = {
        "num_heads": HEADS,
        "kv_num_heads": GROUPS,
        "do_rotary": 1,
        "known": [6, 7, 8],
    }
    arrays = [*words, *behind, *[None] * 5, *scales]
    path, feeds = node_file(
        tmp_path, "GroupQueryAttention", arrays, qk_norm_epsilon=1e-3, **_with(settings, 14, 15)
    )
    found = emitted(read_model(path, mode=Mode.INFER), feeds)["y"]
    for place, scale in enumerate(scales):
        heads = words[place].reshape(BATCH, TOKENS, -1, SIZE)
        heads = heads / np.sqrt(np.square(heads).mean(-1, keepdims=True) + 1e-3) * scale
        words[place] = heads.reshape(BATCH, TOKENS, -1).astype(np.float32)
    _, expected = both(tmp_path, "GroupQueryAttention", [*words, *behind], **settings)
    np.testing.assert_allclose(found, expected["y"], 1e-4, 1e-5)


def _with(settings: dict[str, Any], *known: int) -> dict[str, Any]:
    return {**settings, "known": [*settings["known"], *known]}


def test_packed_queries_keys_and_values_equal_separate_ones(tmp_path: Path) -> None:
    """There is no CPU kernel for queries, keys and values in one tensor by head."""
    apart = three()
    words = [array.reshape(BATCH, TOKENS, HEADS, 1, SIZE) for array in apart if array is not None]
    _, expected = both(tmp_path, "MultiHeadAttention", apart, num_heads=HEADS)
    forms: tuple[list[np.ndarray | None], ...] = (
        [np.concatenate(words, 3)],
        [apart[0], np.concatenate(words[1:], 3)],
    )
    for arrays in forms:
        path, feeds = node_file(tmp_path, "MultiHeadAttention", arrays, num_heads=HEADS)
        found = emitted(read_model(path, mode=Mode.INFER), feeds)
        np.testing.assert_allclose(found["y"], expected["y"], 1e-4, 1e-5)


@pytest.mark.parametrize("form", ["apart", "side by side", "merged"])
def test_packed_tokens_equal_padded_ones(form: str, tmp_path: Path) -> None:
    """There is no CPU kernel for sequences without padding: the reference is attention on padded
    sequences.
    """
    lengths = np.array([3, 1, 4])
    longest = 4
    real = np.arange(longest) < lengths[:, None]
    places = np.arange(real.size).reshape(real.shape)
    offsets = np.concatenate([places[real], places[~real]]).reshape(real.shape).astype(np.int32)
    bounds = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    bias = floats(3 * HIDDEN)
    added = floats(1, HEADS, longest, longest)
    words = [floats(3, longest, HIDDEN, seed=seed) for seed in range(3)]
    settings: dict[str, Any] = {"num_heads": HEADS, "scale": 0.3, "known": [3, 4, 5]}
    op = "PackedMultiHeadAttention"
    padded = [*words, bias, lengths.astype(np.int32), added]
    packed: list[np.ndarray | None] = [
        *(word[real] for word in words),
        bias,
        offsets,
        bounds,
        added,
    ]
    if form == "side by side":
        heads = [word[real].reshape(-1, HEADS, 1, SIZE) for word in words]
        bias *= 0
        packed[:4] = np.concatenate(heads, 2), None, None, None
    if form == "merged":
        op, settings["known"] = "PackedAttention", [1, 2, 3, 4]
        x = floats(3, longest, 12)
        weights = floats(12, 3 * HIDDEN, scale=0.3)
        padded[:3] = np.split(x @ weights, 3, -1)
        packed = [x[real], weights, bias, offsets, bounds, added]
    path, feeds = node_file(tmp_path, op, packed, **settings)
    found = emitted(read_model(path, mode=Mode.INFER, batch_axes=dict.fromkeys(feeds)), feeds)["y"]
    _, expected = both(tmp_path, "MultiHeadAttention", padded, **{**settings, "known": [3, 5]})
    np.testing.assert_allclose(found, expected["y"][real], 1e-4, 1e-5)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_linear_attention(rule: str, tmp_path: Path) -> None:
    """The call has more tokens than one chunk, and a state of an earlier call."""
    tokens = 70
    decay = -np.abs(floats(BATCH, 70, GROUPS))
    beta = np.abs(np.tanh(floats(BATCH, 70, GROUPS)))
    query, *words = (
        floats(BATCH, tokens, each * 8, scale=0.3, seed=each) for each in (HEADS, GROUPS, GROUPS)
    )
    arrays: list[np.ndarray | None] = [query, *words, floats(BATCH, GROUPS, 8, 8)]
    arrays += [decay if "gated" in rule else None, beta if "delta" in rule else None]
    settings = {"q_num_heads": HEADS, "kv_num_heads": GROUPS, "update_rule": rule}
    check(tmp_path, "LinearAttention", arrays, "y state", **settings)


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_causal_convolution(activation: str, tmp_path: Path) -> None:
    arrays = [floats(BATCH, 6, 5), floats(6, 1, 4), floats(6), floats(BATCH, 6, 3)]
    check(tmp_path, "CausalConvWithState", arrays, "y state", known=[1, 2], activation=activation)
