"""The application: its routes, and how a request becomes generations and a reply."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.routing import Mount

from flyspec.concurrency import in_turn
from flyspec.config import OrchestratorSettings
from flyspec.rule_files import RuleBook
from flyspec.tokenizer import Tokenizer
from flyspec.values.generation import Event, Models
from flyspec.values.requests import GenerationRequest
from flyspec.version import __version__
from orchestrator.admission.clients import Caller
from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.target import Target
from orchestrator.front.http import errors, tokens
from orchestrator.front.http.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    ResponsesBody,
    SampledBody,
    TokenizeBody,
)
from orchestrator.front.http.chat import ChatReply, chat_options
from orchestrator.front.http.choices import run_choices
from orchestrator.front.http.completions import (
    CompletionReply,
    completion_options,
    echo_of,
    echoes_only,
    prompts_of,
)
from orchestrator.front.http.drafters import DrafterEndpoints, Operators
from orchestrator.front.http.event_stream import EventStream
from orchestrator.front.http.options import chat_of, chosen, options_of, rule_of, stopping_at
from orchestrator.front.http.reading import BodyReader, body_route
from orchestrator.front.http.replies import Events, Reply
from orchestrator.front.http.responses import ResponsesReply, chat_of_items
from orchestrator.front.http.tool_calls import parser_for, stops_of
from orchestrator.front.http.web_page import PageFiles, WebPage
from orchestrator.generation.prompt import encode_prompt
from orchestrator.generations import Generations


def make_app(
    generations: Generations, fleet: Fleet, settings: OrchestratorSettings, rules: RuleBook
) -> FastAPI:
    """Return the application."""
    app = _App(
        title="flyspec", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False,
        summary="Speculative decoding as a service, by OpenAI's API.",
    )  # fmt: skip
    errors.handle_errors(app)
    reader = BodyReader(lambda: generations.target.info.model.context_length)
    app.router.route_class = body_route(reader)
    face = _Face(generations)
    drafters = DrafterEndpoints(fleet, Operators(settings))
    page = WebPage(generations, fleet, settings, rules, drafters, __version__)
    responses: dict[int | str, Any] = {
        code: {"description": what, "model": errors.ErrorBody}
        for code, what in errors.DESCRIPTIONS.items()
    }

    def route(
        method: str, path: str, answer: Callable[..., Awaitable[Any]], streams: bool = False
    ) -> None:
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if streams:
            content[EventStream.media_type] = {"schema": {"type": "string"}}
        reply: dict[int | str, Any] = {200: {"description": "The reply.", "content": content}}
        app.add_api_route(
            path, answer, methods=[method], operation_id=answer.__name__, response_model=None,
            responses=reply | responses,
        )  # fmt: skip

    route("GET", "/v1/models", face.list_models)
    route("GET", "/v1/models/{model:path}", face.show_model)
    route("POST", "/v1/chat/completions", face.chat, streams=True)
    route("POST", "/v1/completions", face.complete, streams=True)
    route("POST", "/v1/responses", face.respond, streams=True)
    route("GET", "/v1/drafters", drafters.list_drafters)
    route("POST", "/v1/drafters/{name}/activate", drafters.activate_drafter)
    route("POST", "/tokenize", face.tokenize)
    route("POST", "/detokenize", face.detokenize)
    route("GET", "/health", face.health)
    route("GET", "/version", face.version)
    app.add_route("/", page.show_page, methods=["GET"], include_in_schema=False)
    app.mount("/page", PageFiles())
    return app


class _App(FastAPI):
    """An application whose schema, made when it is first asked for, has our errors and API keys."""

    def openapi(self) -> dict[str, Any]:
        """Return the schema, without the 422 that FastAPI adds."""
        if self.openapi_schema is not None:
            return self.openapi_schema
        schema = super().openapi()
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                operation["security"] = [{"key": []}, {}]
        components = schema["components"]
        for unused in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(unused, None)
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return schema


def openapi_schema() -> dict[str, Any]:
    """Return the schema that every server has, whatever it serves."""
    nothing: Any = None
    return make_app(nothing, nothing, OrchestratorSettings(), nothing).openapi()


def paths_of(app: FastAPI) -> list[str]:
    """Return the served paths, for metrics."""
    return [
        f"{route.path}/{{path}}" if isinstance(route, Mount) else getattr(route, "path", "")
        for route in app.routes
    ]


class _Face:
    """The endpoints."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._started = int(time.time())

    @property
    def _target(self) -> Target:
        return self._generations.target

    # --- what generates ---------------------------------------------------------------------

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Continue a chat."""
        models, tokenizer = self._generations.models(), self._target.tokenizer

        def convert() -> GenerationRequest:
            options = stopping_at(stops_of(body, tokenizer), chat_options(body, models))
            return GenerationRequest(
                chat_of(body, not tokenizer.chat_templates.reads_parts), options
            )

        asked = await body.converted(convert)
        reply = ChatReply(body, *self._served(models), body.n)
        return await self._reply(reply, body, [asked], _caller(request))

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        """Continue prompts."""
        models, target = self._generations.models(), self._target
        options, prompts = await body.converted(
            lambda: (completion_options(body, models), prompts_of(body))
        )
        caller, echoes = _caller(request), []
        asked = [GenerationRequest(prompt, options) for prompt in prompts.values()]
        if body.echo or len(prompts) > 1:  # so that errors name the prompt
            known = target.tokenizer, target.info.model
            for index, (name, prompt) in enumerate(prompts.items()):
                token_ids = await in_turn(partial(encode_prompt, prompt, *known, name))
                asked[index] = GenerationRequest(token_ids, options)
        if body.echo:
            await self._generations.check(asked[0], caller)
            score = partial(self._generations.score, caller=caller)
            for prompt, request_ in zip(prompts.values(), asked, strict=True):
                echoes.append(await echo_of(prompt, request_, target.tokenizer, score))
        reply = CompletionReply(body, *self._served(models), len(asked) * body.n, echoes=echoes)
        if body.max_tokens == 0:
            alone = [request_ for request_ in asked for _ in range(body.n)]
            return await self._send(reply, body, echoes_only(alone, models))
        return await self._reply(reply, body, asked, caller)

    async def respond(self, body: ResponsesBody, request: Request) -> Response:
        """Respond to a text, or to messages and the outputs of functions."""
        models, tokenizer = self._generations.models(), self._target.tokenizer
        stops = stops_of(body, tokenizer)

        def convert() -> GenerationRequest:
            options = options_of(body, models, max_tokens=body.max_output_tokens)
            return GenerationRequest(chat_of_items(body), stopping_at(stops, options))

        asked = await body.converted(convert)
        reply = ResponsesReply(body, models.target.name, parser_for(body, tokenizer), stops)
        return await self._send(reply, body, self._run([asked], _caller(request)))

    def _served(self, models: Models) -> tuple[str, str, Tokenizer]:
        info = models.target
        return info.name, info.weights_fingerprint[:16], self._target.tokenizer

    async def _reply(
        self, reply: Reply, body: GenerationBody, asked: Sequence[GenerationRequest], caller: Caller
    ) -> Response:
        """Run `n` choices of each request."""
        requests = [chosen(request, choice) for request in asked for choice in range(body.n)]
        return await self._send(reply, body, self._run(requests, caller))

    def _run(self, requests: Sequence[GenerationRequest], caller: Caller) -> Events:
        def run(request: GenerationRequest, counted: bool) -> AsyncGenerator[Event, None]:
            return self._generations.run(request, replace(caller, counted=counted))

        return run_choices(run, requests)

    async def _send(
        self, reply: Reply | ResponsesReply, body: SampledBody, events: Events
    ) -> Response:
        """Send the reply whole, or as a stream once it has begun: refusals keep their codes."""
        if body.stream:
            return EventStream(reply.stream(events), events, reply)
        async with aclosing(events):
            whole = await reply.whole(events)
            return JSONResponse(whole, headers=reply.headers)

    # --- what does not ----------------------------------------------------------------------

    async def list_models(self) -> dict[str, Any]:
        """List the served model, and its aliases with a rule each."""
        models = self._generations.models()
        names = [models.target.name, *(f"{models.target.name}:{rule}" for rule in models.rules)]
        return {"object": "list", "data": [self._model(models, name) for name in names]}

    async def show_model(self, model: str) -> dict[str, Any]:
        """Show the served model, or an alias."""
        models = self._generations.models()
        rule_of(model, models)
        return self._model(models, model)

    def _model(self, models: Models, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "flyspec",
            "root": models.target.name,
            "max_model_len": models.target.context_length,
            "rule": rule_of(name, models) or models.rules[0],
        }

    async def tokenize(self, body: TokenizeBody) -> Response:
        """Encode a text or a chat."""
        rule_of(body.model, self._generations.models())
        return await self._apart(tokens.tokenize, body)

    async def detokenize(self, body: DetokenizeBody) -> Response:
        """Decode token ids."""
        rule_of(body.model, self._generations.models())
        return await self._apart(tokens.detokenize, body)

    async def _apart(self, answer: Callable[..., dict[str, Any]], body: Any) -> Response:
        """Answer in turn: a megabyte of text takes a second, and streams would wait for it."""
        target = self._target
        return await in_turn(
            lambda: JSONResponse(answer(body, target.tokenizer, target.info.model))
        )

    async def health(self) -> Response:
        """True if requests are accepted: 200, else 503."""
        if self._generations.accepting:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable"}, 503)

    async def version(self) -> dict[str, str]:
        """Return flyspec's version."""
        return {"version": __version__}


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller
