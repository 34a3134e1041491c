"""A refused plan names the options with which memory holds it, with the memory that these need."""

from __future__ import annotations

import dataclasses

import pytest

from autopipe.configs.configuration import load_configuration, resolve_cluster
from autopipe.configs.zoo import build, configure
from autopipe.ir.errors import OutOfMemoryError
from autopipe.ir.problem import Mode, Optimizer
from autopipe.passes.cost.memory_check import size_text
from autopipe.passes.pipeline import Request, make_plan
from autopipe.passes.placement.grid import Grid
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward

FULL = "--recompute full"
SHARD = "--set optimizer.zero_stage=1"
LEFT_OUT = "which plan without --strategy tries"
OTHERWISE = "use more devices, smaller micro-batches or a higher memory limit"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Request:
    path = tmp_path_factory.mktemp("models") / "gpt.onnx"
    settings = {
        "layers": "4",
        "hidden": "64",
        "heads": "2",
        "sequence": "16",
        "vocabulary": "64",
        "loss": "true",
    }
    build(configure("gpt", settings)).save(path)
    cluster = resolve_cluster(load_configuration(words={"--gpus": "4", "--cluster": "a100-80gb"}))
    grid = Grid(pipeline=2, data=2, tensor=1)
    adamw = Optimizer("adamw")
    return Request(
        path,
        cluster,
        grid,
        OneForwardOneBackward(),
        batch_size=32,
        micro_batches=8,
        optimizer=adamw,
    )


def with_options(request: Request, *options: str) -> Request:
    if FULL in options:
        request = dataclasses.replace(request, recompute="full")
    if SHARD in options:
        request = dataclasses.replace(
            request, optimizer=dataclasses.replace(request.optimizer, shard=True)
        )
    return request


def peak(request: Request) -> int:
    return max(make_plan(request).timeline.peak_memory)


def refusal(request: Request, limit: int, advise: bool = True) -> str:
    with pytest.raises(OutOfMemoryError) as caught:
        make_plan(dataclasses.replace(request, memory_limit=limit), advise=advise)
    return caught.value.hint


def test_every_option_that_fits_is_named_and_no_other(base: Request) -> None:
    peaks = {each: peak(with_options(base, each)) for each in (FULL, SHARD)}
    both = peak(with_options(base, FULL, SHARD))
    assert (
        both < min(peaks.values())
        and max(peaks.values()) < peak(base)
        and len(set(peaks.values())) == 2
    )
    for limit in (*peaks.values(), both):
        hint = refusal(base, limit)
        for option, need in peaks.items():
            assert (f"{option} (needs {size_text(need)})" in hint) is (need <= limit)
        assert (f"{FULL} {SHARD} (needs {size_text(both)})" in hint) is (limit == both)
        assert f"a named strategy leaves out {FULL} and {SHARD}, {LEFT_OUT}" in hint
    assert refusal(base, both // 8) == f"{FULL} {SHARD} does not suffice; {OTHERWISE}"


def test_options_that_are_set_are_not_named(base: Request) -> None:
    both = peak(with_options(base, FULL, SHARD))
    settled = dataclasses.replace(with_options(base, SHARD), shard_open=False)
    hint = refusal(settled, both)
    assert hint.startswith(
        f"add {FULL} (needs {size_text(both)}); a named strategy leaves out {FULL}, {LEFT_OUT}"
    )
    assert SHARD not in hint
    stated = dataclasses.replace(settled, recompute="none")
    assert refusal(stated, both) == f"add {FULL} (needs {size_text(both)}); {OTHERWISE}"


def test_inference_has_no_such_options(base: Request) -> None:
    request = dataclasses.replace(base, mode=Mode.INFER)
    assert refusal(request, peak(request) // 8) == OTHERWISE


def test_without_advice_nothing_further_is_planned(base: Request) -> None:
    assert FULL not in refusal(base, peak(with_options(base, FULL)), advise=False)
