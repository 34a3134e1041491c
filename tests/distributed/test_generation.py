"""Decoders with a cache generate over several ranks the tokens that ONNX Runtime gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from autopipe.cli.main import main
from tests.distributed.support.pool import Pools, ranks_in
from tests.exports.decoders import VOCABULARY, decoder_file, reference_tokens
from tests.exports.genai import decoder

pytestmark = pytest.mark.distributed

exports_a_decoder = pytest.mark.skipif(
    find_spec("transformers") is None,
    reason="transformers needs click 8.4.2, above the lower bound of pyproject.toml",
)

NEW = 64
LENGTHS = (3, 8, 1, 5, 7, 2, 8, 4)
PROMPTS = [
    np.random.default_rng(number).integers(3, VOCABULARY, count).tolist()
    for number, count in enumerate(LENGTHS)
]
Plan = Callable[..., Path]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """`plan(model, tokens, gpus, batch, *flags)` plans for steps that feed up to `tokens` of each
    sequence.
    """

    def make(model: Path, tokens: int, gpus: int, batch: int, *flags: str) -> Path:
        folder = tmp_path / f"{gpus}.plan"
        dims = [
            f"--dim=sequence_length={tokens}",
            f"--dim=past_sequence_length={max(LENGTHS) + NEW - 2}",
        ]
        size = ["--gpus", str(gpus), "--batch-size", str(batch)]
        words = [
            "plan",
            str(model),
            "--mode",
            "infer",
            "--cluster",
            "cpu-local",
            *dims,
            *size,
            *flags,
        ]
        assert main([*words, "-q", "-o", str(folder)]) == 0
        return folder

    return make


def grid(**degrees: int) -> tuple[str, ...]:
    options = (f"--set=strategy.{name}={degree}" for name, degree in degrees.items())
    return "--strategy", "grid", "--micro-batch-size", "2", *options


def generated(folder: Path, *flags: str) -> list[list[int]]:
    """What `autopipe generate` writes for the prompts."""
    prompts = folder.parent / "prompts.json"
    target = folder.parent / "tokens.json"
    prompts.write_text(json.dumps(PROMPTS), encoding="utf-8")
    words = [
        "generate",
        str(folder),
        "--prompts",
        str(prompts),
        "--device",
        "cpu",
        "-o",
        str(target),
    ]
    assert main([*words, *flags]) == 0
    found: list[list[int]] = json.loads(target.read_text(encoding="utf-8"))
    return found


@exports_a_decoder
def test_four_stages_give_the_tokens_of_onnx_runtime(here: None, plan: Plan) -> None:
    model = decoder_file("gpt2")
    found = generated(plan(model, 1, 4, 8, *grid(pipeline=4)), "--max-new-tokens", str(NEW))
    assert found == reference_tokens(model, PROMPTS, NEW)
    assert all(len(set(tokens)) > NEW // 8 for tokens in found), (
        "tokens that hardly change say little"
    )


@exports_a_decoder
def test_split_stages_take_prompts_in_pieces_and_the_next_where_one_has_ended(
    here: None, plan: Plan
) -> None:
    """Eight prompts in four rows, four tokens of a prompt a step."""
    model = decoder_file("llama", "dynamo")
    whole = reference_tokens(model, PROMPTS, NEW)
    eos = whole[0][9]
    found = generated(plan(model, 4, 4, 4, *grid(pipeline=2, tensor=2)), "--eos", str(eos))
    assert found == [
        tokens[: tokens.index(eos) + 1] if eos in tokens else tokens for tokens in whole
    ]
    assert len({len(tokens) for tokens in found}) > 2


def in_place(plan: Plan, folder: Path, new: int, chunk: int) -> list[list[int]]:
    """Check the tokens of a decoder with GroupQueryAttention, which fills its cache from the front,
    and give them.
    """
    model = decoder(folder / "genai.onnx", layers=4, local_window_size=24)
    dims = [f"--dim={name}_sequence_length={max(LENGTHS) + new - 1}" for name in ("past", "total")]
    planned = plan(model, 1, 4, 4, *grid(pipeline=2, tensor=2), *dims)
    found = generated(planned, "--max-new-tokens", str(new), "--prefill-chunk", str(chunk))
    assert found == reference_tokens(model, PROMPTS, new)
    return found


def test_a_cache_that_is_written_in_place(here: None, plan: Plan, tmp_path: Path) -> None:
    found = in_place(plan, tmp_path, 24, 4)
    assert all(len(set(tokens)) > 3 for tokens in found), "tokens that hardly change say little"


@pytest.mark.sweep
def test_a_step_that_is_longer_than_what_is_left_feeds_tokens_again(
    here: None, plan: Plan, tmp_path: Path
) -> None:
    in_place(plan, tmp_path, 1, 6)


@exports_a_decoder
def test_sampled_tokens_are_the_same_on_any_ranks(plan: Plan, pools: Pools) -> None:
    """On two that generate starts, and on one of the tests' own."""
    model = decoder_file("llama", "dynamo")
    flags = (
        "--max-new-tokens",
        "16",
        "--temperature",
        "0.9",
        "--top-k",
        "40",
        "--top-p",
        "0.95",
        "--seed",
    )
    one = plan(model, 1, 1, 2, *grid())
    two = plan(model, 1, 2, 8, *grid(pipeline=2))
    found = generated(two, *flags, "7")
    with ranks_in(pools):
        assert generated(one, *flags, "7", "--prefill-chunk", "1") == found
        assert generated(one, *flags, "8") != found
    assert found != reference_tokens(model, PROMPTS, 16)


@pytest.mark.sweep
@pytest.mark.parametrize("flags", [
    "--strategy handcrafted --micro-batches 2", "--strategy pase", "--strategy tepdist", "--strategy graphpipe",
    "--strategy tessel_shapes --set strategy.shape=v", "--strategy auto", "--strategy data_parallel",
    (
        "--strategy grid --set strategy.pipeline=4 --set strategy.stages_per_rank=2 --micro-batches 4 "
        "--schedule interleaved_1f1b"
    ),
    "--strategy grid --set strategy.pipeline=4 --micro-batches 4 --schedule chimera",
])  # fmt: skip
@pytest.mark.parametrize(("kind", "exporter"), [("gpt2", "dynamo"), ("llama", "torchscript")])
def test_any_plan_gives_the_tokens_of_onnx_runtime(
    here: None, plan: Plan, kind: str, exporter: str, flags: str
) -> None:
    model = decoder_file(kind, exporter)
    assert generated(plan(model, 1, 4, 8, *flags.split())) == reference_tokens(model, PROMPTS, NEW)


@pytest.mark.sweep
def test_stages_may_have_groups_of_their_own_size(here: None, plan: Plan) -> None:
    model = decoder_file("gpt2")
    folder = plan(model, 1, 4, 8, *grid(pipeline=4))
    placement = folder / "placement.yaml"
    first, *others = placement.read_text(encoding="utf-8").split("micro_batch_size: 2")
    placement.write_text(
        f"{first}micro_batch_size: 1{'micro_batch_size: 2'.join(others)}", encoding="utf-8"
    )
    assert main(["plan", "--from", str(folder), "-q"]) == 0
    assert generated(folder) == reference_tokens(model, PROMPTS, NEW)
