"""Streams an answer from Python, with the origin of every token and a budget for loose ones."""

from collections import Counter

from flyspec import Client
from flyspec.client import Chunk, Completion

QUESTION = (
    "In a shop there are 3 red boxes with 4 pens each and 2 blue boxes with 5 pens each. "
    "How many pens are there in all?"
)

counts: Counter[str] = Counter()
with Client("127.0.0.1:50050") as client:
    for event in client.generate(
        [{"role": "user", "content": QUESTION}],
        rule="fly",
        num_speculative_tokens=15,
        max_loose_tokens=6,  # after that, decoding is exact
        max_loose_cost_nats=2.0,
    ):
        match event:
            case Chunk():
                costs = iter(event.loose_gaps_nats)
                for text, origin in zip(event.token_texts, event.origins, strict=True):
                    counts[origin.name] += 1
                    loose = f" (loose: {next(costs):.2f} nats)" if origin.name == "LOOSE" else ""
                    print(text + loose, end="", flush=True)
            case Completion(speculation=metrics, timings=timings):
                print("\n\n" + ", ".join(f"{n} {name}" for name, n in counts.most_common()))
                print(
                    f"{metrics.num_loose_tokens} loose tokens cost {metrics.loose_cost_nats:.2f} "
                    f"nats; {timings.total_ns / 1e6:.0f} ms in all"
                )
