"""Checks of a stack before its services start, with errors that name the stack's own flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flyspec.cli.stack_options import SETTINGS, STACK_FLAGS
from flyspec.errors import ConfigError
from flyspec.preflight import check_draft, check_orchestrator, check_verify
from flyspec.settings_sources import environment_names, read_settings
from flyspec.speculation_length import excess
from flyspec.spelling import respell

_CHECKS: Mapping[str, Callable[[Any], None]] = {
    "orchestrator": check_orchestrator,
    "verify": check_verify,
    "draft": check_draft,
}


def settings_of(name: str, flags: Sequence[str]) -> Any:
    """Return a service's settings, as it will read them. Raises `ConfigError`."""
    try:
        return read_settings(SETTINGS[name], name, flags)
    except ConfigError as error:
        raise _named(name, flags, error) from None


def check_services(flags: Mapping[str, Sequence[str]]) -> None:
    """Check the services to be started with these flags. Raises `ConfigError`."""
    settings = {name: settings_of(name, given) for name, given in flags.items()}
    for name, given in settings.items():
        try:
            _CHECKS[name](given)
        except ConfigError as error:
            raise _named(name, flags[name], error) from None
    if len(settings) == len(_CHECKS):
        most = min(settings[name].max_speculative_tokens for name in ("verify", "draft"))
        if problem := excess(settings["orchestrator"].num_speculative_tokens, most):
            raise ConfigError(problem)


def names_of(name: str, flags: Sequence[str]) -> dict[str, str]:
    """Return what the user set, the stack's flag or a variable, by a service's own flags."""
    return {**STACK_FLAGS[name], **environment_names(SETTINGS[name], flags)}


def _named(name: str, flags: Sequence[str], error: ConfigError) -> ConfigError:
    return ConfigError(respell(str(error), names_of(name, flags)))
