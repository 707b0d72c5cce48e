"""Streams a chat with OpenAI's own package; speculation is a field of the request's extra body."""

from openai import OpenAI

QUESTION = (
    "In a shop there are 3 red boxes with 4 pens each and 2 blue boxes with 5 pens each. "
    "How many pens are there in all?"
)

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
stream = client.chat.completions.create(
    model="target",  # or "target:exact": a rule without an extra body
    messages=[{"role": "user", "content": QUESTION}],
    stream=True,
    extra_body={
        "speculation": {
            "rule": {"name": "fly", "flyEntropyThreshold": 0.4},
            "numSpeculativeTokens": 15,
            "maxLooseTokens": 6,
        },
        "return_origins": True,
    },
)
origins: list[str] = []
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
        origins += (choice.model_extra or {}).get("origins") or []
print("\n" + " ".join(origins))
