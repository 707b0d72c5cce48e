"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does.
settings.register_profile("flyspec", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flyspec")
