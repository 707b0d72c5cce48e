"""Chat templates render what transformers' `apply_chat_template` renders."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import TemplateError

from flyspec.chat_template import ChatTemplates
from flyspec.errors import InvalidArgumentError
from flyspec.values.chat import Chat
from tests.tiny import make_tokenizer

TEMPLATES = {
    path.stem: path.read_text()
    for path in sorted(Path(__file__).parent.glob("chat_templates/*"))
    if path.suffix == ".jinja"
}
CHATML = TEMPLATES["chatml"]
NAMED = {"default": CHATML, "tool_use": TEMPLATES["qwen_tools"], "rag": TEMPLATES["documents"]}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> & later, für 数学.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["place"],
            "minimum": 1,
            "maximum": 2.5,
        },
    },
}
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"place": "Ulm"}},
}
IMAGE = {"type": "image"}
USER = {"role": "user", "content": "  What is 2 + 2?\n"}
SYSTEM = {"role": "system", "content": "Be 'brief' & <exact>."}
ANSWER = {"role": "assistant", "content": "It is 4. "}
CHATS = {
    "question": Chat((USER,)),
    "conversation": Chat((SYSTEM, USER, ANSWER, {"role": "user", "content": "Why?"})),
    "no prompt": Chat((USER, ANSWER), add_generation_prompt=False),
    "continued": Chat((USER, ANSWER), add_generation_prompt=False, continue_final_message=True),
    "parts": Chat(({"role": "user", "content": [{"type": "text", "text": " Look: "}, IMAGE]},)),
    "parts continued": Chat(
        (
            USER,
            {"role": "assistant", "content": [{"type": "text", "text": "It"}, {"type": "image"}]},
        ),
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "tools": Chat((SYSTEM, USER), tools=(WEATHER,)),
    "calls": Chat(
        (
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "18 degrees", "tool_call_id": "1", "name": "weather"},
            {"role": "tool", "content": "and sun", "tool_call_id": "2"},
        ),
        tools=(WEATHER,),
    ),
    "documents": Chat((USER,), documents=({"title": "One", "text": "a < b", "pages": [1, 2]},)),
    "thinking": Chat(
        (USER, {**ANSWER, "reasoning": "2 + 2"}, USER, {**ANSWER, "reasoning_content": "again"})
    ),
    "thoughts inside": Chat((USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"})),
    "variables": Chat(
        (USER,), template_kwargs={"enable_thinking": False, "controls": {"length": "long"}}
    ),
    "long": Chat((USER, {"role": "assistant", "content": "x" * 300}, USER)),
    "an overwritten token": Chat((USER,), template_kwargs={"bos_token": "<begin>"}),
    "wrong order": Chat((ANSWER, USER)),
}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def reference(tokenizer, template, chat):
    """What transformers renders, or the exception that it raises."""
    tokenizer.chat_template = template
    messages = [dict(message) for message in chat.messages]
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=list(chat.tools) or None,
            documents=list(chat.documents) or None,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            tokenize=False,
            **chat.template_kwargs,
        )
    except (TemplateError, ValueError, TypeError) as error:
        return error


def rendered(tokenizer, templates, chat):
    try:
        return ChatTemplates(templates, tokenizer.special_tokens_map).render(chat)
    except InvalidArgumentError as error:
        return error


@pytest.mark.parametrize("name", TEMPLATES)
def test_equal_to_transformers(tokenizer, name):
    for title, chat in CHATS.items():
        expected = reference(tokenizer, TEMPLATES[name], chat)
        found = rendered(tokenizer, {"default": TEMPLATES[name]}, chat)
        if isinstance(expected, Exception):
            assert isinstance(found, InvalidArgumentError), (title, expected)
        else:
            assert found == expected, title


@pytest.mark.parametrize("chat", ["question", "tools", "documents"])
def test_the_template_for_tools_is_used_if_there_are_tools(tokenizer, chat):
    expected = reference(tokenizer, NAMED, CHATS[chat])
    assert rendered(tokenizer, NAMED, CHATS[chat]) == expected


@pytest.mark.parametrize(
    ("templates", "chat", "message"),
    [
        ({}, Chat((USER,)), "the target has no chat template; send text or token_ids"),
        ({"rag": CHATML}, Chat((USER,)), "has chat templates rag, but no default"),
        ({"default": "{% magic %}"}, Chat((USER,)), r"cannot be read .*send text or token_ids"),
        ({"default": "{{ raise_exception('No system role') }}"}, Chat((USER,)), "No system role"),
        ({"default": "{{ messages[0].content + 1 }}"}, Chat((USER,)), "refused by the target's"),
        ({"default": CHATML}, Chat((USER,), continue_final_message=True), "add_generation_prompt"),
        (
            {"default": CHATML},
            Chat(({"role": "user", "content": []},), (), (), False, True),
            "has no text",
        ),
        (
            {"default": "{{ messages[0].role }}"},
            Chat((USER,), (), (), False, True),
            "changes the final message's text",
        ),
        ({"default": "{{ ''.__class__.__mro__ }}"}, Chat((USER,)), "unsafe"),
        (
            {"default": "{% set n = namespace(_x=1) %}{{ n }}"},
            Chat((USER,)),
            "a namespace cannot hold '_x'",
        ),
    ],
)
def test_refusals_say_what_to_change(templates, chat, message):
    with pytest.raises(InvalidArgumentError, match=message):
        ChatTemplates(templates, {}).render(chat)


def test_the_chat_is_left_as_it_was():
    parts = [{"type": "text", "text": "It"}]
    chat = Chat(({"role": "assistant", "content": parts},), (), (), False, True)
    ChatTemplates({"default": "{{ messages[0].content[0].text }}"}, {}).render(chat)
    assert parts == [{"type": "text", "text": "It"}]
