"""Scenarios by name, one file each. A new one needs its file and its place in this list."""

from typing import Any

from loadtest.scenarios.base import Scenario, ScenarioVerdict, World
from loadtest.scenarios.drafter_swap import DrafterSwap
from loadtest.scenarios.mixed_rules import MixedRules
from loadtest.scenarios.overload import Overload
from loadtest.scenarios.ramp import Ramp
from loadtest.scenarios.recovery import KillRecovery
from loadtest.scenarios.soak import Soak

_ALL: tuple[type[Scenario[Any]], ...] = (
    Ramp, Soak, Overload, DrafterSwap, MixedRules, KillRecovery,
)  # fmt: skip
SCENARIOS = {scenario.name: scenario for scenario in _ALL}

__all__ = ["SCENARIOS", "Scenario", "ScenarioVerdict", "World"]
