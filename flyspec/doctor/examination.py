"""The whole examination of what `flyspec serve` would start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from flyspec.config import NO_PORT, DraftSettings, OrchestratorSettings, VerifySettings
from flyspec.doctor.findings import Diagnosis, Mark
from flyspec.doctor.machine import machine
from flyspec.doctor.memory import alone, together
from flyspec.doctor.models import draft, pair, target
from flyspec.doctor.ports import ports
from flyspec.errors import FlyspecError
from flyspec.rule_files import load_rules
from flyspec.speculation_length import AUTO, excess
from flyspec.spelling import respell


def examine(
    verify: VerifySettings,
    drafting: DraftSettings,
    orchestrator: OrchestratorSettings,
    names: Mapping[str, Mapping[str, str]],
) -> Iterator[Diagnosis]:
    """Yield what is found about three services to be started, section by section.

    `names` are, by service, those under which the user gave settings that its messages name by
    their flags.
    """
    wanted = set()
    if orchestrator.http_port not in (None, NO_PORT):
        wanted.add("http")
    if any(s.otlp_traces_endpoint for s in (verify, drafting, orchestrator)):
        wanted.add("otlp")
    yield from machine(with_models=True, wanted=frozenset(wanted))
    models = {"verify": target(verify), "draft": draft(drafting)}
    for service, model in models.items():
        yield from (_named(finding, names[service]) for finding in model.findings)
    yield from pair(*models.values())
    fitted = []
    for service, model in models.items():
        finding, fits = alone(model)
        if finding is not None:
            yield _named(finding, names[service])
        if fits is not None:
            fitted.append(fits)
    yield from together(fitted)
    yield _rule(orchestrator)
    yield _length(orchestrator, min(verify.max_speculative_tokens, drafting.max_speculative_tokens))
    yield from ports(
        [
            ("orchestrator", orchestrator, "--port"),
            ("draft", drafting, "--draft-port"),
            ("verify", verify, "--verify-port"),
        ]
    )


def _rule(settings: OrchestratorSettings) -> Diagnosis:
    try:
        load_rules(settings.rules_file, settings.rule, settings.num_speculative_tokens)
    except FlyspecError as error:
        return Diagnosis("speculation", "rule", Mark.ERROR, str(error))
    return Diagnosis("speculation", "rule", Mark.OK, settings.rule)


def _length(settings: OrchestratorSettings, most: int) -> Diagnosis:
    k = settings.num_speculative_tokens
    if problem := excess(k, most):
        return Diagnosis("speculation", "K", Mark.ERROR, problem)
    shown = "adapts to the text" if k == AUTO else str(k)
    return Diagnosis("speculation", "K", Mark.OK, f"{shown}, at most {most}")


def _named(finding: Diagnosis, names: Mapping[str, str]) -> Diagnosis:
    """Return a finding on a service with the names of what the user set."""
    return replace(finding, text=respell(finding.text, names))
