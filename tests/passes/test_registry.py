from __future__ import annotations

import dataclasses
import functools

import pytest

from autopipe.ir.errors import ConfigurationError
from autopipe.passes import registry


@pytest.mark.parametrize("name", registry.STRATEGIES)
def test_every_strategy_is_a_frozen_dataclass_of_its_name(name: str) -> None:
    found = registry.strategy_class(name)
    assert found.name == name
    assert found().__dataclass_params__.frozen
    assert all(field.name != "name" for field in dataclasses.fields(found))


@pytest.mark.parametrize("name", registry.SCHEDULERS)
def test_every_scheduler_is_a_frozen_dataclass_of_its_name(name: str) -> None:
    found = registry.scheduler_class(name)
    assert found.name == name
    assert found().__dataclass_params__.frozen


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(
        ConfigurationError, match=r"strategy 'pipedram' is unknown \(did you mean pipedream\?\)"
    ):
        registry.strategy_class("pipedram")
    with pytest.raises(ConfigurationError, match="schedule 'zzz' is unknown"):
        registry.scheduler_class("zzz")


def test_installed_packages_add_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    point = registry.importlib.metadata.EntryPoint(
        "mine", "autopipe.passes.placement.manual:Manual", "autopipe.strategies"
    )
    monkeypatch.setattr(
        registry.importlib.metadata,
        "entry_points",
        lambda group: [point] if group == point.group else [],
    )
    monkeypatch.setattr(
        registry, "_entry_points", functools.cache(registry._entry_points.__wrapped__)
    )
    assert "mine" in registry.strategy_names()
    assert registry.strategy_class("mine").__name__ == "Manual"
    assert "mine" not in registry.scheduler_names()
