"""A draft service that lies: it forwards an honest one's answers, altered.

`LIES` lists the ways to lie, each with the fault that the orchestrator must find.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import grpc

from flyspec import rpc
from flyspec.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from orchestrator.upstreams.proposal_checks import DraftFault

HUGE = 2**64 - 1
LARGE = 1 << 20


class End(Exception):
    """Ends a stream with this status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code, details)
        self.code, self.details = code, details


@dataclass(frozen=True)
class Asked:
    """A question, the `number`-th of its session from 1 on, and the honest answer to it."""

    answer: draft_pb2.DraftResponse
    number: int


Said = draft_pb2.DraftResponse | bytes
Tell = Callable[[Asked], Iterable[Said]]


@dataclass(frozen=True)
class Lie:
    """A way to lie, and its fault; `top_k` is that of the distributions concerned."""

    name: str
    fault: DraftFault
    tell: Tell
    top_k: int | None = None


class LyingDrafter:
    """Answers like the drafter at `upstream`, with a `lie` unless that is None.

    `description` changes its account of itself. `num_asked` counts questions, `num_opened`
    sessions, `num_bytes` the bytes of its answers.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self.lie: Tell | None = None
        self.description: Callable[[Any], None] | None = None
        self.num_asked = self.num_opened = self.num_bytes = 0
        self.address = ""

    async def __aenter__(self) -> Self:
        self._channel = rpc.connect(self._upstream)
        self._honest = draft_pb2_grpc.DraftServiceStub(self._channel)
        self._server = grpc.aio.server()
        handlers = {
            "Describe": grpc.unary_unary_rpc_method_handler(
                self._describe, draft_pb2.DraftServiceDescribeRequest.FromString, _serialize
            ),
            "AddTokenizer": grpc.stream_unary_rpc_method_handler(
                lambda requests, _: self._honest.AddTokenizer(requests),
                draft_pb2.AddTokenizerRequest.FromString,
                _serialize,
            ),
            "Draft": grpc.stream_stream_rpc_method_handler(
                self._draft, draft_pb2.DraftRequest.FromString, _serialize
            ),
        }
        generic = grpc.method_handlers_generic_handler("flyspec.v1.DraftService", handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)
        await self._channel.close()

    async def _describe(self, request: Any, context: Any) -> Any:
        told = await self._honest.Describe(request)
        if self.description is not None:
            self.description(told)
        return told

    async def _draft(self, requests: Any, context: Any) -> None:
        call = self._honest.Draft()
        number = 0
        self.num_opened += 1
        try:
            while (request := await context.read()) is not grpc.aio.EOF:
                await call.write(request)
                if request.HasField("open"):
                    continue
                self.num_asked, number = self.num_asked + 1, number + 1
                asked = Asked(await _answer(call), number)
                for said in self.lie(asked) if self.lie else (asked.answer,):
                    self.num_bytes += len(_serialize(said))
                    await context.write(said)
        except End as end:
            if end.code is not grpc.StatusCode.OK:
                await context.abort(end.code, end.details)
        except grpc.aio.InternalError:
            return  # nobody listens any more
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())
        finally:
            call.cancel()


def _serialize(message: Any) -> bytes:
    data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return data


async def _answer(call: Any) -> draft_pb2.DraftResponse:
    """Return the honest answer, in one piece."""
    whole = draft_pb2.DraftResponse()
    start = None
    while not whole.last:
        piece = await call.read()
        if piece is grpc.aio.EOF:
            raise End(grpc.StatusCode.UNAVAILABLE, "the honest one ended")
        if piece.ahead:  # of an earlier answer, and not waited for
            continue
        start = piece.start_position if start is None else start
        whole.MergeFrom(piece)
    whole.start_position = start or 0
    return whole


# --- ways to lie ------------------------------------------------------------------------------


def _edited(message: Any, change: Callable[[Any], Any], **fields: Any) -> Any:
    copy = type(message).FromString(message.SerializeToString())
    for name, value in fields.items():
        setattr(copy, name, value)
    change(copy)
    return copy


def _changed(change: Callable[[Any], Any] = lambda _: None, **fields: Any) -> Tell:
    """Send the answer with other fields."""
    return lambda asked: [_edited(asked.answer, change, **fields)]


def _moved(message: Any, **by: int) -> None:
    for name, number in by.items():
        setattr(message, name, getattr(message, name) + number)


def _more(message: Any, count: int) -> None:
    message.token_ids.extend([5] * count)
    message.confidences.extend([0.5] * count)
    message.origins.extend([common_pb2.TOKEN_ORIGIN_EXACT_MODEL] * count)


def _all(name: str, value: Any) -> Tell:
    """Send one value for every token, in a list of the message."""
    return _changed(lambda m: getattr(m, name).__setitem__(slice(None), [value] * len(m.token_ids)))


def _each(change: Callable[[Any], Any]) -> Tell:
    """Change every distribution."""
    return _changed(lambda m: [change(distribution) for distribution in m.distributions])


def _log_probs(distribution: Any, *values: float) -> None:
    """Put these half floats, over and over, into a distribution."""
    size = len(distribution.log_probs) // 2
    row = itertools.islice(itertools.cycle(values), size)
    distribution.log_probs = struct.pack(f"<{size}e", *row)


def _arranged(arrange: Callable[[list[Any]], Iterable[Any]]) -> Tell:
    """Send the answer in pieces of a token, arranged otherwise, unless it is too short to."""

    def tell(asked: Asked) -> Iterable[Said]:
        answer = asked.answer
        pieces = [
            draft_pb2.DraftResponse(
                round_id=answer.round_id,
                builds_on=answer.builds_on,
                start_position=answer.start_position + index,
                token_ids=[token],
                origins=answer.origins[index : index + 1],
                distributions=answer.distributions[index : index + 1],
                confidences=answer.confidences[index : index + 1],
                last=index == len(answer.token_ids) - 1,
            )
            for index, token in enumerate(answer.token_ids)
        ]
        return arrange(pieces) if len(pieces) > 1 else [answer]

    return tell


def _endless(token_ids: list[int], padding: bytes = b"") -> Tell:
    """Send pieces of these tokens without end."""
    return lambda asked: (
        draft_pb2.DraftResponse(
            round_id=asked.answer.round_id,
            builds_on=asked.answer.builds_on,
            start_position=asked.answer.start_position + index * len(token_ids),
            token_ids=token_ids,
            origins=[common_pb2.TOKEN_ORIGIN_EXACT_MODEL] * len(token_ids),
        ).SerializeToString()
        + padding
        for index in itertools.count()
    )


def _ended(code: grpc.StatusCode, details: str = "so it is") -> Tell:
    """End the stream, once a question was answered."""

    def tell(asked: Asked) -> Iterator[Said]:
        if asked.number > 1:
            raise End(code, details)
        yield asked.answer

    return tell


def _padding(num_bytes: int) -> bytes:
    """Return so many bytes as field 15 of a message, which no message has."""
    first = common_pb2.TokenDistribution(log_probs=bytes(num_bytes)).SerializeToString()
    return b"\x7a" + first[1:]


NAN, INF = float("nan"), float("inf")
F, CODE = DraftFault, grpc.StatusCode
LIES = [
    Lie("another round", F.ROUND, _changed(lambda m: _moved(m, round_id=1))),
    Lie("every answer twice", F.ROUND, lambda a: [a.answer, a.answer]),
    Lie("an answer that nobody asked for", F.ROUND, lambda a: [
        a.answer, _edited(a.answer, lambda m: _moved(m, round_id=1000))]),
    Lie("a second end", F.ROUND, lambda a: [
        a.answer, draft_pb2.DraftResponse(round_id=a.answer.round_id, last=True)]),
    Lie("another session's prefix", F.POSITION,
        _changed(lambda m: _moved(m.builds_on, keep_length=7))),
    Lie("another last token", F.POSITION, _changed(lambda m: _moved(m.builds_on, next_token_id=1))),
    Lie("a tree that nobody asked for", F.TREE,
        _changed(lambda m: m.parents.extend([0] * len(m.token_ids)))),
    Lie("tokens further on", F.POSITION, _changed(lambda m: _moved(m, start_position=1))),
    Lie("a piece left out", F.POSITION, _arranged(lambda found: found[1:])),
    Lie("a piece twice", F.POSITION, _arranged(lambda found: [found[0], *found])),
    Lie("four tokens more", F.TOKENS, _changed(lambda m: _more(m, 4))),
    Lie("a million tokens", F.SIZE, _changed(lambda m: _more(m, LARGE))),
    Lie("ids without end", F.TOKENS, _endless([5])),
    Lie("pieces without end", F.CHUNKS, _endless([])),
    Lie("megabytes without end", F.SIZE, _endless([5], _padding(LARGE))),
    Lie("a message of eight megabytes", F.SIZE, lambda a: [_padding(8 * LARGE)]),
    Lie("bytes that are no message", F.UNREADABLE, lambda a: [b"\xff" * 40]),
    Lie("an id just beyond the vocabulary", F.VOCABULARY, _all("token_ids", 400)),
    Lie("loosely accepted drafts", F.ORIGINS, _all("origins", common_pb2.TOKEN_ORIGIN_LOOSE)),
    Lie("drafts from nowhere", F.UNREADABLE, _all("origins", 77)),
    Lie("no origins", F.UNREADABLE, _changed(lambda m: m.ClearField("origins"))),
    Lie("confidence NaN", F.CONFIDENCES, _all("confidences", NAN)),
    Lie("confidence below 0", F.CONFIDENCES, _all("confidences", -0.25)),
    Lie("confidence 2", F.CONFIDENCES, _all("confidences", 2.0)),
    Lie("confidences of the first token alone", F.CONFIDENCES, _arranged(lambda found: [
        found[0], *(_edited(p, lambda m: m.ClearField("confidences")) for p in found[1:])])),
    Lie("scores of what was not asked about", F.AGREEMENTS,
        _changed(lambda m: m.agreements.extend([True] * 3))),
    Lie("ten thousand scores", F.SIZE, _changed(lambda m: m.agreements.extend([True] * 10_000))),
    Lie("all of every time", F.TIMINGS, _changed(model_ns=HUGE, queue_ns=HUGE, service_ns=HUGE)),
    Lie("longer in the queue than in all", F.TIMINGS,
        _changed(lambda m: setattr(m, "queue_ns", m.service_ns + 1))),
    Lie("times before the end", F.TIMINGS, _arranged(
        lambda found: [_edited(found[0], lambda m: setattr(m, "service_ns", 1)), *found[1:]])),
    Lie("rows that nobody asked for", F.SIZE, _changed(
        lambda m: [m.distributions.add(log_probs=bytes(LARGE // 4)) for _ in m.token_ids])),
    Lie("NaN", F.DISTRIBUTIONS, _each(lambda d: _log_probs(d, NAN, -1.0)), 0),
    Lie("probability 2", F.DISTRIBUTIONS, _each(lambda d: _log_probs(d, -1.0, 0.69)), 0),
    Lie("probability 0 of everything", F.DISTRIBUTIONS, _each(lambda d: _log_probs(d, -INF)), 0),
    Lie("half a row", F.DISTRIBUTIONS, _each(
        lambda d: setattr(d, "log_probs", d.log_probs[: len(d.log_probs) // 4 * 2])), 0),
    Lie("a list instead of a row", F.DISTRIBUTIONS, _each(
        lambda d: d.CopyFrom(type(d)(log_probs=b"\0\0", token_ids=[5]))), 0),
    Lie("a row instead of a list", F.DISTRIBUTIONS, _each(lambda d: d.ClearField("token_ids")), 50),
    Lie("a token listed twice", F.DISTRIBUTIONS, _each(
        lambda d: d.token_ids.__setitem__(1, d.token_ids[0])), 50),
    Lie("a token listed that there is not", F.DISTRIBUTIONS, _each(
        lambda d: d.token_ids.__setitem__(1, 400)), 50),
    Lie("no distributions", F.DISTRIBUTIONS, _changed(lambda m: m.ClearField("distributions")), 50),
    Lie("one distribution for all", F.UNREADABLE, _changed(lambda m: m.distributions.add()), 50),
    Lie("an end of its own accord", F.STATUS, _ended(CODE.OK)),
    Lie("another prefix than it has", F.STATUS, _ended(CODE.FAILED_PRECONDITION)),
    Lie("a bug", F.STATUS, _ended(CODE.INTERNAL, f"{rpc.BUG} Draft: KeyError(3)")),
    Lie("no permission", F.STATUS, _ended(CODE.PERMISSION_DENIED)),
]  # fmt: skip
"""For a drafter of 400 ids that is asked for four tokens at a time."""
