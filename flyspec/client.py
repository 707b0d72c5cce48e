"""Asynchronous clients of a running stack: generation, administration, health. No torch.

Belongs here: calls to the orchestrator, the values that they take and give, and errors that say
what to change. Protobuf does not leave this module.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flyspec import rpc, wire
from flyspec.config import ADMIN_PORT, GENERATION_PORT
from flyspec.errors import FlyspecError, InvalidArgumentError, UnavailableError
from flyspec.types import (
    FinishReason,
    ModelInfo,
    Origin,
    Rule,
    SamplingParams,
    SessionStatus,
)
from flyspec.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

DEFAULT_ADDRESS = f"127.0.0.1:{GENERATION_PORT}"
DEFAULT_ADMIN_ADDRESS = f"127.0.0.1:{ADMIN_PORT}"

T = TypeVar("T")


# --- what is asked --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat of (role, content) as a prompt; the target's template renders it."""

    messages: Sequence[tuple[str, str]]

    @classmethod
    def of_user(cls, content: str) -> Chat:
        """A chat of one message of a user."""
        return cls((("user", content),))


Prompt = str | Sequence[int] | Chat


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """How to generate; the fields of `GenerateRequest`. None leaves it to the server."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    drafter: str = ""
    rule: Rule | None = None
    num_speculative_tokens: int | None = None
    max_loose_tokens: int | None = None
    max_loose_cost_nats: float | None = None
    exact_prefix_tokens: int = 0


# --- what is answered -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The generation was admitted; `rule` has every parameter set."""

    request_id: str
    model: str
    drafter: str
    seed: int
    prompt_token_ids: Sequence[int]
    rule: Rule
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Final tokens, where each came from, and the text that became complete with each."""

    text: str
    token_ids: Sequence[int]
    origins: Sequence[Origin]
    token_texts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class SpeculationMetrics:
    """What speculation did in one request (see the proto message of this name)."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_loose_tokens: int = 0
    loose_cost_nats: float = 0.0
    num_rollbacks: int = 0
    acceptance_histogram: Sequence[int] = ()
    num_rounds: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted drafts a round with drafts; 1 when nothing was drafted."""
        return 1.0 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the drafted tokens that was accepted; 0 when nothing was drafted."""
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)


@dataclass(frozen=True, slots=True)
class GenerationTimings:
    """Where the time of one request went, ns (see the proto message of this name)."""

    time_to_first_token_ns: int = 0
    total_ns: int = 0
    draft_model_ns: int = 0
    target_model_ns: int = 0
    round_overhead_p50_ns: int = 0
    queue_ns: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The generation ended."""

    finish_reason: FinishReason
    stop_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationMetrics
    timings: GenerationTimings


Event = Started | Chunk | Completion


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole generation."""

    started: Started
    chunks: Sequence[Chunk]
    completion: Completion

    @property
    def text(self) -> str:
        """The output."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        """The output's tokens."""
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def origins(self) -> list[Origin]:
        """Where each token came from."""
        return [origin for chunk in self.chunks for origin in chunk.origins]

    @property
    def mean_accepted_tokens(self) -> float:
        """τ_acc: emitted tokens a round."""
        return self.completion.completion_tokens / max(1, self.completion.speculation.num_rounds)


@dataclass(frozen=True, slots=True)
class Models:
    """What answers at an address. The default of drafters and rules comes first."""

    target: ModelInfo
    drafters: Sequence[str]
    rules: Sequence[str]


@dataclass(frozen=True, slots=True)
class UpstreamStatus:
    """A service behind the orchestrator; `error` says what is wrong when it is not ready."""

    address: str
    ready: bool
    error: str
    sessions: SessionStatus
    model: ModelInfo | None


@dataclass(frozen=True, slots=True)
class Status:
    """State of the orchestrator and of the services behind it."""

    ready: bool
    active_generations: int
    waiting_generations: int
    verify: UpstreamStatus
    draft: UpstreamStatus


@dataclass(frozen=True, slots=True)
class DrafterStatus:
    """A drafter that requests can name; `reason` says why it is not usable."""

    name: str
    kind: str
    active: bool
    address: str
    usable: bool
    reason: str
    model: ModelInfo | None


# --- clients --------------------------------------------------------------------------------


class _Connection:
    """A channel to one address, opened on first use; errors name the address."""

    flag = "--address"

    def __init__(self, address: str) -> None:
        self.address = address
        self._opened: grpc.aio.Channel | None = None

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self._opened is None:
            self._opened = rpc.connect(self.address)
        return self._opened

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is running and close the connection."""
        if self._opened is not None:
            await self._opened.close()
            self._opened = None

    async def check_health(self, service: str = "", timeout_s: float = 5.0) -> str:
        """The `grpc.health.v1` status of a service, of the whole server by default: SERVING, ..."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        request = health_pb2.HealthCheckRequest(service=service)
        response: Any = await self._call(stub.Check(request, timeout=timeout_s))
        name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        return name

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from None

    def _error_of(self, error: grpc.aio.AioRpcError) -> FlyspecError:
        """The server's own error, or that there is none: gRPC uses UNAVAILABLE for both."""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnavailableError(f"{self.address} did not answer in time")
        if error.code() is not grpc.StatusCode.UNAVAILABLE or rpc.was_said(error):
            return rpc.error_of(error)
        if "failed to connect" in (error.details() or ""):
            return UnavailableError(
                f"no server at {self.address}; start one with `flyspec serve` or pass {self.flag}"
            )
        return UnavailableError(f"lost the server at {self.address}: {error.details()}")


class Client(_Connection):
    """Generates text. `async with Client(address) as client: await client.complete("def f(")`."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        super().__init__(address)

    async def generate(
        self, prompt: Prompt, options: GenerateOptions | None = None
    ) -> AsyncIterator[Event]:
        """Stream a generation: `Started`, any number of `Chunk`, `Completion`.

        Closing the iterator early (`contextlib.aclosing`) cancels the request.
        """
        stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        try:
            request = _request_to_proto(prompt, options or GenerateOptions())
        except (ValueError, TypeError) as error:  # what protobuf says of -1 in an unsigned field
            raise InvalidArgumentError(f"the request cannot be written: {error}") from None
        call: Any = stub.Generate(request)
        try:
            async for response in call:
                yield _event_from_proto(response)
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from None
        finally:
            call.cancel()

    async def complete(self, prompt: Prompt, options: GenerateOptions | None = None) -> Generation:
        """Generate, and return everything at its end."""
        started: Started | None = None
        chunks: list[Chunk] = []
        async with aclosing(self.generate(prompt, options)) as events:  # type: ignore[type-var]
            async for event in events:
                match event:
                    case Started():
                        started = event
                    case Chunk():
                        chunks.append(event)
                    case Completion() if started is not None:
                        return Generation(started, chunks, event)
        raise UnavailableError(f"{self.address} ended the stream without a completion")

    async def list_models(self, timeout_s: float = 10.0) -> Models:
        """The models that answer here."""
        stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        request = generation_pb2.ListModelsRequest()
        response: Any = await self._call(stub.ListModels(request, timeout=timeout_s))
        return Models(
            target=wire.model_info_from_proto(response.target),
            drafters=tuple(response.drafters),
            rules=tuple(response.rules),
        )


class AdminClient(_Connection):
    """Asks the orchestrator how things stand, on its admin port."""

    flag = "--admin-address"

    def __init__(self, address: str = DEFAULT_ADMIN_ADDRESS) -> None:
        super().__init__(address)

    async def status(self, timeout_s: float = 10.0) -> Status:
        """State of the orchestrator and of the services behind it."""
        stub = admin_pb2_grpc.AdminServiceStub(self._channel)
        response: Any = await self._call(
            stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=timeout_s)
        )
        return Status(
            ready=response.ready,
            active_generations=response.active_generations,
            waiting_generations=response.waiting_generations,
            verify=_upstream_from_proto(response.verify),
            draft=_upstream_from_proto(response.draft),
        )

    async def list_drafters(self, timeout_s: float = 10.0) -> list[DrafterStatus]:
        """The drafters that requests can name."""
        stub = admin_pb2_grpc.AdminServiceStub(self._channel)
        response: Any = await self._call(
            stub.ListDrafters(admin_pb2.ListDraftersRequest(), timeout=timeout_s)
        )
        return [
            DrafterStatus(
                name=d.name,
                kind=d.kind,
                active=d.active,
                address=d.address,
                usable=d.usable,
                reason=d.reason,
                model=wire.model_info_from_proto(d.model) if d.HasField("model") else None,
            )
            for d in response.drafters
        ]


# --- protobuf -------------------------------------------------------------------------------


def _request_to_proto(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(
        sampling=wire.sampling_to_proto(options.sampling),
        seed=options.seed,
        max_tokens=options.max_tokens,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
        speculation=generation_pb2.Speculation(
            drafter=options.drafter,
            rule=wire.rule_to_proto(options.rule) if options.rule else None,
            num_speculative_tokens=options.num_speculative_tokens,
            max_loose_tokens=options.max_loose_tokens,
            max_loose_cost_nats=options.max_loose_cost_nats,
            exact_prefix_tokens=options.exact_prefix_tokens,
        ),
    )
    match prompt:
        case str():
            request.text = prompt
        case Chat():
            request.chat.messages.extend(
                generation_pb2.ChatMessage(role=role, content=content)
                for role, content in prompt.messages
            )
        case _:
            request.token_ids.ids.extend(prompt)
            request.token_ids.SetInParent()
    return request


def _event_from_proto(message: generation_pb2.GenerateResponse) -> Event:
    match message.WhichOneof("response"):
        case "started":
            s = message.started
            return Started(
                request_id=s.request_id,
                model=s.model,
                drafter=s.drafter,
                seed=s.seed,
                prompt_token_ids=list(s.prompt_token_ids),
                rule=wire.rule_from_proto(s.rule),
                num_speculative_tokens=s.num_speculative_tokens,
            )
        case "chunk":
            c = message.chunk
            return Chunk(
                text=c.text,
                token_ids=list(c.token_ids),
                origins=[Origin(o) for o in c.origins],
                token_texts=list(c.token_texts),
            )
        case "completion":
            return _completion_from_proto(message.completion)
        case _:
            raise FlyspecError("the server sent a message that this client does not know")


def _completion_from_proto(message: generation_pb2.GenerationCompletion) -> Completion:
    m, t = message.speculation, message.timings
    return Completion(
        finish_reason=FinishReason(message.finish_reason),
        stop_reason=message.stop_reason if message.HasField("stop_reason") else None,
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        speculation=SpeculationMetrics(
            num_spec_steps=m.num_spec_steps,
            num_draft_tokens=m.num_draft_tokens,
            num_accepted_draft_tokens=m.num_accepted_draft_tokens,
            num_loose_tokens=m.num_loose_tokens,
            loose_cost_nats=m.loose_cost_nats,
            num_rollbacks=m.num_rollbacks,
            acceptance_histogram=list(m.acceptance_histogram),
            num_rounds=m.num_rounds,
        ),
        timings=GenerationTimings(
            time_to_first_token_ns=t.time_to_first_token_ns,
            total_ns=t.total_ns,
            draft_model_ns=t.draft_model_ns,
            target_model_ns=t.target_model_ns,
            round_overhead_p50_ns=t.round_overhead_p50_ns,
            queue_ns=t.queue_ns,
        ),
    )


def _upstream_from_proto(message: admin_pb2.UpstreamStatus) -> UpstreamStatus:
    return UpstreamStatus(
        address=message.address,
        ready=message.ready,
        error=message.error,
        sessions=wire.session_status_from_proto(message.sessions),
        model=wire.model_info_from_proto(message.model) if message.HasField("model") else None,
    )
