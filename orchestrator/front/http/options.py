"""Generation requests from bodies: model, rule, options, messages and functions."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from flyspec.errors import InvalidArgumentError
from flyspec.flags import UINT32
from flyspec.json_text import read_json
from flyspec.rules import Rule
from flyspec.values.chat import Chat
from flyspec.values.generation import Models
from flyspec.values.requests import GenerateOptions, GenerationRequest
from flyspec.values.tokens import MIN_TEMPERATURE, SamplingParams
from orchestrator.front.http.bodies import ChatBody, ChatMessageBody, SampledBody, TokenizeBody
from orchestrator.front.http.errors import NoSuchModelError
from orchestrator.front.http.speculation import options_with
from orchestrator.generation.plan import SEED_BITS


def rule_of(name: str | None, models: Models) -> str:
    """Return the rule that a model's name stands for, empty for the default.

    `NAME:RULE` is the served model with that rule. Raises `NoSuchModelError`.
    """
    served = models.target.name
    if name is None or name == served:
        return ""
    base, _, rule = name.rpartition(":")
    if base == served and rule in models.rules:
        return rule
    rules = ", ".join(models.rules)
    raise NoSuchModelError(
        f"model: there is no {name!r:.200}; served is {served}, or {served}:RULE with the rule "
        f"{rules}"
    )


def options_of(body: SampledBody, models: Models, **more: Any) -> GenerateOptions:
    """Return a body's options. Raises `InvalidArgumentError`, `NoSuchModelError`."""
    stop = () if body.stop is None else body.stop
    options = options_with(body.speculation or {}, models.target.context_length)
    if rule := rule_of(body.model, models):
        given = options.rule or Rule("")
        if given.name not in ("", rule):
            raise InvalidArgumentError(
                f"speculation.rule.name: is {given.name}, but the model's name asks for {rule}; "
                "give one of them"
            )
        options = replace(options, rule=replace(given, name=rule))
    return replace(
        options,
        sampling=sampling_of(body),
        seed=secrets.randbits(SEED_BITS) if body.seed is None else body.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=token_ids_of("stop_token_ids", body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        **more,
    )


def chosen(request: GenerationRequest, choice: int) -> GenerationRequest:
    """Return the request of one of its choices: they differ in their seeds."""
    seed = ((request.options.seed or 0) + choice) % (1 << SEED_BITS)
    return replace(request, options=replace(request.options, seed=seed))


def stopping_at(stops: Sequence[str], options: GenerateOptions) -> GenerateOptions:
    """Return options with more stop strings."""
    return replace(options, stop=(*options.stop, *stops))


def chat_of(body: ChatBody | TokenizeBody, joins_parts: bool) -> Chat:
    """Return a body's chat; `joins_parts`: the chat template reads no lists of parts.

    Raises `InvalidArgumentError`.
    """
    begins, tools = body.add_generation_prompt, functions_of(body.tools or ())
    return Chat(
        [_message_of(i, m, joins_parts) for i, m in enumerate(body.messages or ())],
        tools=tools if body.shows_tools else (),
        documents=tuple(body.documents or ()),
        add_generation_prompt=not body.continue_final_message if begins is None else begins,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs or {},
    )


def functions_of(tools: Sequence[Mapping[str, Any]], flat: bool = False) -> list[Any]:
    """Return functions that the model may call, as chat completions have them.

    Those of `/v1/responses` are `flat`. Raises `InvalidArgumentError`.
    """
    found = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") != "function":
            raise InvalidArgumentError(
                f"{where}.type: {tool.get('type')!r:.100}: only functions are served"
            )
        function: Any = {k: v for k, v in tool.items() if k != "type"}
        if not flat:
            function, where = tool.get("function"), f"{where}.function"
        if not isinstance(function, Mapping):
            raise InvalidArgumentError(f"{where}: must be an object with a name")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidArgumentError(f"{where}.name: must be the function's name")
        found.append({"type": "function", "function": function} if flat else tool)
    return found


def call_of_template(name: Any, arguments: Any) -> dict[str, Any]:
    """Return a call's function: templates write arguments as JSON, so they expect an object."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # a call that the model broke stays text
            arguments = read_json((arguments or "{}").encode(), "arguments")
    return {"name": name, "arguments": arguments}


def _message_of(index: int, message: ChatMessageBody, joins_parts: bool) -> dict[str, Any]:
    """Return a message for the template: only text, which it may want in one piece."""
    fields_: dict[str, Any] = {**message}
    if fields_["role"] == "developer":  # OpenAI's later name, which templates do not know
        fields_["role"] = "system"
    if isinstance(calls := fields_.get("tool_calls"), list):
        fields_["tool_calls"] = [
            _call_of(f"messages[{index}].tool_calls[{place}]", call)
            for place, call in enumerate(calls)
        ]
    content = message.get("content")
    if not isinstance(content, list):
        return fields_
    texts = texts_of(f"messages[{index}].content", content)
    if joins_parts:
        fields_["content"] = "\n".join(texts)
    else:
        fields_["content"] = [{"type": "text", "text": text} for text in texts]
    return fields_


def _call_of(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidArgumentError(f"{where}.function: must be an object with name and arguments")
    called = call_of_template(function["name"], function.get("arguments"))
    return {**call, "function": {**function, **called}}


def texts_of(where: str, content: Sequence[Any]) -> list[str]:
    """Return the texts of a content's parts. Raises `InvalidArgumentError` for other parts."""
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise InvalidArgumentError(f"{where}[{index}].type: {kind!r:.100}: only text is served")
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(name), str):
            raise InvalidArgumentError(f"{where}[{index}].{name}: must be a string")
        texts.append(part[name])
    return texts


def sampling_of(body: SampledBody) -> SamplingParams:
    given = {
        field.name: value
        for field in fields(SamplingParams)
        if field.name != "logit_bias" and (value := getattr(body, field.name)) is not None
    }
    if 0 < given.get("temperature", 0) < MIN_TEMPERATURE:
        given["temperature"] = 0.0
    if given.get("top_k") == -1:  # vLLM's for all
        given["top_k"] = 0
    biases: dict[int, float] = {}
    for text, bias in (body.logit_bias or {}).items():
        if not (text.isascii() and text.isdigit()):
            raise InvalidArgumentError(f"logit_bias: {text!r:.100} is not a token id")
        biases[int(text)] = bias
    token_ids_of("logit_bias", biases)
    return SamplingParams(**given, logit_bias=tuple(sorted(biases.items())))


def token_ids_of(name: str, token_ids: Iterable[int]) -> tuple[int, ...]:
    """Return the ids if they fit protobuf's field. Raises `InvalidArgumentError`."""
    token_ids = tuple(token_ids)
    for token_id in token_ids:
        if not UINT32.low <= token_id <= UINT32.high:
            raise InvalidArgumentError(f"{name}: {token_id} is not a token id")
    return token_ids
