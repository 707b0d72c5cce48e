"""Errors in OpenAI's shape, with the HTTP code of each gRPC status."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from flyspec.errors import (
    ContextLengthError,
    FlyspecError,
    IdleTimeoutError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from orchestrator.front.http.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ResponsesBody,
    TokenizeBody,
)

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
PROMPTS = {"/v1/chat/completions": "messages", "/v1/responses": "input"}
"""The parameter that is the prompt, by path; elsewhere it is `prompt`."""
_RENAMED = {
    "sampling.": "",
    "chat.template_kwargs": "chat_template_kwargs",
    "chat.": "",
    "rule.": "speculation.rule.",
}
"""Beginnings of our parameters' names, and what they are in a body."""
_PARAM = re.compile(r"([a-z_]+(?:\.[a-z_]+|\[\d+\])*)(?::| must | has | is | does )")
BODIES: Mapping[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_KNOWN = frozenset(name for body in BODIES.values() for name in body.model_fields)
DESCRIPTIONS = {
    400: "The request is invalid; the message says what to change.",
    401: "No API key, or an invalid one.",
    403: "The API key, certificate, host's name or page's origin does not permit this.",
    404: "There is no such model or path.",
    408: "The body did not come in time.",
    409: "The drafter's state does not permit this.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "A limit is reached; `Retry-After` says when to try again.",
    503: "The target cannot be reached, or the server is draining.",
    504: "The generation took too long.",
}


class ErrorFields(BaseModel):
    """Description of the error."""

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


class UnsupportedEncodingError(FlyspecError):
    """The request's body is compressed."""

    status = "INVALID_ARGUMENT"


class NoSuchModelError(FlyspecError):
    """No model, or alias of it, has the name in the request."""

    status = "NOT_FOUND"


KINDS: Mapping[type[FlyspecError], str] = {
    NoSuchModelError: "model_not_found",
    ContextLengthError: "context_length_exceeded",
    UnauthenticatedError: "invalid_api_key",
    ResourceExhaustedError: "rate_limit_exceeded",
}
"""OpenAI's codes that clients look for."""


def code_of(error: FlyspecError) -> int:
    if isinstance(error, TooLargeError):
        return 413
    if isinstance(error, UnsupportedEncodingError):
        return 415
    return 408 if isinstance(error, IdleTimeoutError) else CODES[error.status]


def kind_of(error: FlyspecError) -> str | None:
    """Return OpenAI's `code` of an error, or from 500 on the name of the gRPC status."""
    for kind, code in KINDS.items():
        if isinstance(error, kind):
            return code
    return error.status.lower() if code_of(error) >= 500 else None


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


def document_of(error: Exception, path: str = "") -> dict[str, Any]:
    """Return the body for an exception; one that is no `FlyspecError` is a bug of ours.

    `path` is the request's, whose name for the prompt is used.
    """
    if not isinstance(error, FlyspecError):
        return document(500, BUG)
    message = _in_terms_of_bodies(str(error), path)
    found = _PARAM.match(message)
    param = found[1] if found and re.split(r"[.\[]", found[1])[0] in _KNOWN else None
    return document(code_of(error), message, param, kind_of(error))


def _in_terms_of_bodies(message: str, path: str) -> str:
    for ours in ("prompt:", "chat:"):
        if path in PROMPTS and message.startswith(ours):
            return PROMPTS[path] + message[len(ours) - 1 :]
    if path == "/v1/responses" and message.startswith("max_tokens:"):
        return message.replace("max_tokens", "max_output_tokens", 1)
    for ours, theirs in _RENAMED.items():
        if message.startswith(ours):
            return theirs + message.removeprefix(ours)
    return message


def response_of(error: Exception, path: str = "") -> JSONResponse:
    """Return the response for an exception, as `document_of` does the body."""
    body = document_of(error, path)
    if not isinstance(error, FlyspecError):
        return JSONResponse(body, 500)
    return JSONResponse(body, code_of(error), headers_of(error))


def handle_errors(app: FastAPI) -> None:
    """Make the application answer all errors in this shape."""

    @app.exception_handler(FlyspecError)
    async def flyspec_error(request: Request, error: FlyspecError) -> JSONResponse:
        return response_of(error, request.url.path)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.url.path}; the paths are in /openapi.json"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("allow", "another method")
            message = f"{request.url.path}: {request.method} is not served; use {allowed}"
        elif error.status_code == 400:  # JSON that Python cannot read
            message = "the body is nested too deeply, or has a number with too many digits"
            if isinstance(error.__cause__, UnicodeDecodeError):
                message = f"the body is not UTF-8: byte {error.__cause__.start} is invalid"
        return JSONResponse(
            document(error.status_code, message), error.status_code, headers=error.headers
        )

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        body = BODIES.get(request.url.path, Body)
        return JSONResponse(document(400, *_told(error.errors(), body.model_fields)), 400)

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> JSONResponse:
        return response_of(error)  # raised again, and logged by the gate


def _told(problems: Sequence[Mapping[str, Any]], known: Collection[str]) -> tuple[str, str | None]:
    """Return message and parameter for pydantic's problems; a union has one for each member.

    `known` are the body's parameters.
    """
    problem = max(problems, key=lambda problem: problem["type"].startswith("too_"))
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "json_invalid":
        *_, at = problem["loc"]
        return f"the body is not valid JSON: {context.get('error')} (character {at})", None
    param = context.get("param") or _place(problem["loc"])
    if not param:
        return "the body must be a JSON object, sent with content-type: application/json", None
    if kind == "extra_forbidden":
        near = [name for name in _MOST if param in _MOST and name in known]
        near += difflib.get_close_matches(param, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{param}: there is no such parameter{hint}", param
    if kind == "too_long":
        most, count = context["max_length"], context["actual_length"]
        got = "" if count is None else f", got {count}"  # objects are not counted to their end
        return f"{param}: at most {most} allowed{got}", param
    message = _SAID.get(kind) or str(problem["msg"]).replace("Input should be", "must be")
    return f"{param}: {message}", param


_MOST = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Names of one parameter in different endpoints."""
_SAID = {
    "missing": "is missing",
    "too_short": "is empty; give at least one",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
}


def _place(location: Sequence[str | int]) -> str:
    """Return a parameter's path, without pydantic's names of a union's members."""
    path = ""
    for part in location[1:] if location[:1] == ("body",) else location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif "[" in part or part in ("str", "int", "list", "dict", "TextPart"):
            break
        else:
            path += f".{part}" if path else part
    return path
