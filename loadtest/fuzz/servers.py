"""The servers under attack, each with a canary, and what is seen of them from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Self

import grpc

from flyspec.cli.service import Child
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AdminClient, AsyncClient, GenerateOptions
from flyspec.errors import FlyspecError
from flyspec.rules.presets import RULE_PRESETS
from flyspec.v1 import common_pb2, draft_pb2, generation_pb2, verify_pb2
from loadtest.admin import left_open
from loadtest.fuzz.calls import Do, Script, Step, methods_of, play
from loadtest.fuzz.mutate import places
from loadtest.fuzz.seeds import LENGTH, PROMPT, Facts, Session, answered, messages
from loadtest.fuzz.source import SERVICES, ScriptSource

COUNT, CONTEXT, SESSIONS, MAX_DRAFTS, IDLE_TIMEOUT_S, PATIENCE_S = 8, 256, 48, 64, 20.0, 60.0
OPEN = {"token_ids": PROMPT, "sampling": {"min_tokens": 99}, "seed": 1}
"""A session that meets no end of sequence."""
CANARIES: dict[str, Session] = {
    "draft": messages(draft_pb2.DraftRequest, {"open": OPEN},
                      {"advance": {"keep_length": LENGTH, "max_tokens": COUNT}}),
    "verify": messages(
        verify_pb2.VerifyRequest,
        {"open": {**OPEN, "prompt_length": LENGTH, "rule": {"name": "exact"}}},
        {"round": {"keep_length": LENGTH, "draft_token_ids": PROMPT}},
        {"round": {"round_id": 1, "keep_length": LENGTH, "max_plain_tokens": COUNT}},
    ),
    "generation": messages(generation_pb2.GenerateRequest, {
        "token_ids": {"ids": PROMPT}, "max_tokens": COUNT, "seed": 1, "ignore_eos": True,
        "speculation": {"rule": {"name": "exact"}},
    }),
}  # fmt: skip
"""What a canary asks for: a proposal, verdicts, a text."""
LONG = (Do.PAUSE,) * 100


class WrongAnswerError(Exception):
    """The canary did not get what it got before."""


class Server:
    """A server under attack, with a canary whose tokens must be the same whatever others send.

    `async with Server(...)` records those tokens, and makes the `source` of scripts. The server is
    at one of the `addresses`; `services` are its processes, if they are known.
    """

    source: ScriptSource

    def __init__(
        self,
        name: str,
        addresses: Mapping[str, str],
        services: Mapping[str, Child] | None = None,
    ) -> None:
        self.name, self.address, self.services = name, addresses[name], services or {}
        self._addresses, self._hangs = addresses, False
        self._canary_at = "generation" if name == "admin" else name
        self._channel = grpc.aio.insecure_channel(addresses[self._canary_at])
        self._methods = methods_of(SERVICES[self._canary_at][0])

    async def __aenter__(self) -> Self:
        session = CANARIES[self._canary_at]
        (method,) = (m for m in self._methods if isinstance(session[0], m.request))
        steps: list[Step] = []
        for message in session:
            steps += [message.SerializeToString(), *[Do.READ] * answered(message)]
        self._canary = Script(method, "canary", tuple(steps))
        self._tokens = await self._ask(self._canary)
        info = await self._describe()
        model = next(getattr(m, f.name) for m, f in places(info)
                     if f.message_type is common_pb2.ModelInfo.DESCRIPTOR)  # fmt: skip
        self.source = ScriptSource(self.name, Facts(
            model.vocab_size or 1 << 16, model.context_length or CONTEXT, MAX_DRAFTS,
            [getattr(drafter, "name", drafter) for drafter in getattr(info, "drafters", ())],
            self._tokens[-COUNT:], self._addresses.get("draft", ""),
            tuple(getattr(info, "rules", ())) or tuple(RULE_PRESETS),
            [head.name for head in getattr(info, "heads", ())],
        ))  # fmt: skip
        for method, (first, *_) in self.source.sessions.items():
            if method.path.endswith("/AddTokenizer"):  # whose ids other sessions speak
                chunks = tuple(m.SerializeToString() for m in first)
                await play(self._channel, Script(method, "", chunks), PATIENCE_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    @property
    def gone(self) -> bool:
        """Whether a process is known to have ended, or to hang."""
        return self._hangs or bool(self._dead)

    @property
    def _dead(self) -> list[Child]:
        return [c for c in self.services.values() if c.process.returncode is not None]

    async def ending(self, patience_s: float) -> str:
        """How a process ended, known a moment later, or that the server hangs; or nothing."""
        for _ in range(10):
            if self._dead:
                return str(await self._dead[0].failure())
            await asyncio.sleep(0.05)
        with suppress(FlyspecError, grpc.aio.AioRpcError):
            try:
                await asyncio.wait_for(self.sessions(), patience_s)
            except TimeoutError:
                self._hangs = True
                return "the server hangs"
        return ""

    async def sessions(self) -> dict[str, int]:
        """Open sessions by kind."""
        if self._canary_at == "generation":
            async with AdminClient(self._addresses["admin"]) as admin:
                return left_open(await admin.status())
        return {"sessions": (await self._describe()).sessions.active}

    async def canary(self, slow: bool = False) -> None:
        """Ask for the canary's tokens; a `slow` session stays open for some seconds.

        Raises `WrongAnswerError`.
        """
        steps = [s for step in self._canary.steps for s in (step, *(LONG if slow else ()))]
        if (got := await self._ask(replace(self._canary, steps=tuple(steps)))) != self._tokens:
            raise WrongAnswerError(f"got {got} instead of {self._tokens}")

    async def _ask(self, script: Script) -> list[int]:
        outcome = await play(self._channel, script, PATIENCE_S)
        if outcome.status != "OK":
            raise WrongAnswerError(f"{outcome.status}: {outcome.details}")
        answers = map(script.method.response.FromString, outcome.answers)
        return [token for answer in answers for token in _tokens(answer)]

    async def _describe(self) -> Any:
        """What the server says of its model and itself."""
        method = next(m for m in self._methods if m.path.endswith(("/Describe", "/ListModels")))
        ask = self._channel.unary_unary(
            method.path, method.request.SerializeToString, method.response.FromString
        )
        return await ask(method.request())


def _tokens(answer: Any) -> list[int]:
    """What must not change of an answer."""
    match answer:
        case generation_pb2.GenerateResponse():
            return list(answer.chunk.token_ids)
        case verify_pb2.VerifyResponse():
            outcomes = [decision.outcome for decision in answer.decisions]
            return [*outcomes, *answer.plain_token_ids, answer.next_token_id]
    return list(answer.token_ids)


@asynccontextmanager
async def bundled(name: str, on_log: Callable[[str], None]) -> AsyncIterator[Server]:
    """A server of the whole stack with the bundled models."""
    options = StackOptions(
        device="cpu", dtype="float32", draft_dtype="float32", threads=1, draft_threads=1,
        max_sessions=SESSIONS, max_model_len=CONTEXT, log_level="warning",
        service_flags=("--idle-timeout-s", f"{IDLE_TIMEOUT_S}"),
    )  # fmt: skip
    async with Stack(options, on_log=on_log) as stack:
        await _fill_slots(stack.address)
        addresses = {"draft": stack.options.draft_address, "verify": stack.options.verify_address,
                     "generation": stack.address, "admin": stack.admin_address}  # fmt: skip
        async with Server(name, addresses, stack.services) as server:
            yield server


async def _fill_slots(address: str) -> None:
    """Fill every slot: the system grants its memory only then, which must not look like a leak.

    The fuzzed calls would do so little by little.
    """
    options = GenerateOptions(
        max_tokens=CONTEXT // 4, ignore_eos=True, num_speculative_tokens=4, drafter="model"
    )
    prompt = PROMPT * (CONTEXT // 2 // LENGTH)
    async with AsyncClient(address, max_retries=0) as client:
        await asyncio.gather(*(client.complete(prompt, options) for _ in range(SESSIONS)))
