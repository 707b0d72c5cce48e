"""LangChain's OpenAI classes against the URL given: chat, stream, batch, responses, completion."""

import sys

from langchain_openai import ChatOpenAI, OpenAI

SETTINGS = {
    "model": "target:exact",
    "temperature": 0,
    "base_url": f"{sys.argv[1]}/v1",
    "api_key": "none",
}
QUESTION = "Mia has 12 stamps and buys 30 more. How many has she now?"

chat = ChatOpenAI(**SETTINGS, max_tokens=40)
whole = chat.invoke(QUESTION)
assert whole.content
assert whole.usage_metadata["output_tokens"] == 40
assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == whole.content
assert [reply.content for reply in chat.batch([QUESTION, QUESTION])] == [whole.content] * 2

responses = ChatOpenAI(**SETTINGS, use_responses_api=True, store=False, max_tokens=40)
assert responses.invoke(QUESTION).text == whole.content
assert OpenAI(**SETTINGS, max_tokens=10).invoke("def f(")

exact = ChatOpenAI(
    **SETTINGS, max_tokens=40, extra_body={"speculation": {"rule": {"name": "exact"}}}
)
assert exact.invoke(QUESTION).content
print("langchain: passed")
