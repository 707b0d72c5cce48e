"""Settings for all tests."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A shell lets what it runs in the background ignore interrupts, and children do as their parents.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on what else the machine does.
settings.register_profile("flyspec", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flyspec")
