"""The page at `/`: HTML rendered here, and the files below `/page/`. Both are open to everybody."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.staticfiles import StaticFiles

from flyspec.config import OrchestratorSettings
from flyspec.errors import InvalidArgumentError
from flyspec.rule_files import RuleBook
from flyspec.rules import PARAMETERS, Parameter, Rule, member_name
from flyspec.rules.presets import DEFAULT_RULE, RULE_PRESETS
from flyspec.rules.resolve import resolve_rule
from flyspec.speculation_length import requested
from flyspec.values.admin import JudgeInfo
from flyspec.values.tokens import LABELS, MAX_TEMPERATURE, MIN_TEMPERATURE
from orchestrator.fleet.fleet import Fleet
from orchestrator.front.http.drafters import DrafterEndpoints
from orchestrator.generation.plan import SEED_BITS
from orchestrator.generations import Generations

FILES = Path(__file__).with_name("page")
HEADERS: Mapping[str, str] = {
    "cache-control": "no-cache",  # asked for again each time, and sent again if it has changed
    "content-security-policy": "; ".join((
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:",
        "font-src 'self'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'",
        "frame-ancestors 'none'",
    )),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}  # fmt: skip
_TYPES = {bool: "boolean", int: "integer", float: "number"}


class PageFiles(StaticFiles):
    """The page's scripts and styles."""

    def __init__(self) -> None:
        super().__init__(directory=FILES / "static")

    async def get_response(self, path: str, scope: Any) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


class WebPage:
    """Renders the page.

    Where API keys are required, it tells strangers nothing of models, drafters and the operator's
    rules; its script asks for them with the visitor's key.
    """

    def __init__(
        self,
        generations: Generations,
        fleet: Fleet,
        settings: OrchestratorSettings,
        rules: RuleBook,
        drafters: DrafterEndpoints,
        version: str,
    ) -> None:
        self._generations, self._fleet, self._rules = generations, fleet, rules
        self._settings, self._drafters, self._version = settings, drafters, version
        self._is_open = not (settings.port_security.keys or settings.port_security.names)
        self._templates = Environment(
            loader=FileSystemLoader(FILES / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )

    async def show_page(self, request: Request) -> Response:
        """Return the page."""
        html = self._templates.get_template("index.html").render(data=self.data()).encode()
        headers = {**HEADERS, "etag": f'"{hashlib.sha256(html).hexdigest()[:32]}"'}
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return HTMLResponse(html, headers=headers)

    def data(self) -> dict[str, Any]:
        """Return what the template shows, and hands on to the script."""
        settings, models = self._settings, self._generations.models()
        k, book = settings.num_speculative_tokens, self._rules if self._is_open else RuleBook()
        names = models.rules if self._is_open else book.names(DEFAULT_RULE)
        judge = self._fleet.offer(self._fleet.target).judge if self._is_open else None
        most = self._fleet.max_draft_tokens
        ceiling = self._rules.limits.max_num_speculative_tokens
        served = {"id": models.target.name, "context_length": models.target.context_length}
        return {
            "version": self._version,
            "keys_required": settings.port_security.keys,
            "model": served if self._is_open else None,
            "default_rule": names[0],
            "num_speculative_tokens": k,
            "max_num_speculative_tokens": most if ceiling is None else min(most, ceiling),
            "min_temperature": MIN_TEMPERATURE,
            "max_temperature": MAX_TEMPERATURE,
            "seed_bits": SEED_BITS,
            "drafters": self._drafters.documents(False) if self._is_open else [],
            "origins": [{"name": o.name, "label": label} for o, label in LABELS.items()],
            "rules": [_rule(name, book, requested(k), judge) for name in names],
        }


def _rule(name: str, book: RuleBook, k: int, judge: JudgeInfo | None) -> dict[str, Any]:
    """Return a rule as it is resolved for the requested K, and the target's judge."""
    try:
        resolved = book.resolve(Rule(name), k, judge)
    except InvalidArgumentError:  # its own parameters are beyond the operator's limits
        resolved = resolve_rule(Rule(name), k)
    preset = RULE_PRESETS[resolved.name]
    return {
        "name": name,
        "preset": resolved.name,
        "accepts": preset.accepts,
        "lossless": preset.lossless,
        "token_exact": preset.token_exact,
        "parameters": [
            _parameter(PARAMETERS[parameter], getattr(resolved, parameter))
            for parameter in PARAMETERS
            if parameter in preset.defaults
        ],
    }


def _parameter(parameter: Parameter, default: Any) -> dict[str, Any]:
    members = parameter.members
    return {
        "name": parameter.name,
        "symbol": parameter.symbol,
        "help": parameter.help,
        "unit": parameter.unit,
        "type": "choice" if members else _TYPES[parameter.kind],
        "choices": [member_name(member) for member in members or ()],
        "default": member_name(default) if isinstance(default, IntEnum) else default,
        "measured_by": parameter.measured_by,
        "ranges": [
            {
                "measure": None if measure is None else member_name(measure),
                "minimum": range_.low,
                "maximum": range_.high,
            }
            for measure, range_ in parameter.ranges.items()
        ],
    }
