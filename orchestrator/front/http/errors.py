"""Errors in OpenAI's shape, with the HTTP code of each gRPC status."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from flyspec.errors import FlyspecError, InvalidArgumentError, ResourceExhaustedError

CODES = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "ABORTED": 503,  # the target was replaced: the same request may be sent again
    "DEADLINE_EXCEEDED": 504,
}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""Others are `invalid_request_error` below 500, and `server_error` from there."""
BUG = "internal error; the server's log says more"
_PARAM = re.compile(r"(?:prompt: )?([a-z_]+(?:\.[a-z_]+|\[\d+\])*)(?:: | must | has )")
DESCRIPTIONS = {
    400: "The request is invalid; the message says what to change.",
    401: "No API key, or an invalid one.",
    403: "The API key or certificate does not permit this.",
    404: "There is no such model or path.",
    413: "The body is too large.",
    429: "A limit is reached; `Retry-After` says when to try again.",
    503: "The target cannot be reached, or the server is draining.",
}


class ErrorFields(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorFields


class TooLargeError(FlyspecError):
    """The request's body is too large."""

    status = "INVALID_ARGUMENT"


class NoSuchModelError(FlyspecError):
    """No model, or alias of it, has the name in the request."""

    status = "NOT_FOUND"


def code_of(error: FlyspecError) -> int:
    return 413 if isinstance(error, TooLargeError) else CODES[error.status]


def headers_of(error: FlyspecError) -> dict[str, str]:
    if isinstance(error, ResourceExhaustedError) and error.retry_after_s is not None:
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    return {"www-authenticate": "Bearer"} if error.status == "UNAUTHENTICATED" else {}


def document(
    code: int, message: str, param: str | None = None, kind: str | None = None
) -> dict[str, Any]:
    """Return an error's body; `kind` is OpenAI's `code`, such as `model_not_found`."""
    type_ = TYPES.get(code, "server_error" if code >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": type_, "param": param, "code": kind}}


def document_of(error: Exception) -> dict[str, Any]:
    """Return the body for an exception; one that is no `FlyspecError` is a bug of ours."""
    if not isinstance(error, FlyspecError):
        return document(500, BUG)
    message = str(error).removeprefix("sampling.")
    if isinstance(error, NoSuchModelError):
        return document(code_of(error), message, "model", "model_not_found")
    found = _PARAM.match(message) if isinstance(error, InvalidArgumentError) else None
    return document(code_of(error), message, found[1] if found else None)


def response_of(error: Exception) -> JSONResponse:
    """Return the response for an exception, as `document_of` does the body."""
    body = document_of(error)
    if not isinstance(error, FlyspecError):
        return JSONResponse(body, 500)
    return JSONResponse(body, code_of(error), headers_of(error))


def handle_errors(app: FastAPI) -> None:
    """Make the application answer all errors in this shape."""

    @app.exception_handler(FlyspecError)
    async def flyspec_error(_: Request, error: FlyspecError) -> JSONResponse:
        return response_of(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.url.path}; the paths are in /openapi.json"
        elif error.status_code == 405:
            message = f"{request.url.path}: {request.method} is not served"
        return JSONResponse(
            document(error.status_code, message), error.status_code, headers=error.headers
        )

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(document(400, *_told(error.errors())), 400)

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> JSONResponse:
        return response_of(error)  # raised again, and logged by the gate


def _told(problems: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """Return message and parameter for pydantic's problems; a union has one for each member."""
    problem = max(problems, key=lambda problem: problem["type"].startswith("too_"))
    context = problem.get("ctx", {})
    param = context.get("param") or ".".join(_place(problem["loc"])) or None
    if problem["type"] == "json_invalid":
        return f"the body is not valid JSON: {context.get('error')}", None
    if param is None:
        return "the body must be a JSON object, sent with content-type: application/json", None
    message = _SAID.get(problem["type"]) or str(problem["msg"]).replace(
        "Input should be", "must be"
    )
    if problem["type"] == "too_long":
        message = f"at most {context['max_length']} allowed, got {context['actual_length']}"
    return f"{param}: {message}", param


_SAID = {
    "extra_forbidden": "there is no such parameter",
    "missing": "is missing",
    "too_short": "is empty; give at least one",
}


def _place(location: Sequence[str | int]) -> Iterator[str]:
    """Yield a parameter's path, without pydantic's names of a union's members."""
    for part in location[1:] if location[:1] == ("body",) else location:
        text = str(part)
        if "[" in text or text in ("str", "int", "list", "dict"):
            return
        yield text
