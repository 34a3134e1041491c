"""Cost files: read back as written, merged, and refused with file and key where they are none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.measured_costs import (
    MEASURED_COMMUNICATION,
    AffineTime,
    Costs,
    DeviceCosts,
    ExchangeCost,
    Operation,
    OperationCost,
    TaskCosts,
    TensorCosts,
    TimedBytes,
    Timing,
    costs_text,
    merge_costs,
    read_costs,
)

SECONDS = st.floats(0, 1e3)
TEXTS = st.text(max_size=8)
TIMINGS = st.builds(Timing, SECONDS, SECONDS, st.integers(1, 200))
TYPES = st.sampled_from(["", "float32[]", "float32[8,64]", "int64[3]", "bfloat16[1,2,3]"])
ATTRIBUTES = st.one_of(
    st.integers(-9, 9),
    SECONDS,
    TEXTS,
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.lists(TEXTS).map(tuple),
)
FIGURES = st.tuples(SECONDS, SECONDS)
LINES = st.builds(AffineTime, SECONDS, SECONDS)
TENSORS = st.builds(TensorCosts, SECONDS, SECONDS)


@st.composite
def operation_costs(draw: st.DrawFn) -> OperationCost:
    operands = tuple(draw(st.lists(TYPES, min_size=1, max_size=3)))
    gradients = tuple(sorted(draw(st.sets(st.integers(0, len(operands) - 1)))))
    attributes = tuple(sorted(draw(st.dictionaries(TEXTS, ATTRIBUTES, max_size=2)).items()))
    operation = Operation(draw(TEXTS), attributes, operands, (draw(TYPES),), gradients, "fp32")
    backward = draw(st.none() | TIMINGS)
    return OperationCost(operation, "matmul", draw(FIGURES), draw(FIGURES), draw(TIMINGS), backward)


EXCHANGE_COSTS = st.builds(
    ExchangeCost,
    st.sampled_from(MEASURED_COMMUNICATION),
    st.integers(2, 64),
    LINES,
    st.lists(st.builds(TimedBytes, st.integers(0, 2**40), TIMINGS), max_size=2).map(tuple),
)
TASKS = st.builds(
    TaskCosts,
    SECONDS,
    SECONDS,
    SECONDS,
    SECONDS,
    TENSORS,
    TENSORS,
    st.tuples(TENSORS, TENSORS, TENSORS),
)
DEVICES = st.builds(
    DeviceCosts,
    TEXTS,
    st.lists(TEXTS, max_size=2).map(tuple),
    st.lists(operation_costs(), max_size=3).map(tuple),
    st.none() | TASKS,
    st.lists(EXCHANGE_COSTS, max_size=2).map(tuple),
)
COSTS = (
    st.lists(DEVICES, min_size=1, max_size=2, unique_by=lambda each: each.device)
    .map(tuple)
    .map(Costs)
)


@given(COSTS)
def test_a_file_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, costs: Costs
) -> None:
    path = tmp_path_factory.mktemp("costs") / "a.costs"
    path.write_text(costs_text(costs), encoding="utf-8")
    assert read_costs(path) == costs


def an_operation(operand: str, seconds: float) -> OperationCost:
    operation = Operation("Relu", (), (operand,), (operand,), (0,), "fp32")
    return OperationCost(
        operation, "elementwise", (1.0, 1.0), (8.0, 8.0), Timing(seconds, 0.0, 5), None
    )


def a_device(*operations: OperationCost, **more: Any) -> DeviceCosts:
    return DeviceCosts("core", ("today",), operations, **more)


def test_merged_costs_hold_all_and_the_later_one_counts() -> None:
    tensors = TensorCosts(0.0, 0.0)
    tasks = TaskCosts(1.0, 1.0, 1.0, 1.0, tensors, tensors, (tensors,) * 3)
    sends = ExchangeCost("send", 2, AffineTime(1.0, 0.0), ())
    first = Costs(
        (a_device(an_operation("float32[1]", 1.0), an_operation("float32[2]", 2.0), tasks=tasks),)
    )
    second = Costs(
        (
            a_device(an_operation("float32[2]", 3.0), exchanges=(sends,)),
            replace(a_device(), device="other"),
        )
    )
    both = merge_costs([first, second])
    assert [each.device for each in both.devices] == ["core", "other"]
    assert [each.forward.seconds for each in both.devices[0].operations] == [1.0, 3.0]
    assert both.devices[0].tasks == tasks
    assert both.devices[0].exchanges == (sends,)
    assert both.devices[0].measured == ("today",)
    assert merge_costs([both, both]) == both


FORM = json.loads(costs_text(Costs((a_device(an_operation("float32[1]", 1.0)),))))


def broken(*path: str | int, to: object) -> dict[str, Any]:
    form: dict[str, Any] = json.loads(json.dumps(FORM))
    place: Any = form
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return form


OPERATION = ("devices", 0, "operations", 0)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ([], "the document is []"),
        ({"format": "autopipe.plan/1"}, "the format is 'autopipe.plan/1'"),
        (broken("devices", to=[]), "devices is []"),
        (
            broken("devices", to=[FORM["devices"][0]] * 2),
            "expected a list of devices with different names",
        ),
        (broken("devices", 0, "device", to=3), "devices[0].device is 3"),
        (broken("devices", 0, "exchanges", to=[{}]), "devices[0].exchanges[0].kind is missing"),
        (broken(*OPERATION, "operands", to=["float32[-1]"]), 'operands[0] is "float32[-1]"'),
        (broken(*OPERATION, "operands", to=["float31[1]"]), "operands[0] is"),
        (broken(*OPERATION, "gradients", to=[1]), "expected indices of the 1 operand"),
        (broken(*OPERATION, "attributes", to={"a": None}), "attributes.a is null"),
        (broken(*OPERATION, "attributes", to={"a": [1, "b"]}), "attributes.a is"),
        (broken(*OPERATION, "flops", to=[1]), "flops: 1 item where 2 are expected"),
        (broken(*OPERATION, "forward", "s", to=-1), "s is -1 (it must be at least 0)"),
        (broken(*OPERATION, "forward", "s", to="1"), "forward.s is"),
        (broken(*OPERATION, "forward", "repetitions", to=0), "forward.repetitions is 0"),
    ],
)
def test_what_is_no_cost_file_is_refused(tmp_path: Path, form: object, says: str) -> None:
    path = tmp_path / "bad.costs"
    path.write_text(json.dumps(form), encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        read_costs(path)
    assert says in str(caught.value)
    assert str(path) in caught.value.where


@pytest.mark.parametrize("text", ["", "{", '{"format": NaN}', "9" * 5000, "[" * 100_000])
def test_text_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.costs").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"not valid JSON|the document is"):
        read_costs(tmp_path / "bad.costs")
