"""Reads bodies, within limits on what all of them together take, and converts long ones in turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from inspect import signature
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException

from flyspec.concurrency import LONG, in_turn
from flyspec.errors import FlyspecError, ResourceExhaustedError
from flyspec.json_text import read_json

LARGE_BYTES, LARGE_AT_ONCE, WAIT_S = 1 << 16, 8, 5.0
"""Larger bodies are read and converted so many at a time; the next one waits so long for a place.

What a connection holds of a body before it is read is as large."""


class BodyReader:
    """Reads the bodies of all requests; `context_length` returns the target's."""

    def __init__(self, context_length: Callable[[], int]) -> None:
        self._context_length = context_length
        self._places = asyncio.Semaphore(LARGE_AT_ONCE)

    async def read(self, request: Request, kind: TypeAdapter[Any]) -> Any:
        """Return a request's body. Raises `FlyspecError`, or FastAPI's errors."""
        async with self._bytes_of(request) as data:
            convert = partial(_converted, data, _is_json(request), kind, self._context_length())
            if len(data) <= LONG:
                return convert()
            body = await in_turn(convert)
            if body is not None:
                body.convert_in_turn()
            return body

    @asynccontextmanager
    async def _bytes_of(self, request: Request) -> AsyncIterator[bytearray]:
        data = bytearray()
        async with AsyncExitStack() as place:
            async for piece in request.stream():
                data += piece
                if len(data) > LARGE_BYTES >= len(data) - len(piece):
                    await self._take_place()
                    place.callback(self._places.release)
            yield data

    async def _take_place(self) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                await self._places.acquire()
        except TimeoutError:
            raise ResourceExhaustedError(
                f"{LARGE_AT_ONCE} bodies of more than {LARGE_BYTES} bytes are being read already",
                WAIT_S,
            ) from None


def body_route(reader: BodyReader) -> type[APIRoute]:
    """Return a class of routes whose endpoints get bodies from a reader, not from FastAPI.

    FastAPI parses them on the event loop. An endpoint may take `body`, `request`, and parameters of
    the path.
    """

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Any:
            endpoint = self.endpoint
            if self.body_field is None:
                return super().get_route_handler()
            kind = TypeAdapter[Any](get_type_hints(endpoint)["body"])
            names = signature(endpoint).parameters

            async def answer(request: Request) -> Response:
                body = await reader.read(request, kind)
                known = {**request.path_params, "body": body, "request": request}
                found = await endpoint(**{name: known[name] for name in names})
                return found if isinstance(found, Response) else JSONResponse(found)

            return answer

    return BodyRoute


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def _converted(data: bytearray, is_json: bool, kind: TypeAdapter[Any], context_length: int) -> Any:
    """Return a body as `kind`; besides its parts, it may have a context of token ids."""
    found: Any = None
    try:
        if data:
            found = read_json(data, "the body", context_length) if is_json else bytes(data)
        return kind.validate_python(found, from_attributes=True)
    except json.JSONDecodeError as error:
        problem = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise RequestValidationError([problem]) from None
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise RequestValidationError(
            [{**problem, "loc": ("body", *problem["loc"])} for problem in problems]
        ) from None
    except FlyspecError:
        raise
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "There was an error parsing the body") from error
