"""The lines that tell how far a step is from the ideal, and by what other plans lost."""

from __future__ import annotations

from rich.console import Console

from autopipe.api.explanation import next_best_alternative
from autopipe.cli.output import group_text
from autopipe.cli.plan_report import candidates_screen, distance_lines
from autopipe.ir.plan import Alternative, Breakdown, Choice

CHOSEN = Alternative(
    Choice("grid", (("stages_per_rank", "2"), ("style", "v")), "zb_v", shard=True),
    1.0,
    0.9,
    8,
    4,
    0.1,
    2**20,
)
SLOWER = Alternative(
    Choice("pase", schedule="kfkb", recompute="auto"), 1.25, 1.25, 1, 1, 0.0, 2**30
)
SAME = Alternative(Choice("tepdist", schedule="kfkb"), 1.25, 1.25, 1, 1, 0.0, 2**30, same_as="pase")
BOUNDED = Alternative(
    Choice("handcrafted"),
    None,
    2.0,
    4,
    1,
    refused="skipped: no schedule of it takes less than 2 s",
)
TOO_LARGE = Alternative(
    Choice("piper"),
    refused="stage 0 on device 0 would need 9.00 GiB, 1.00 GiB above the limit of 8.00 GiB",
)
ALL = (SLOWER, BOUNDED, TOO_LARGE, SAME, CHOSEN)


def shown(width: int = 120) -> list[str]:
    console = Console(width=width, markup=False, highlight=False)
    with console.capture() as capture:
        for part in candidates_screen(ALL, 1.0):
            console.print(part)
    return capture.get().splitlines()


def test_each_strategy_has_a_row_that_says_by_what_it_lost() -> None:
    lines = shown()
    assert lines[0] == "5 candidates, 3 of them simulated; the best of each strategy:"
    rows = {line.split()[0]: line for line in lines}
    assert all(
        word in rows["grid"]
        for word in (
            "(stages_per_rank=2 style=v, zero-1)",
            "zb_v",
            "1.00 s",
            "same",
            "900 ms",
            "1.00 MiB",
        )
    )
    assert all(
        word in rows["pase"] for word in ("(recompute)", "kfkb", "1.25 s", "+25.0%", "1.00 GiB")
    )
    assert "kfkb, as pase" in rows["tepdist"]
    assert "≥ 2.00 s" in rows["handcrafted"] and "≥ +100.0%" in rows["handcrafted"]
    assert "9.00 GiB, 1.00 GiB above the limit of 8.00 GiB" in rows["piper"]
    assert [line.split()[0] for line in lines[3:]] == [
        "grid",
        "pase",
        "tepdist",
        "handcrafted",
        "no",
        "piper",
    ]


def test_nothing_is_lost_in_a_narrow_terminal() -> None:
    text = " ".join(shown(80))
    for word in ("+25.0%", "1.00 GiB", "≥ 2.00 s", "900 ms"):
        assert word in text
    assert all(len(line) <= 80 for line in shown(80))


def test_nothing_is_shown_where_nothing_was_weighed() -> None:
    assert list(candidates_screen((), 1.0)) == []


def test_the_next_best_of_other_strategies_are_told_alone() -> None:
    console = Console(width=100, markup=False, highlight=False)
    with console.capture() as capture:
        for part in candidates_screen(ALL, 1.0, most=3):
            console.print(part)
    lines = capture.get().splitlines()
    assert lines[0] == "5 candidates, 3 of them simulated; the best of other strategies:"
    assert [line.split()[0] for line in lines[1:]] == ["strategy", "pase"]


def test_the_next_best_plan_is_not_the_chosen_one() -> None:
    assert next_best_alternative(ALL) == SLOWER
    assert next_best_alternative((CHOSEN, BOUNDED, TOO_LARGE)) is None
    assert next_best_alternative(()) is None


def test_the_distance_to_the_ideal_is_told_by_its_parts() -> None:
    parts = Breakdown(
        0.5,
        bubble_s=0.2,
        exposed_p2p_s=0.1,
        gradients_s=0.15,
        launch_overhead_s=0.0498,
        update_s=0.0002,
    )
    first, second = distance_lines(parts, 4)
    assert first == (
        "ideal 500 ms (one device's work at the roofline / 4), the step of 1.00 s takes 2.00 "
        "times that"
    )
    assert second == (
        "of the step: ideal 50.0%, communication 25.0% (gradients 15.0%, exposed P2P 10.0%), "
        "bubble 20.0%, launch overhead 5.0%"
    )


def test_one_device_at_its_best_has_nothing_to_lose() -> None:
    assert list(distance_lines(Breakdown(1.0), 1)) == [
        "ideal 1.00 s (the device's work at the roofline), the step of 1.00 s takes 1.00 times that"
    ]


def test_a_group_of_many_devices_is_told_in_a_few_words() -> None:
    assert group_text((0, 1, 2, 3)) == "0-3"
    assert group_text(tuple(range(1, 512, 16))) == "1,17,...,497 (32 of them)"
