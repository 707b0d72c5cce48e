"""What a plan is calculated from: one mode of `flyspec bench`, in its JSON document.

`flyspec bench` writes it for each rule and drafter, from requests sent one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flyspec.errors import ConfigError
from flyspec.step_costs import StepCosts
from flyspec.values.admin import MeasuredStep
from flyspec_lab.planning.acceptance import AgreeingRuns

KEY = "planning"
"""Where the document of `flyspec bench` has it: a list, one for each mode with drafts."""


@dataclass(frozen=True)
class MeasuredMode:
    """A mode of a bench: means per request, per round behind the first, and per drafted token.

    `num_speculative_tokens` is the K that was asked for, `tokens_per_request` of output, of which
    the opening yields the `undrafted_tokens`: the target decodes the first one by itself. Times are
    in ns: `draft_token_ns` of the drafter per token; `verify_ns` of a forward pass over a round;
    `rest_ns` of a round outside both; `opening_*_ns` until the end of a request's first round,
    which opens sessions and reads the prompt: in the drafter, in the target, and outside both.
    `plain_token_ns` is the target's forward pass for a token of plain decoding (None: not
    measured), `step_costs` its steps by tokens, timed at its start (none: unknown). A drafter
    drafts ahead where at least `ahead_share` of the rounds would use it (None: it never does).
    `cores` are those of the machine, which all services shared; 0: unknown.
    """

    mode: str
    group: str
    rule: str
    drafter: str
    token_exact: bool
    num_speculative_tokens: int
    requests: int
    tokens_per_request: float
    undrafted_tokens: float
    tokens_per_second: float
    mean_draft_tokens: float
    agreement: AgreeingRuns
    draft_token_ns: float
    verify_ns: float
    rest_ns: float
    opening_draft_ns: float
    opening_target_ns: float
    opening_rest_ns: float
    plain_token_ns: float | None = None
    step_costs: Sequence[MeasuredStep] = ()
    ahead_share: float | None = None
    cores: int = 0

    def rounds(self, num_drafts: int) -> float:
        """Return the mean rounds of a request at this K, behind its opening."""
        return self.agreement.rounds(num_drafts, self.tokens_per_request - self.undrafted_tokens)

    def step_ns(self, num_tokens: float) -> float:
        """Return the duration of a target step, with that many tokens of any number of rounds.

        The steps timed at its start give the slope, since only their ratios are reliable: they ran
        on end, while other services started. They are scaled to the measured time of a plain token,
        and moved by what a round's step took more: the caches are cold after other work.
        """
        rows = self.mean_draft_tokens + 1.0
        measured = self.step_costs
        if not measured and self.plain_token_ns is not None:
            measured = (
                MeasuredStep(1, round(self.plain_token_ns)),
                MeasuredStep(max(2, round(rows)), round(max(self.plain_token_ns, self.verify_ns))),
            )
        costs = StepCosts(measured)
        scale = self.verify_ns / _between(costs, rows)
        if self.plain_token_ns is not None:
            scale = min(scale, self.plain_token_ns / costs(1))
        cold_ns = self.verify_ns - scale * _between(costs, rows)
        return scale * _between(costs, num_tokens) + cold_ns * (num_tokens > 1)

    def batched(self, num_rounds: float) -> float:
        """Return a drafter's step with several sessions, relative to one with one.

        As the target's: they are steps of the same engine, a token for each session.
        """
        costs = StepCosts(self.step_costs)
        return _between(costs, num_rounds) / costs(1)


def _between(costs: StepCosts, num_tokens: float) -> float:
    """Return the cost of a mean number of tokens."""
    whole = int(num_tokens)
    more = num_tokens - whole
    return (1.0 - more) * costs(whole) + more * costs(whole + 1)


_AGAIN = "measure with `flyspec bench --rules exact --num-speculative-tokens 15 --output FILE`"
_MODES = TypeAdapter(list[MeasuredMode])


def read_measured(path: Path) -> list[MeasuredMode]:
    """Return the modes in a JSON document of `flyspec bench`. Raises `ConfigError`."""
    try:
        document: Any = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path}: is not JSON; {_AGAIN}") from None
    found = document.get(KEY) if isinstance(document, Mapping) else None
    if not found:
        raise ConfigError(f"{path}: has no mode with drafts from requests one at a time; {_AGAIN}")
    try:
        return _MODES.validate_python(found)
    except ValidationError as error:
        where = ".".join(map(str, (KEY, *error.errors()[0]["loc"])))
        raise ConfigError(f"{path}: {where}: {error.errors()[0]['msg']}; {_AGAIN}") from None


def choose(modes: Sequence[MeasuredMode], rule: str, drafter: str, group: str) -> MeasuredMode:
    """Return the mode of this rule, drafter and group of prompts; empty: any.

    Of several Ks the largest, from which all smaller ones can be calculated. Raises `ConfigError`
    if there is none, or more than one kind.
    """
    wanted = {"rule": rule, "drafter": drafter, "group": group}
    fit = [m for m in modes if all(not v or getattr(m, k) == v for k, v in wanted.items())]
    for name in wanted:
        there = sorted({getattr(m, name) for m in (fit or modes)})
        if not fit and wanted[name] and wanted[name] not in there:
            raise ConfigError(
                f"--{name} {wanted[name]}: was not measured; there is {_listed(there)}"
            )
        if fit and len(there) > 1:
            raise ConfigError(f"several were measured: give --{name}, one of {_listed(there)}")
    if not fit:
        raise ConfigError(
            "no mode has this rule, drafter and group; there is "
            + _listed(f"{m.rule} with {m.drafter} on {m.group}" for m in modes)
        )
    return max(fit, key=lambda m: m.num_speculative_tokens)


def _listed(names: Any) -> str:
    return ", ".join(names)
