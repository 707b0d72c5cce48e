"""Sends many requests at once, as coroutines; what the server has no room for waits its turn."""

import asyncio
import time
from itertools import product

from flyspec import AsyncClient

QUESTION = (
    "Emil has {} brown bags and {} yellow bags. Each holds {} keys. How many keys does Emil have?"
)


async def main() -> None:
    asked = [*product(range(2, 8), range(3, 7), (2, 3))]
    async with AsyncClient("127.0.0.1:50050") as client:
        begin = time.perf_counter()
        answers = await asyncio.gather(*(
            client.complete(
                [{"role": "user", "content": QUESTION.format(*numbers)}],
                rule="fly",
                max_tokens=256,
                patience_s=60.0,  # how long to go on asking a server that is full
            )
            for numbers in asked
        ))  # fmt: skip
        seconds = time.perf_counter() - begin
    right = sum(
        answer.text.rstrip().endswith(f"#### {(brown + yellow) * keys}")
        for answer, (brown, yellow, keys) in zip(answers, asked, strict=True)
    )
    tokens = sum(len(answer.token_ids) for answer in answers)
    print(f"{right} of {len(asked)} right; {tokens} tokens in {seconds:.1f} s")


asyncio.run(main())
