"""LlamaIndex' class for servers like OpenAI's against the URL given: chat, stream, completion."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

SETTINGS = {
    "model": "target:exact",
    "temperature": 0,
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
}
ASKED = [ChatMessage(role="user", content="Mia has 12 stamps and buys 30 more. How many now?")]

chat = OpenAILike(**SETTINGS, is_chat_model=True, max_tokens=40)
whole = chat.chat(ASKED).message.content
assert whole
assert "".join(part.delta or "" for part in chat.stream_chat(ASKED)) == whole
assert OpenAILike(**SETTINGS, max_tokens=10).complete("def f(").text
print("llama_index: passed")
