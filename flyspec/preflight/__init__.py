"""Checks before a service loads anything: its models' files, devices, ports and certificates.

Within a fraction of a second, and without torch. What the services check later, with everything
loaded, is checked there; here is what a typing mistake can get wrong. Raises `ConfigError`.
"""

from flyspec.preflight.services import check_draft as check_draft
from flyspec.preflight.services import check_orchestrator as check_orchestrator
from flyspec.preflight.services import check_verify as check_verify
