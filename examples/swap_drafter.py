"""Swaps the drafter in the middle of a stream; with `exact`, that changes nothing in the text."""

import asyncio

from flyspec import AsyncClient
from flyspec.client import AdminClient, Chunk, Completion

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n"


async def main() -> None:
    client, admin = AsyncClient("127.0.0.1:50050"), AdminClient("127.0.0.1:50053")
    async with client, admin:
        undisturbed = await client.complete(PROMPT, rule="exact", max_tokens=512, ignore_eos=True)

        first = undisturbed.started.drafter
        text = ""
        async for event in client.generate(
            PROMPT, rule="exact", num_speculative_tokens=4, max_tokens=512, ignore_eos=True
        ):
            match event:
                case Chunk():
                    if not text:  # the stream has begun: from its next round on, another drafter
                        await admin.activate_drafter("prompt_lookup")
                    text += event.text
                case Completion():
                    for share in event.drafters:
                        print(f"{share.drafter}: {share.num_accepted_draft_tokens} of "
                              f"{share.num_draft_tokens} drafts accepted")  # fmt: skip
        await admin.activate_drafter(first)
        print("the text is the same" if text == undisturbed.text else "the text differs")


asyncio.run(main())
