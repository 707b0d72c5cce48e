"""Scenarios by name, a file each. A new one needs its file and its line here."""

from loadtest.scenarios.base import Scenario, World
from loadtest.scenarios.burst import Burst
from loadtest.scenarios.cancel_storm import CancelStorm
from loadtest.scenarios.drafter_swap import DrafterSwap
from loadtest.scenarios.mixed_rules import MixedRules
from loadtest.scenarios.ramp import Ramp
from loadtest.scenarios.soak import Soak

SCENARIOS: dict[str, type[Scenario]] = {
    scenario.name: scenario
    for scenario in (Ramp, Soak, Burst, CancelStorm, DrafterSwap, MixedRules)
}

__all__ = ["SCENARIOS", "Scenario", "World"]
