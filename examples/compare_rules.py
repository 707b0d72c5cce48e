"""Compares the server's rules on your own prompts: python compare_rules.py my-prompts.txt

Reads what `flyspec generate --prompt-file` reads; without a file, asks eight questions.
`flyspec bench` measures speed with more care, `flyspec eval` accuracy.
"""

import sys

from flyspec import Client
from flyspec.client import Generation
from flyspec.prompts import Prompt, read_prompts

QUESTION = (
    "Emil has {} brown bags and 5 yellow bags. Each holds 2 keys. How many keys does Emil have?"
)

own = [Prompt(QUESTION.format(number), "gsm8k") for number in range(3, 11)]
prompts = read_prompts(sys.argv[1]) if sys.argv[1:] else own


def row(name: str, runs: list[Generation], plain: list[Generation]) -> str:
    """Return a line of the table."""
    tokens = sum(run.completion.completion_tokens for run in runs)
    seconds = sum(run.completion.timings.total_ns for run in runs) / 1e9
    metrics = [run.completion.speculation for run in runs]
    rounds = sum(each.num_rounds for each in metrics)
    loose = sum(each.num_loose_tokens for each in metrics)
    nats = sum(each.loose_cost_nats for each in metrics)
    same = sum(a.text == b.text for a, b in zip(runs, plain, strict=True))
    return (
        f"{name:<20}{tokens / seconds:>9.0f}{tokens / rounds:>13.1f}{loose:>7}{nats:>7.2f}{same:>9}"
    )


with Client("127.0.0.1:50050") as client:
    print(f"{'rule':<20}{'tokens/s':>9}{'tokens/round':>13}{'loose':>7}{'nats':>7}{'as plain':>9}")
    plain: list[Generation] = []
    for name, rule, k in [("plain", "exact", 0), *((r, r, 15) for r in client.list_models().rules)]:
        runs = [
            client.complete(p.to_request(), rule=rule, num_speculative_tokens=k, max_tokens=256)
            for p in prompts
        ]
        plain = plain or runs
        print(row(name, runs, plain))
