"""Sends many requests at once, as coroutines; what the server has no room for waits its turn."""

import asyncio
import time

from flyspec import AsyncClient
from flyspec.word_problems import problems


async def main() -> None:
    asked = problems(seed=1, n=48)
    async with AsyncClient("127.0.0.1:50050") as client:
        begin = time.perf_counter()
        answers = await asyncio.gather(*(
            client.complete(
                [{"role": "user", "content": problem.question}],
                rule="fly",
                max_tokens=256,
                patience_s=60.0,  # how long to go on asking a server that is full
            )
            for problem in asked
        ))  # fmt: skip
        seconds = time.perf_counter() - begin
    right = sum(
        answer.text.rstrip().endswith(f"#### {problem.answer}")
        for answer, problem in zip(answers, asked, strict=True)
    )
    tokens = sum(len(answer.token_ids) for answer in answers)
    print(f"{right} of {len(asked)} right; {tokens} tokens in {seconds:.1f} s")


asyncio.run(main())
