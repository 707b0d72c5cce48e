"""Does `exact` give what plain decoding gives? `python -m bench.exactness --data DIR`.

Greedy: every text through the three services against transformers' own greedy `generate`, token for
token, for each drafter and K. In float64 there are no numerical ties and every text must be equal;
in float32 a text may differ, but first at a position where the reference's two best log-probs are
within 1e-3 (the shape of a forward changes the last bits), and is counted.
Sampled (`--temperature`, `--top-p`): against plain decoding (K = 0) through the same services with
the same seed; in float32 a difference counts as a tie where logits that differ by 1e-3, or a top-p
that does, lead to the other token.
`--reference plain`: all of it against plain decoding, and no tie counts. A step whose bits depend
on no other row gives the same text in any data type.

Exits with 1 if anything differs that must not. Prompts: HumanEval, GSM8K, freshly generated
problems, and more with `--sets`; a set whose file is not in DIR is skipped, and so is a prompt that
does not fit the context, and that is said.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import command
from bench.command import print_records, say
from demo.corpus import problems
from flyspec.bench.reference import Reference
from flyspec.cli.stack import Stack, StackOptions
from flyspec.client import Chat, Client, GenerateOptions, Prompt
from flyspec.errors import InvalidArgumentError
from flyspec.prompts import read_prompts
from flyspec.rules import Rule
from flyspec.speculation_length import AUTO, read_speculation_length
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
"""File and most prompts of each set; `problems` are freshly generated."""
DEFAULT_SETS = ("humaneval", "gsm8k", "problems")


@dataclass(frozen=True, slots=True)
class Expected:
    """A prompt of a named set and the token ids that must come out."""

    set_name: str
    prompt: list[int]
    expected: list[int]
    seed: int


@dataclass(slots=True)
class Count:
    """Texts of one set under one configuration."""

    texts: int = 0
    equal: int = 0
    ties: int = 0
    wrong: int = 0


def prompt_sets(data: Path, names: Sequence[str], limit: int | None) -> dict[str, list[Prompt]]:
    """The prompts of the named sets, at most `limit` of each, spread over their file."""
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
            sets[name] = [Chat.of_user(r.text) if r.is_question else r.text for r in chosen]
        else:
            say(f"SKIPPED {name}: {path} is not there")
    return sets


def first_difference(got: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None; a missing token differs."""
    for index in range(max(len(got), len(expected))):
        if got[index : index + 1] != expected[index : index + 1]:
            return index
    return None


async def generate_all(
    client: Client, samples: Sequence[Expected], options: GenerateOptions
) -> list[list[int]]:
    """Token ids of every sample, several at a time."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(sample: Expected) -> list[int]:
        async with gate:
            generation = await client.complete(sample.prompt, replace(options, seed=sample.seed))
            return generation.token_ids

    return await asyncio.gather(*(one(sample) for sample in samples))


async def expect(
    client: Client, samples: Sequence[Expected], options: GenerateOptions
) -> list[Expected]:
    """The samples, to come out as they do with these options."""
    texts = await generate_all(client, samples, options)
    return [replace(s, expected=text) for s, text in zip(samples, texts, strict=True)]


async def tokenize(client: Client, prompt: Prompt) -> list[int]:
    """The prompt's ids as the service sees them."""
    options = GenerateOptions(max_tokens=1, num_speculative_tokens=0)
    return list((await client.complete(prompt, options)).started.prompt_token_ids)


async def compare(
    client: Client,
    samples: Sequence[Expected],
    options: GenerateOptions,
    reference: Reference | None,
) -> dict[str, Count]:
    """Count equal and differing texts by set; ties are looked up in `reference`."""
    counts: dict[str, Count] = {}
    outputs = await generate_all(client, samples, options)
    for sample, got in zip(samples, outputs, strict=True):
        count = counts.setdefault(sample.set_name, Count())
        count.texts += 1
        at = first_difference(got, sample.expected)
        if at is None:
            count.equal += 1
        elif reference and reference.is_tie(
            sample.prompt + sample.expected[:at],
            {*got[at : at + 1], *sample.expected[at : at + 1]},
            options.sampling,
            sample.seed,
            TIE_NATS,
        ):
            count.ties += 1
        else:
            count.wrong += 1
    return counts


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All comparisons; the report."""
    rows: list[dict[str, Any]] = []
    options = StackOptions(
        dtype=arguments.dtype,
        draft_dtype=arguments.dtype,
        tensor_parallel_size=arguments.tensor_parallel_size,
        max_model_len=arguments.max_model_len,
        log_level="warning",
    )
    async with Stack(options) as stack, Client(stack.address) as client:
        assert stack.options.model is not None
        reference = Reference(stack.options.model, arguments.dtype, stack.options.threads)
        sets = prompt_sets(Path(arguments.data), arguments.sets, arguments.limit)
        limit = (await client.list_models()).target.context_length
        samples: list[Expected] = []
        transformers = arguments.reference == "transformers"
        how = "transformers' own greedy generate" if transformers else "plain decoding"
        say(f"reference: {how}, and plain decoding with keyed sampling")
        plain = GenerateOptions(
            rule=EXACT, max_tokens=arguments.max_tokens, num_speculative_tokens=0
        )
        drawn = replace(
            plain, sampling=SamplingParams(arguments.temperature, top_p=arguments.top_p)
        )
        for name, prompts in sets.items():
            for index, prompt in enumerate(prompts):
                try:
                    ids = await tokenize(client, prompt)
                except InvalidArgumentError:
                    ids = [0] * limit
                if len(ids) + arguments.max_tokens > limit:
                    say(f"SKIPPED prompt {index} of {name}: it is too long")
                    continue
                greedy = transformers and not arguments.sampled_only
                expected = reference.generate(ids, arguments.max_tokens) if greedy else []
                samples.append(Expected(name, ids, expected, index))
        sampled = await expect(client, samples[:: arguments.sampled_every], drawn)
        if not transformers and not arguments.sampled_only:
            samples = await expect(client, samples, plain)
        ties = reference if transformers and arguments.dtype != "float64" else None
        for drafter in arguments.drafter:
            for k in arguments.k:
                what = GenerateOptions(
                    rule=EXACT,
                    max_tokens=arguments.max_tokens,
                    drafter=drafter,
                    num_speculative_tokens=k,
                )
                for temperature, case in (
                    (0.0, [] if arguments.sampled_only else samples),
                    (arguments.temperature, sampled),
                ):
                    started = time.monotonic()
                    if temperature:
                        what = replace(what, sampling=drawn.sampling)
                    counts = await compare(client, case, what, ties)
                    for set_name, count in counts.items():
                        case_ = {"drafter": drafter, "k": k, "temperature": temperature}
                        rows.append({**case_, "set": set_name, **asdict(count)})
                        say(
                            f"{drafter:14s} K {k:>4}  temperature {temperature:g}  "
                            f"{set_name:10s} {count.texts:4d} texts  {count.equal:4d} equal  "
                            f"{count.ties:2d} at ties  {count.wrong:2d} wrong  "
                            f"({time.monotonic() - started:.0f} s)"
                        )
    return {
        "dtype": arguments.dtype,
        "reference": arguments.reference,
        "tensor_parallel_size": arguments.tensor_parallel_size,
        "max_tokens": arguments.max_tokens,
        "rows": rows,
    }


def main() -> int:
    """Parse flags, compare, report."""
    parser = command.parser("exactness", __doc__)
    parser.add_argument("--data", default="../shared/data", help="folder of the prompt files")
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32", "bfloat16"])
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="processes that share the target"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=0,
        help="longer texts are left out; 0: the model's limit",
    )
    parser.add_argument(
        "--reference",
        default="transformers",
        choices=["transformers", "plain"],
        help="of the greedy texts: transformers' generate, or plain decoding, bit for bit",
    )
    parser.add_argument(
        "--k", type=read_speculation_length, nargs="+", default=[1, 4, 15, AUTO], metavar="K|auto"
    )
    parser.add_argument("--sets", nargs="+", default=list(DEFAULT_SETS), choices=SETS)
    parser.add_argument("--drafter", nargs="+", default=list(DRAFTERS), choices=DRAFTERS)
    parser.add_argument("--limit", type=int, help="at most this many prompts of each set")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampled share")
    parser.add_argument("--top-p", type=float, default=1.0, help="of the sampled share")
    parser.add_argument(
        "--sampled-every", type=int, default=4, help="share of prompts that is sampled: every Nth"
    )
    parser.add_argument("--sampled-only", action="store_true", help="leave the greedy texts out")
    arguments = parser.parse_args()
    return command.run(
        arguments, lambda: asyncio.run(run(arguments)), dict, show,
        lambda report: not any(row["wrong"] for row in report["rows"]),
    )  # fmt: skip


def show(report: dict[str, Any]) -> None:
    """Every configuration and set, then all of it in a line."""
    print_records(report["rows"])
    texts, wrong, ties = (
        sum(row[figure] for row in report["rows"]) for figure in ("texts", "wrong", "ties")
    )
    print(f"{texts} texts in {report['dtype']}: {wrong} wrong, {ties} differ first at a tie")


if __name__ == "__main__":
    raise SystemExit(main())
