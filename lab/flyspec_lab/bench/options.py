"""What `flyspec bench` can be told: every option, declared on the field it sets.

Reports list these fields as well. Imports neither torch nor gRPC, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from flyspec.cli.conditions import Condition, parse_condition
from flyspec.drafter_names import KINDS_LISTED
from flyspec.flags import AttentionBackendName, Dtype, Flag
from flyspec.prompts import PromptFiles, PromptLimit
from flyspec.ranges import Range
from flyspec.rules import Rule
from flyspec.speculation_length import AUTO, SpeculationLength
from flyspec.values.requests import request_flag
from flyspec_lab.bench.conditions import (
    DEFAULT,
    EXACT,
    FLY,
    FUZZY,
    parse_conditions,
    parse_ks,
    parse_rules,
)
from flyspec_lab.bench.openai import parse_against
from flyspec_lab.bench.peers import parse_peers

STALL_GROWTH = 64
"""Tokens by which a session of `bench prefill-stall` grows before it is rolled back."""


def numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of comma-separated integers; it returns them sorted, without duplicates."""

    def read(text: str) -> tuple[int, ...]:
        try:
            found = sorted({int(piece) for piece in text.split(",") if piece.strip()})
        except ValueError:
            found = []
        if not found or found[0] < least:
            raise ValueError(
                f"{text!r}: must be a comma-separated list of integers of at least {least}"
            )
        return tuple(found)

    return read


def names_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of comma-separated names, each of them one of `known`."""

    def read(text: str) -> tuple[str, ...]:
        names = names_listed(text)
        if unknown := next((name for name in names if name not in known), None):
            raise ValueError(f"{unknown!r}: must be one of {', '.join(known)}")
        return names

    return read


def names_listed(text: str) -> tuple[str, ...]:
    """Parse comma-separated names."""
    return tuple(name.strip() for name in text.split(","))


def _servers(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple(map(parse_against, texts))


_request = partial(request_flag, group=None)


# fmt: off
def numbers_flag(text: str, least: int = 1, **known: Any) -> Flag:
    return Flag(f"{text}, comma-separated.", metavar="N,...", listed=True, read=numbers(least),
                **known)


class WantedPadding(NamedTuple):
    """Layers to add to the target, and the ratio of verify to draft step to reach, if any."""

    target_layers: int
    ratio: float | None

    @classmethod
    def read(cls, text: str) -> WantedPadding:
        """Parse N, auto:R or N,auto:R. Raises `ValueError`."""
        layers, _, auto = text.rpartition(",") if "auto:" in text else (text, "", "")
        if not (layers or "0").isdecimal() or not (auto or "auto:").startswith("auto:"):
            raise ValueError(f"{text}: must be a number of layers, auto:R or N,auto:R")
        try:
            ratio = float(auto.removeprefix("auto:")) if auto else None
        except ValueError:
            ratio = 0.0
        if ratio is not None and not 0 < ratio < float("inf"):
            raise ValueError(f"{text}: the ratio must be a number above 0")
        return cls(int(layers or "0"), ratio)


RULES_HELP = (
    "Rules, comma-separated, with parameters after a colon, or phases: "
    "exact,margin:margin_threshold=0.2,relaxed until #### then exact."
)
Rules = Annotated[tuple[Condition, ...], Flag(
    RULES_HELP, metavar="RULE,...", listed=True, read=parse_conditions,
)]
OneRule = Annotated[Condition, Flag(
    "Rule, with parameters as in margin:margin_threshold=0.2.", metavar="RULE",
    read=parse_condition,
)]
Problems = Annotated[int, Flag("Number of fresh word problems.", min=1)]
ProblemSeed = Annotated[int, Flag("Seed for generating the word problems.")]
Chat = Annotated[bool | None, Flag(
    "Send prompts as chat messages.", default="only questions, not code",
)]
KOrAuto = Annotated[SpeculationLength, _request("num_speculative_tokens", default=None)]
MaxTokens = Annotated[int, _request("max_tokens")]
IgnoreEos = Annotated[bool, _request("ignore_eos")]
Temperature = Annotated[float, _request("temperature")]
Drafter = Annotated[str, _request("drafter")]
Device = Annotated[str, Flag("Device: cpu, cuda, cuda:N or auto.")]
Threads = Annotated[int, Flag("CPU threads.", min=0, default="all cores")]
Repeats = Annotated[int, Flag("Timed runs per measurement.", min=1)]


@dataclass(frozen=True)
class SpeedOptions:
    """`flyspec bench`. Several drafters, or Ks, each make a mode of every rule."""

    prompt_file: PromptFiles = ()
    problems: Annotated[int | None, Flag(
        "Number of fresh word problems.", min=0, default="20, or 0 with other prompts",
    )] = None
    problem_seed: ProblemSeed = 7
    random_prompts: Annotated[int, Flag(
        "Number of prompts of random tokens, which no drafter predicts well.", min=0,
    )] = 0
    limit: Annotated[int | None, Flag(
        "Maximum prompts per file (or per category in it), evenly spaced.", min=1,
    )] = None
    rules: Rules = (EXACT, DEFAULT)
    drafters: Annotated[tuple[str, ...], Flag(
        f"Drafters, comma-separated: {KINDS_LISTED}, or names of heads or registered ones.",
        name="--drafter", metavar="NAME,...", listed=True, default="set by the server",
        read=names_listed,
    )] = ("",)
    num_speculative_tokens: Annotated[tuple[SpeculationLength, ...], Flag(
        "K: maximum drafted tokens per round, or auto to adapt it each round. A list such as "
        "auto,0,4,8 measures each, and the best fixed K per prompt, chosen in hindsight.",
        metavar="N|auto,...", listed=True, read=parse_ks,
    )] = (AUTO,)
    max_tokens: MaxTokens = 128
    ignore_eos: IgnoreEos = False
    temperature: Temperature = 0.0
    repeats: Annotated[int, Flag("Runs per prompt and mode.", min=1)] = 5
    chat: Chat = None
    peers: Annotated[tuple[str, ...], Flag(
        "Modes of transformers' generate to time too: greedy, assisted, prompt-lookup, ensemble "
        "(comma-separated), or all.", metavar="NAME,...", listed=True, default="none",
        read=parse_peers,
    )] = ()
    against: Annotated[Sequence[tuple[str, str]], Flag(
        "OpenAI-compatible server to time too: URL or NAME=URL; repeatable.",
        metavar="[NAME=]URL", read=_servers,
    )] = ()
    batch: Annotated[tuple[int, ...], numbers_flag("Concurrent requests")] = (1,)
    compare_dtypes: Annotated[bool, Flag(
        "Also time plain decoding in the other of bfloat16 and float32.",
    )] = False

    @property
    def others(self) -> list[str]:
        return [*self.peers, *(name for name, _ in self.against)]


@dataclass(frozen=True)
class ModelOptions:
    """The model of a benchmark without services."""

    model: Annotated[str, Flag(
        "Model: a directory or hub id.", default="the bundled target model",
    )] = ""
    device: Device = "auto"
    dtype: Annotated[Dtype, Flag("Data type of the weights.")] = "auto"
    threads: Threads = 0


@dataclass(frozen=True)
class EngineOptions(ModelOptions):
    """`flyspec bench engine`. A step has `batch` sequences with K + 1 tokens each.

    Chunks are cut from a prompt as long as the longest context.
    """

    batches: Annotated[tuple[int, ...], numbers_flag(
        "Sequences per step", name="--batch",
    )] = (1, 2, 4, 8, 16, 32)
    num_speculative_tokens: Annotated[tuple[int, ...], numbers_flag(
        "Drafted tokens (K; 0: plain decoding)", 0, name="--k",
    )] = (0, 4, 8, 16)
    contexts: Annotated[tuple[int, ...], numbers_flag(
        "Cached tokens per sequence", name="--context",
    )] = (128, 512, 2048)
    chunks: Annotated[tuple[int, ...], numbers_flag(
        "Prompt tokens per prefill step", name="--chunk",
    )] = (128, 256, 512, 1024)
    tensor_parallel_sizes: Annotated[tuple[int, ...], numbers_flag(
        "Number of processes that share the model", name="--tensor-parallel-size",
    )] = (1,)
    repeats: Repeats = 7

    @property
    def slot_tokens(self) -> int:
        """Length of the longest sequence of any step."""
        return max(self.contexts) + max(self.num_speculative_tokens) + 1

    @property
    def prompt_chunks(self) -> list[int]:
        """The chunk sizes that fit into the prompt."""
        return [chunk for chunk in self.chunks if chunk <= max(self.contexts)]


@dataclass(frozen=True)
class DeviceOptions(ModelOptions):
    """`flyspec bench device`. Without a shape or a model, the bundled pair."""

    shape: Annotated[str, Flag(
        "Use a target with random weights of this shape, made on the device: llama-1b, llama-8b, "
        "llama-70b, llama-405b or tiny.",
    )] = ""
    draft_model: Annotated[str, Flag("Draft model: a directory or hub id.")] = ""
    draft_shape: Annotated[str, Flag("The same as --shape, for a draft model.")] = ""
    batches: Annotated[tuple[int, ...], numbers_flag(
        "Sequences per step", name="--batch",
    )] = (1, 8, 32)
    tokens: Annotated[tuple[int, ...], numbers_flag(
        "Tokens of each sequence in a step (1: plain decoding; else K + 1)",
    )] = (1, 5, 9, 16)
    contexts: Annotated[tuple[int, ...], numbers_flag(
        "Cached tokens per sequence", name="--context",
    )] = (512, 4096)
    num_speculative_tokens: Annotated[int, Flag(
        "K: drafted tokens per proposal and per judged round.", min=1,
    )] = 15
    vocab_size: Annotated[int, Flag("Vocabulary size for judging.", min=64)] = 128_256
    modes: Annotated[tuple[str, ...], Flag(
        "Ways to run steps: eager, captured, compiled (captured, with compiled layers).",
        name="--mode", metavar="NAME,...", listed=True, default="all",
        read=names_of(("eager", "captured", "compiled")),
    )] = ("eager", "captured", "compiled")
    attention_backend: Annotated[AttentionBackendName, Flag(
        "Attention over blocks: auto, flashinfer, flex or sdpa.",
    )] = "auto"
    block_size: Annotated[int, Flag("Tokens per block of the KV cache.", min=1)] = 32
    repeats: Repeats = 12
    max_seconds: Annotated[int, Flag(
        "Leave out what has not been measured by then, roughly.", min=0, default="no limit",
    )] = 0


@dataclass(frozen=True)
class StallOptions(ModelOptions):
    """`flyspec bench prefill-stall`.

    `max_num_batched_tokens` limits a step as in the verify service; it is raised as far as needed
    for a prompt in one chunk.
    """

    sessions: Annotated[int, Flag("Number of decoding sessions.", min=1)] = 32
    num_speculative_tokens: Annotated[int, Flag(
        "K: drafted tokens per round (0: plain decoding).", min=0,
    )] = 8
    context: Annotated[int, Flag("Tokens per decoding session.", min=1)] = 128
    prompt_tokens: Annotated[int, Flag("Tokens of the arriving prompt.", min=2)] = 1500
    chunks: Annotated[tuple[int, ...], Flag(
        "Maximum prompt tokens per step, comma-separated; compared with no limit.",
        name="--prefill-chunk", metavar="N,...", listed=True, read=numbers(16),
    )] = (512,)
    max_num_batched_tokens: Annotated[int, Flag("Maximum tokens per step.", min=128)] = 2048
    steps: Annotated[int, Flag("Timed steps before and after an arrival.", min=1)] = 60
    repeats: Annotated[int, Flag("Arrivals per chunk size.", min=1)] = 5

    @property
    def max_model_len(self) -> int:
        """Length of the longest sequence of any session."""
        longest = max(self.context + STALL_GROWTH, self.prompt_tokens)
        return longest + self.num_speculative_tokens + 2

    @property
    def all_chunks(self) -> list[int]:
        """The configured chunk sizes, and that of the whole prompt."""
        return [*dict.fromkeys(c for c in self.chunks if c < self.prompt_tokens),
                self.prompt_tokens]


@dataclass(frozen=True)
class ThroughputOptions:
    """`flyspec bench throughput`."""

    concurrency: Annotated[tuple[int, ...], numbers_flag(
        "Concurrent requests",
    )] = (1, 2, 4, 8, 16, 32)
    rule: OneRule = EXACT
    drafter: Drafter = ""
    num_speculative_tokens: KOrAuto = 8
    max_tokens: Annotated[int, Flag("Maximum output tokens.", min=2)] = 96
    ignore_eos: IgnoreEos = False
    problem_seed: ProblemSeed = 7
    repeats: Annotated[int, Flag("Runs per concurrency and mode.", min=1)] = 3


@dataclass(frozen=True)
class RoundOptions:
    """`flyspec bench round`."""

    rule: OneRule = DEFAULT
    problems: Problems = 6
    problem_seed: ProblemSeed = 7
    drafter: Drafter = ""
    num_speculative_tokens: Annotated[int, Flag(
        "K: maximum drafted tokens per round.", min=1,
    )] = 15
    max_tokens: MaxTokens = 128
    repeats: Annotated[int, Flag("Traced runs per prompt.", min=1)] = 5


@dataclass(frozen=True)
class PredictionOptions:
    """`flyspec bench prediction`."""

    prompt_file: PromptFiles = ()
    problems: Annotated[int | None, Flag(
        "Number of fresh word problems.", min=0, default="6, or 0 with other prompts",
    )] = None
    problem_seed: ProblemSeed = 7
    limit: PromptLimit = 6
    rule: OneRule = EXACT
    drafter: Drafter = ""
    num_speculative_tokens: KOrAuto = AUTO
    max_tokens: MaxTokens = 500
    repeats: Annotated[int, Flag("Runs per prompt and prediction.", min=1)] = 5

    @property
    def ignore_eos(self) -> bool:
        """Always, so that all texts have as many tokens."""
        return True

    @property
    def temperature(self) -> float:
        """Always greedy: a prediction is of the text that plain decoding gives."""
        return 0.0


@dataclass(frozen=True)
class StartupOptions:
    """`flyspec bench startup`."""

    repeats: Annotated[int, Flag("Runs of each.", min=1)] = 5


@dataclass(frozen=True)
class PairOptions:
    """`flyspec bench pair`."""

    shape: Annotated[str, Flag(
        "Use a target with random weights of this shape (llama-1b, llama-8b, llama-70b, "
        "llama-405b or tiny) "
        "and --model's tokenizer.",
    )] = ""
    draft_shape: Annotated[str, Flag(
        "With --replay-drafter: drafts take the time of a model of this shape.",
    )] = ""
    pad_target_layers: Annotated[WantedPadding | None, Flag(
        "Add N no-op layers to the target. auto:R: as many as make a verify step R times as long "
        "as a draft step, added to the draft model if it is already longer. N,auto:R: both, so "
        "that both steps are long.", metavar="[N,]auto:R|N", default="0", read=WantedPadding.read,
    )] = None
    replay_drafter: Annotated[float | None, Flag(
        "Draft the target's own text with this fraction of errors, without a draft model.",
        Range(0.0, 1.0), default="use the draft model",
    )] = None
    replay_seed: Annotated[int, Flag("Seed of the errors and of random weights.")] = 0
    rules: Rules = (EXACT, FLY, FUZZY)
    problems: Problems = 4
    problem_seed: ProblemSeed = 7
    drafter: Drafter = ""
    num_speculative_tokens: KOrAuto = 15
    max_tokens: MaxTokens = 64
    temperature: Temperature = 0.0
    repeats: Annotated[int, Flag(
        "Runs per prompt and mode, after a warm-up run.", min=1,
    )] = 3


@dataclass(frozen=True)
class JudgeOptions:
    """`flyspec bench judge`."""

    vocab_size: Annotated[int, Flag("Vocabulary size (V).", min=64)] = 128_256
    hidden_size: Annotated[int, Flag("Hidden size of the output layer.", min=1)] = 4096
    num_speculative_tokens: Annotated[Sequence[int], Flag(
        "Drafted tokens (K); repeatable.", min=1, default="15 and 25",
    )] = ()
    rules: Annotated[tuple[tuple[str, Rule], ...] | None, Flag(
        RULES_HELP, metavar="RULE,...", read=parse_rules, default="every preset",
    )] = None
    repeats: Repeats = 9
    device: Device = "auto"
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], Flag(
        "Data type of layer and logits.",
    )] = "bfloat16"
    threads: Threads = 0

    @property
    def ks(self) -> list[int]:
        return list(dict.fromkeys(self.num_speculative_tokens or (15, 25)))
# fmt: on
