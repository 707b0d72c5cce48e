"""Does `exact` give what plain decoding gives? `python -m bench.exactness --data DIR`.

Greedy: every text through the three services is compared with transformers' own greedy `generate`,
token for token, for each drafter and K. In float64 there are no numerical ties and every text must
be equal; in float32 the shape of a forward pass changes the last bits, so a text may differ, but
first at a position where the reference's two best log-probabilities are within 1e-3. This counts
as a tie.
Sampled (`--temperature`, `--top-p`): the same against plain decoding (K = 0) through the same
services with the same seed; in float32 a difference is a tie if changing logits or top-p by 1e-3
can lead to the other token.
`--reference plain`: all of it against plain decoding, without ties. A step whose bits depend on no
other row gives the same text in any data type.

Exits with 1 if any text differs that must not. Prompts: HumanEval, GSM8K, freshly generated
problems, and more with `--sets`. Sets whose file is not in DIR, and prompts that do not fit the
context, are skipped and reported.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench import command
from bench.command import print_records, say
from demo.corpus import problems
from flyspec.bench.prompts import to_request
from flyspec.bench.reference import Reference
from flyspec.cli.stack import Stack, StackOptions
from flyspec.client import Chat, Client, GenerateOptions, Prompt
from flyspec.concurrency import all_or_first_error
from flyspec.errors import InvalidArgumentError
from flyspec.prompts import read_prompts
from flyspec.rules import Rule
from flyspec.speculation_length import AUTO, SpeculationLength, read_speculation_length
from flyspec.values.tokens import SamplingParams

TIE_NATS = 1e-3
CONCURRENCY = 8
DRAFTERS = ("model", "prompt_lookup", "multi_level")
EXACT = Rule("exact")
SETS = {
    "humaneval": ("HumanEval.jsonl.gz", 82),
    "gsm8k": ("gsm8k_test.jsonl", 200),
    "problems": ("", 200),
    "spec_bench": ("spec_bench_question.jsonl", 240),
    "mgsm_de": ("mgsm_de.tsv", 125),
    "mgsm_fr": ("mgsm_fr.tsv", 125),
    "mgsm_th": ("mgsm_th.tsv", 125),
    "acpbench": ("acp_prog_gen_dev.json", 40),
}
"""File and maximum prompts of each set; `problems` are freshly generated."""
DEFAULT_SETS = ("humaneval", "gsm8k", "problems")


@dataclass(frozen=True, slots=True)
class Expected:
    """A prompt of a set, its seed, and the expected output."""

    set_name: str
    prompt: list[int]
    expected: list[int]
    seed: int


@dataclass
class SetCount:
    """Texts of one set under one configuration."""

    drafter: str
    k: SpeculationLength
    temperature: float
    set: str
    texts: int = 0
    equal: int = 0
    ties: int = 0
    wrong: int = 0


def prompt_sets(data: Path, names: Sequence[str], limit: int | None) -> dict[str, list[Prompt]]:
    """Return the prompts of sets, at most `limit` of each, evenly spaced."""
    sets: dict[str, list[Prompt]] = {}
    for name in names:
        file, most = SETS[name]
        count = min(most, limit or most)
        path = data / file
        if name == "problems":
            sets[name] = [Chat.of_user(p.question) for p in problems("exactness", count)]
        elif path.exists():
            rows = read_prompts(str(path), most)
            chosen = rows[:: max(1, len(rows) // count)][:count]
            sets[name] = [to_request(row, None) for row in chosen]
        else:
            say(f"SKIPPED {name}: {path} does not exist")
    return sets


async def generate_all(
    client: Client, samples: Sequence[Expected], options: GenerateOptions
) -> list[list[int]]:
    """Return the output tokens of every sample, generating several at a time."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(sample: Expected) -> list[int]:
        async with gate:
            generation = await client.complete(sample.prompt, replace(options, seed=sample.seed))
            return generation.token_ids

    return await all_or_first_error(map(one, samples))


async def expect(
    client: Client, samples: Sequence[Expected], options: GenerateOptions
) -> list[Expected]:
    """Return the samples with the outputs under these options as the expected ones."""
    texts = await generate_all(client, samples, options)
    return [replace(s, expected=text) for s, text in zip(samples, texts, strict=True)]


async def read_samples(
    client: Client, reference: Reference | None, args: argparse.Namespace
) -> list[Expected]:
    """Tokenize the prompts that fit, and generate their expected outputs with `reference`."""
    limit = (await client.list_models()).target.context_length
    only_tokenize = GenerateOptions(max_tokens=1, num_speculative_tokens=0)
    samples = []
    for name, prompts in prompt_sets(Path(args.data), args.sets, args.limit).items():
        for index, prompt in enumerate(prompts):
            try:
                started = (await client.complete(prompt, only_tokenize)).started
                ids = list(started.prompt_token_ids)
            except InvalidArgumentError:
                ids = [0] * limit
            if len(ids) + args.max_tokens > limit:
                say(f"SKIPPED prompt {index} of {name}: it is too long")
                continue
            expected = reference.generate(ids, args.max_tokens) if reference else []
            samples.append(Expected(name, ids, expected, index))
    return samples


async def compare(
    client: Client,
    samples: Sequence[Expected],
    options: GenerateOptions,
    ties: Reference | None,
) -> list[SetCount]:
    """Count equal and different texts by set; `ties` tells which differences are ties."""
    assert options.num_speculative_tokens is not None
    started = time.monotonic()
    how = options.drafter, options.num_speculative_tokens, options.sampling.temperature
    rows: dict[str, SetCount] = {}
    outputs = await generate_all(client, samples, options)
    for sample, got in zip(samples, outputs, strict=True):
        row = rows.setdefault(sample.set_name, SetCount(*how, sample.set_name))
        row.texts += 1
        pairs = enumerate(zip_longest(got, sample.expected))
        at = next((index for index, (one, other) in pairs if one != other), None)
        if at is None:
            row.equal += 1
        elif ties and ties.is_tie(
            sample.prompt + sample.expected[:at],
            {*got[at : at + 1], *sample.expected[at : at + 1]},
            options.sampling,
            sample.seed,
            TIE_NATS,
        ):
            row.ties += 1
        else:
            row.wrong += 1
    for row in rows.values():
        say(f"{row} ({time.monotonic() - started:.0f} s)")
    return list(rows.values())


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make all comparisons; return the report."""
    options = StackOptions(
        dtype=args.dtype,
        draft_dtype=args.dtype,
        tensor_parallel_size=args.tensor_parallel_size,
        max_model_len=args.max_model_len,
        log_level="warning",
    )
    transformers, greedy = args.reference == "transformers", not args.sampled_only
    plain = GenerateOptions(rule=EXACT, max_tokens=args.max_tokens, num_speculative_tokens=0)
    sampling = SamplingParams(args.temperature, top_p=args.top_p)
    rows: list[SetCount] = []
    async with Stack(options) as stack, Client(stack.address) as client:
        reference = Reference(str(stack.options.model), args.dtype, stack.options.threads)
        how = "transformers' own greedy generate" if transformers else "plain decoding"
        say(f"reference: {how}, and plain decoding with keyed sampling")
        samples = await read_samples(client, reference if transformers and greedy else None, args)
        drawn = replace(plain, sampling=sampling)
        sampled = await expect(client, samples[:: args.sampled_every], drawn)
        if greedy and not transformers:
            samples = await expect(client, samples, plain)
        ties = reference if transformers and args.dtype != "float64" else None
        for drafter in args.drafter:
            for k in args.k:
                asked = replace(plain, drafter=drafter, num_speculative_tokens=k)
                if greedy:
                    rows += await compare(client, samples, asked, ties)
                rows += await compare(client, sampled, replace(asked, sampling=sampling), ties)
    return {
        "dtype": args.dtype,
        "reference": args.reference,
        "tensor_parallel_size": args.tensor_parallel_size,
        "max_tokens": args.max_tokens,
        "rows": list(map(vars, rows)),
    }


def main() -> int:
    """Parse flags, compare, report."""
    parser = command.parser("exactness", __doc__)
    add = parser.add_argument
    add("--data", default="../shared/data", help="directory of the prompt files")
    add("--dtype", default="float64", choices=["float64", "float32", "bfloat16"])
    add("--tensor-parallel-size", type=int, default=1, help="processes that share the target")
    add("--max-tokens", type=int, default=64, help="maximum output tokens")
    add("--max-model-len", type=int, default=0,
        help="skip longer texts; 0: the model's limit")  # fmt: skip
    add("--reference", default="transformers", choices=["transformers", "plain"],
        help="reference of the greedy texts: transformers' generate, or plain decoding, bit for "
        "bit")  # fmt: skip
    add("--k", type=read_speculation_length, nargs="+", default=[1, 4, 15, AUTO], metavar="K|auto",
        help="drafted tokens per round")  # fmt: skip
    add("--sets", nargs="+", default=list(DEFAULT_SETS), choices=SETS)
    add("--drafter", nargs="+", default=list(DRAFTERS), choices=DRAFTERS)
    add("--limit", type=int, help="maximum prompts per set")
    add("--temperature", type=float, default=1.0, help="temperature of the sampled texts")
    add("--top-p", type=float, default=1.0, help="top-p of the sampled texts")
    add("--sampled-every", type=int, default=4, help="also sample every Nth prompt")
    add("--sampled-only", action="store_true", help="skip the greedy texts")
    args = parser.parse_args()
    return command.run(
        args, lambda: asyncio.run(run(args)), show,
        lambda report: not any(row["wrong"] for row in report["rows"]),
    )  # fmt: skip


def show(report: dict[str, Any]) -> None:
    """Print a row per configuration and set, then the totals."""
    print_records(report["rows"])
    texts, wrong, ties = (
        sum(row[figure] for row in report["rows"]) for figure in ("texts", "wrong", "ties")
    )
    print(f"{texts} texts in {report['dtype']}: {wrong} wrong, {ties} differ first at a tie")


if __name__ == "__main__":
    raise SystemExit(main())
