"""The whole examination of what `flyspec serve` would start."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace

from flyspec.config import NO_PORT, DraftSettings, OrchestratorSettings, VerifySettings
from flyspec.doctor.findings import Diagnosis, Mark
from flyspec.doctor.machine import machine
from flyspec.doctor.memory import alone, together
from flyspec.doctor.models import Examined, draft, pair, target
from flyspec.doctor.ports import ports
from flyspec.speculation_length import AUTO
from flyspec.spelling import respell


@dataclass(frozen=True)
class Planned:
    """The settings of three services to be started.

    `names` are, by service, those under which the user gave settings that its messages name by
    their flags.
    """

    verify: VerifySettings
    draft: DraftSettings
    orchestrator: OrchestratorSettings
    names: Mapping[str, Mapping[str, str]]

    def examine(self) -> Iterator[Diagnosis]:
        """Yield what is found, section by section."""
        wanted = set()
        if self.orchestrator.http_port not in (None, NO_PORT):
            wanted.add("http")
        if any(s.otlp_traces_endpoint for s in (self.verify, self.draft, self.orchestrator)):
            wanted.add("otlp")
        yield from machine(with_models=True, wanted=frozenset(wanted))
        found = yield from self._spelled("verify", target(self.verify))
        drafting = yield from self._spelled("draft", draft(self.draft))
        if found is not None and drafting is not None:
            yield from pair(found, drafting)
        fitted = []
        for service, model in (("verify", found), ("draft", drafting)):
            finding, fits = (None, None) if model is None else alone(model)
            if finding is not None:
                yield self._named(service, finding)
            if fits is not None:
                fitted.append(fits)
        yield from together(fitted)
        yield from self._rounds()
        yield from ports(
            [
                ("orchestrator", self.orchestrator, "--port"),
                ("draft", self.draft, "--draft-port"),
                ("verify", self.verify, "--verify-port"),
            ]
        )

    def _rounds(self) -> Iterator[Diagnosis]:
        k = self.orchestrator.num_speculative_tokens
        most = min(self.verify.max_speculative_tokens, self.draft.max_speculative_tokens)
        if k != AUTO and k > most:
            text = f"--num-speculative-tokens {k}: the services allow at most {most}; lower it"
            yield Diagnosis("speculation", "K", Mark.ERROR, text)
        else:
            shown = "adapts to the text" if k == AUTO else str(k)
            yield Diagnosis("speculation", "K", Mark.OK, f"{shown}, at most {most}")

    def _spelled(
        self, service: str, found: Generator[Diagnosis, None, Examined | None]
    ) -> Generator[Diagnosis, None, Examined | None]:
        """Pass findings on, named."""
        while True:
            try:
                finding = next(found)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            yield self._named(service, finding)

    def _named(self, service: str, finding: Diagnosis) -> Diagnosis:
        """A finding on a service with the names of what the user set."""
        return replace(finding, text=respell(finding.text, self.names.get(service, {})))
