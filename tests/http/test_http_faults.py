"""Streams over HTTP outlive a service, and say what happened."""

from __future__ import annotations

import openai

from tests.orchestrator.stacks import slow, start_stack

ASKED = {
    "model": "target:exact",
    "messages": [{"role": "user", "content": "The cat sat on the"}],
    "max_tokens": 120,
    "extra_body": {"speculation": {"numSpeculativeTokens": 4}, "ignore_eos": True},
}


async def test_a_stream_outlives_its_drafter(chat_dirs):
    async with (
        start_stack(chat_dirs, http_port=0) as stack,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{stack.http_port}/v1", api_key="none", max_retries=0
        ) as api,
    ):
        whole = await api.chat.completions.create(**ASKED)
        assert whole.recoveries == []
        slow(stack)
        text, killed, last = "", False, None
        async for chunk in await api.chat.completions.create(**ASKED, stream=True):
            last = chunk
            text += chunk.choices[0].delta.content or ""
            if text and not killed:
                killed = True
                await stack.draft_server.stop(0)
        assert text == whole.choices[0].message.content
        kinds = [recovery["kind"] for recovery in last.recoveries]
        assert kinds[0].startswith("DRAFTER_")
        assert last.recoveries[0]["reason"]
