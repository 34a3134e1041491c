"""Random numbers of operators: a block equals the same block of the whole."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.backends.torch.runtime import operators
from autopipe.backends.torch.runtime.random_numbers import random_streams
from autopipe.backends.torch.runtime.random_numbers.philox import as_unsigned
from autopipe.backends.torch.runtime.random_numbers.random_streams import (
    RandomStream,
    RandomStreams,
)

CPU = torch.device("cpu")
WHOLE = (20, 40, 50)


def words_of(stream: RandomStream, shape: tuple[int, ...]) -> torch.Tensor:
    return stream.draw(shape, as_unsigned, torch.int64)


def begun(position: int = 0, seed: int = 1, step: int = 2, sample: int = 0) -> RandomStreams:
    random = RandomStreams(CPU, position)
    random.begin(seed, step, sample, sample)
    return random


@st.composite
def cut_tensors(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int] | None]:
    """The shape of a block, the degree of each dimension, and where samples are counted."""
    rank = draw(st.integers(0, 4))
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=rank, max_size=rank)))
    degrees = tuple(draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))
    if not rank or draw(st.booleans()):
        return shape, degrees, None
    dimension = draw(st.integers(0, rank - 1))
    extent = shape[dimension] * degrees[dimension]
    outer = draw(st.sampled_from([each for each in range(1, extent + 1) if extent % each == 0]))
    left = extent // outer
    inner = draw(st.sampled_from([each for each in range(1, left + 1) if left % each == 0]))
    return shape, degrees, (dimension, outer, inner)


@given(cut_tensors(), st.integers(0, 2**64 - 1))
@settings(deadline=None)
def test_a_block_is_what_it_is_of_the_whole(
    cut: tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int] | None], node: int
) -> None:
    """Devices lie along the dimensions, the last one fastest."""
    shape, degrees, samples = cut
    whole = words_of(
        begun()(node, samples=samples), tuple(map(math.prod, zip(shape, degrees, strict=True)))
    )
    strides = [math.prod(degrees[dimension + 1 :]) for dimension in range(len(degrees))]
    cuts = tuple(((degree, stride),) for degree, stride in zip(degrees, strides, strict=True))
    for position, places in enumerate(itertools.product(*map(range, degrees))):
        block = tuple(
            slice(place * own, (place + 1) * own) for place, own in zip(places, shape, strict=True)
        )
        found = words_of(begun(position)(node, cuts, samples), shape)
        assert torch.equal(found, whole[block])


@given(cut_tensors(), st.integers(1, 4))
@settings(deadline=None)
def test_a_sample_has_the_same_numbers_in_any_micro_batch(
    cut: tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int] | None], count: int
) -> None:
    """That of one sample too, whose axes say nothing of where it is."""
    shape, _, _ = cut
    if not shape:
        return
    for dimension, inner in itertools.product(range(len(shape)), (1, 3)):
        one = (*shape[:dimension], 2 * inner, *shape[dimension + 1 :])
        all_of_them = (*shape[:dimension], 2 * count * inner, *shape[dimension + 1 :])
        whole = words_of(begun()(5, samples=(dimension, 2, inner)), all_of_them)
        apart = whole.unflatten(dimension, (2, count, inner))
        for sample in range(count):
            expected = apart.select(dimension + 1, sample).flatten(dimension, dimension + 1)
            for samples in (None, (dimension, 2, inner)):
                assert torch.equal(
                    words_of(begun(sample=sample)(5, samples=samples), one), expected
                )


def test_each_seed_step_sample_and_node_has_numbers_of_its_own() -> None:
    first = words_of(begun()(5), WHOLE)
    others = (
        begun(seed=2)(5),
        begun(step=3)(5),
        begun(sample=1)(5),
        begun()(6),
        begun()(5 + 2**32),
    )
    assert len(first.unique()) > 0.999 * first.numel()
    for other in others:
        assert float((words_of(other, WHOLE) == first).double().mean()) < 1e-3


def test_pieces_that_are_made_apart_are_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [words_of(begun()(5, samples=0), shape) for shape in ((3, 5, 41), (70,), (7, 1))]
    monkeypatch.setitem(random_streams._CHUNK_BLOCKS, "cpu", 3)
    found = [words_of(begun()(5, samples=0), shape) for shape in ((3, 5, 41), (70,), (7, 1))]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_dropout_drops_that_share_and_keeps_the_mean(ratio: float) -> None:
    data = torch.ones(WHOLE, requires_grad=True)
    result, mask = operators.dropout_and_mask(data, ratio, begun()(5))
    kept = mask.double()
    deviation = math.sqrt(ratio * (1 - ratio))
    assert abs(float(kept.mean()) - (1 - ratio)) < 4 * deviation / math.sqrt(data.numel())
    assert abs(float(kept.std()) - deviation) < 0.01
    neighbours = torch.corrcoef(torch.stack([kept.flatten()[:-1], kept.flatten()[1:]]))[0, 1]
    assert abs(float(neighbours)) < 4 / math.sqrt(data.numel())
    assert torch.equal(result, torch.where(mask, 1 / (1 - ratio), 0.0).float())
    result.sum().backward()
    assert torch.equal(data.grad, result.detach())
    for operand in (torch.tensor(ratio), torch.tensor([ratio])):
        again = operators.dropout(data, operand, begun()(5))
        torch.testing.assert_close(again, result)


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_ratios_of_nothing_and_of_all(kind: type) -> None:
    data = torch.randn(3, 5, requires_grad=True)
    assert torch.equal(operators.dropout(data, kind(0.0), begun()(5)), data)
    none = operators.dropout(data, kind(1.0), begun()(5))
    none.sum().backward()
    assert not none.any() and not data.grad.any()


def test_dropout_that_is_told_not_to_train_keeps_all() -> None:
    data = torch.randn(3, 5)
    assert torch.equal(operators.dropout(data, 0.5, begun()(5), torch.tensor(False)), data)
    assert torch.equal(
        operators.dropout(data, 0.5, begun()(5), torch.tensor(True)),
        operators.dropout(data, 0.5, begun()(5)),
    )


def test_masks_are_the_same_in_half_precision() -> None:
    data = torch.ones(WHOLE)
    single, narrow = (
        operators.dropout_and_mask(each, 0.3, begun()(5)) for each in (data, data.bfloat16())
    )
    assert torch.equal(single[1], narrow[1]) and narrow[0].dtype == torch.bfloat16


def test_moments_of_other_distributions() -> None:
    near = 4 / math.sqrt(math.prod(WHOLE))
    normal = operators.normal(WHOLE, 2.0, 3.0, begun()(5), torch.float64)
    assert abs(float(normal.mean()) - 2) < 3 * near and abs(float(normal.std()) - 3) < 3 * near
    assert abs(float(((normal - 2) / 3).pow(4).mean()) - 3) < 10 * near
    uniform = operators.uniform(WHOLE, -1.0, 2.0, begun()(5), torch.float32)
    assert abs(float(uniform.mean()) - 0.5) < near and abs(float(uniform.var()) - 0.75) < near
    assert float(uniform.min()) >= -1 and float(uniform.max()) <= 2
    likely = torch.full(WHOLE, 0.2)
    assert abs(float(operators.bernoulli(likely, begun()(5), torch.float32).mean()) - 0.2) < near
    logarithms = torch.tensor([[0.1, 0.0, 0.6, 0.3]]).log().expand(10, 4)
    drawn = operators.multinomial(logarithms, 1000, begun()(5), torch.int32)
    shares = torch.bincount(drawn.flatten(), minlength=4) / drawn.numel()
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.0, 0.6, 0.3]), atol=0.03, rtol=0)
    assert drawn.dtype == torch.int32 and not int((drawn == 1).sum())


def test_a_forward_that_draws_nothing_makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda numbers: made.append(numbers) or make(numbers))  # type: ignore[func-returns-value]
    random = RandomStreams(CPU)
    for number in range(3):
        random.begin(1, 2, number, number)
    assert not made
    first, second = (words_of(random(node), (4,)) for node in (5, 6))
    assert len(made) == 1 and not torch.equal(first, second)
    in_advance = RandomStreams(CPU, draws=True)
    in_advance.begin(1, 2, 2, 2)
    made.clear()
    assert torch.equal(words_of(in_advance(5), (4,)), first) and not made, (
        "a compiled forward finds it there"
    )
