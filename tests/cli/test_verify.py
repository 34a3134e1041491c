"""What `autopipe verify` prints: a line a check, whose long names stay whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from autopipe.api import verification
from autopipe.api.verification import Check, Verification
from autopipe.backends.torch.verification import Difference, Spread
from autopipe.cli.main import main
from autopipe.ir.rounding import Rounding
from autopipe.ir.training import DataSettings

LONG = "/transformer/h.11/attn/c_attn/weight_that_is_called_by_a_name_of_more_than_eighty_characters_in_all"

MANIFEST = SimpleNamespace(
    rounding=Rounding("float32", 5000), model=Path("model.onnx"), data=DataSettings(), train=True
)
LIMIT = "4.2e-06 = 6.0e-08 (float32) x sqrt(5000 roundings)"


@pytest.fixture
def outputs_apart_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, Spread], None]:
    """Makes `verify` find a difference from ONNX Runtime, which has this spread, without running
    anything.
    """

    def prepare(relative: float, spread: Spread) -> None:
        def run(self: Verification, advance: Callable[[], None]) -> Iterator[Check]:
            pairs = [Difference("other", 4.1e-6), Difference(LONG, relative)]
            spreads = dict.fromkeys(("other", LONG), spread)
            yield self._check(
                "outputs of one device", "ONNX Runtime", pairs, dict, spreads=lambda: spreads
            )

        monkeypatch.setattr(Verification, "run", run)
        monkeypatch.setattr(Verification, "first_difference", lambda self, references: "")
        monkeypatch.setattr(verification, "open_program", lambda folder, model: MANIFEST)
        monkeypatch.setattr(
            verification,
            "find_node_of_tensors",
            lambda model, names, last: ("/h.11/MatMul", min(names)),
        )

    return prepare


@pytest.fixture
def gradients_apart_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes `verify` find this difference without running anything."""

    def prepare(relative: float, response: float = 0.0) -> None:
        def run(self: Verification, advance: Callable[[], None]) -> Iterator[Check]:
            responses = {LONG: response}
            yield self._check(
                "loss of the ranks", "one device", [Difference("loss", 0.0)], lambda: responses
            )
            others = [Difference("other", 5e-7)]
            yield self._check(
                "gradients of the ranks",
                "one device",
                [*others, Difference(LONG, relative)],
                lambda: responses,
            )

        monkeypatch.setattr(Verification, "run", run)
        monkeypatch.setattr(Verification, "first_difference", lambda self, references: "")
        monkeypatch.setattr(verification, "open_program", lambda folder, model: MANIFEST)
        monkeypatch.setattr(
            verification,
            "find_node_of_tensors",
            lambda model, names, last: ("/h.11/MatMul", min(names)),
        )

    return prepare


def test_equal_runs(
    gradients_apart_by: Callable[[float], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gradients_apart_by(7e-7)
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "compared                with        tensors  difference  worst",
        "loss of the ranks       one device        1    0.00e+00  loss",
        f"gradients of the ranks  one device        2    7.00e-07  {LONG}",
        f"equal: the limit is {LIMIT}",
    ]


def test_runs_that_differ_name_the_worst_tensor(
    gradients_apart_by: Callable[[float], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gradients_apart_by(2e-3)
    assert main(["verify", str(tmp_path)]) == 5
    shown = capsys.readouterr()
    assert shown.out.endswith(f"not equal: the limit is {LIMIT}\n")
    assert shown.err.splitlines() == [
        f"error: {LONG!r}: gradients of the ranks: 2.00e-03 away from one device (limit 4.2e-06)",
        (
            f"hint: 1 differ; the first that is computed is the gradient of {LONG!r}, at node "
            "'/h.11/MatMul'"
        ),
    ]


def test_a_tolerance_of_zero_is_taken_at_its_word(
    gradients_apart_by: Callable[[float], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gradients_apart_by(6.9e-8)
    assert main(["verify", str(tmp_path), "--tolerance", "0"]) == 5
    assert "not equal: the limit is 0\n" in capsys.readouterr().out


def test_a_plan_is_told_from_its_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text("{}")
    assert main(["verify", str(tmp_path)]) == 2
    hint = capsys.readouterr().err.splitlines()[1]
    program = f"the program {tmp_path / 'program'} of this plan"
    assert hint == f"hint: generate {program} with autopipe codegen {tmp_path}"


def test_conditioning_is_measured_where_the_least_limit_does_not_do(
    gradients_apart_by: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gradients_apart_by(3e-5, 1e-5)
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"gradients of the ranks: the limit of {LONG!r} is 4.4e-05, since one unit in the last "
        "place of every input "
        "and weight changes it by 1.0e-05",
        f"equal: the limit is {LIMIT}",
    ]
    gradients_apart_by(1e-4, 1e-5)
    assert main(["verify", str(tmp_path)]) == 5
    assert "1.00e-04 away from one device (limit 4.4e-05)" in capsys.readouterr().err


def test_a_given_tolerance_is_not_widened(
    gradients_apart_by: Callable[..., None], tmp_path: Path
) -> None:
    gradients_apart_by(3e-5, 1e-2)
    assert main(["verify", str(tmp_path), "--tolerance", "1e-5", "-q"]) == 5


def test_a_difference_within_the_spread_of_onnx_runtime_is_explained(
    outputs_apart_by: Callable[[float, Spread], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outputs_apart_by(3e-5, Spread(1e-6, 2e-5, 1e-5))
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"outputs of one device: the difference of {LONG!r}, 3.00e-05, is explained by ONNX "
        "Runtime's own spread: it is 1.0e-06 away from its results with optimizations, 2.0e-05 "
        "from its results in float64, of which one device is 1.0e-05 away, so the limit is 4.4e-05",
        f"equal: the limit is {LIMIT}",
    ]


def test_spreads_are_reported_in_json(
    outputs_apart_by: Callable[[float, Spread], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only for the tensor beyond the limit, though both were measured."""
    outputs_apart_by(3e-5, Spread(2e-5))
    assert main(["verify", str(tmp_path), "--json", "-q"]) == 0
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    (above,) = check["above"]
    assert above["tensor"] == LONG
    assert above["spread"] == {"optimizations": 2e-5, "float64": None, "one_device": None}
    assert above["limit"] == pytest.approx(4.2e-6 + 2 * 2e-5, rel=0.01)


@pytest.mark.parametrize("relative", [1e-3, 1e-2, math.inf])
def test_no_spread_explains_a_fault(
    outputs_apart_by: Callable[[float, Spread], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    relative: float,
) -> None:
    """Half of the digits of float32 remain, whatever ONNX Runtime's spread is."""
    outputs_apart_by(relative, Spread(math.inf, 1.0, relative))
    assert main(["verify", str(tmp_path)]) == 5
    shown = capsys.readouterr()
    assert "is not explained by ONNX Runtime's own spread" in shown.out
    assert "(limit 0.00024)" in shown.err


def test_a_given_tolerance_ignores_the_spread(
    outputs_apart_by: Callable[[float, Spread], None], tmp_path: Path
) -> None:
    outputs_apart_by(3e-5, Spread(1e-3, 1e-3, 1e-6))
    assert main(["verify", str(tmp_path), "--tolerance", "1e-5", "-q"]) == 5


@pytest.mark.parametrize(("one_device", "code"), [(4e-6, 0), (5e-6, 5)])
def test_results_equal_to_those_in_float64_are_right(
    outputs_apart_by: Callable[[float, Spread], None], tmp_path: Path, one_device: float, code: int
) -> None:
    """Within the limit of 4.2e-06, that is: then ONNX Runtime's own results may be as far from them
    as they are.
    """
    outputs_apart_by(3e-2, Spread(0.0, 3e-2, one_device))
    assert main(["verify", str(tmp_path), "-q"]) == code
