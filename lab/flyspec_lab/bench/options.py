"""Options of `flyspec bench`, each declared on the field it sets, and flags that others share.

Reports list these fields as well. Imports neither torch nor gRPC, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated
from urllib.parse import urlsplit

from flyspec.cli.conditions import Condition
from flyspec.drafter_names import KINDS_LISTED
from flyspec.errors import ConfigError
from flyspec.flags import Dtype, Flag
from flyspec.prompts import PromptFiles
from flyspec.speculation_length import AUTO, SpeculationLength
from flyspec.values.requests import request_flag
from flyspec_lab.bench.conditions import DEFAULT, EXACT, parse_conditions, parse_ks

PEERS = {
    "greedy": "transformers",
    "assisted": "assisted",
    "prompt-lookup": "prompt lookup",
    "ensemble": "ensemble",
}
"""Names of transformers' modes in reports, by name on the command line."""

PORT = "{port}"
"""Placeholder of the port in the command of a server."""


def parse_numbers(text: str) -> tuple[int, ...]:
    """Parse comma-separated integers; return them sorted, without duplicates."""
    try:
        found = sorted({int(piece) for piece in text.split(",") if piece.strip()})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise ValueError(f"{text!r}: must be a comma-separated list of integers of at least 1")
    return tuple(found)


def names_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of comma-separated names, each one of `known`; none if it is empty."""

    def read(text: str) -> tuple[str, ...]:
        names = names_listed(text) if text else ()
        if unknown := next((name for name in names if name not in known), None):
            raise ValueError(f"{unknown!r}: must be one of {', '.join(known)}")
        return names

    return read


def names_listed(text: str) -> tuple[str, ...]:
    """Parse comma-separated names."""
    return tuple(name.strip() for name in text.split(","))


def parse_peers(text: str) -> tuple[str, ...]:
    """Parse comma-separated names of transformers' modes, or `all`. Raises `ValueError`."""
    return tuple(PEERS[name] for name in (PEERS if text == "all" else names_of(PEERS)(text)))


def parse_against(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse `NAME=URL`, `URL` named by its host and port, or `NAME=COMMAND` with `{port}` in it.

    Raises `ConfigError`.
    """
    found = []
    for text in texts:
        name, separator, url = text.partition("=")
        if name and PORT in url:
            found.append((name, url))
            continue
        if not separator or "/" in name:
            name, url = "", text
        parts = urlsplit(url)
        try:
            known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
        except ValueError:
            known = False
        if not known:
            raise ConfigError(
                f"--against {text!r}: give NAME=http://HOST:PORT, the URL alone, or NAME=COMMAND "
                f"with {PORT} in it"
            )
        found.append((name or parts.netloc, url.rstrip("/").removesuffix("/v1")))
    return tuple(found)


_request = partial(request_flag, group=None)


# fmt: off
RULES_HELP = (
    "Rules, comma-separated, with parameters after a colon, or phases: "
    "exact,margin:margin_threshold=0.2,relaxed until #### then exact."
)
ProblemSeed = Annotated[int, Flag("Seed for generating the word problems.")]
Chat = Annotated[bool | None, Flag(
    "Send prompts as chat messages.", default="only questions, not code",
)]
KOrAuto = Annotated[SpeculationLength, _request("num_speculative_tokens", default=None)]
MaxTokens = Annotated[int, _request("max_tokens")]
Drafter = Annotated[str, _request("drafter")]


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
    rules: Annotated[tuple[Condition, ...], Flag(
        RULES_HELP, metavar="RULE,...", listed=True, read=parse_conditions,
    )] = (EXACT, DEFAULT)
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
    prediction: Annotated[bool, Flag(
        "Also time each rule with the predicted output of each prompt, such as an edit's original: "
        "`prediction` beside `messages` in the prompt files, as in OpenAI's requests.",
    )] = False
    max_tokens: MaxTokens = 128
    ignore_eos: Annotated[bool, _request("ignore_eos")] = False
    temperature: Annotated[float, _request("temperature")] = 0.0
    repeats: Annotated[int, Flag("Runs per prompt and mode.", min=1)] = 5
    chat: Chat = None
    peers: Annotated[tuple[str, ...], Flag(
        "Modes of transformers' generate to time too: greedy, assisted, prompt-lookup, ensemble "
        "(comma-separated), or all.", metavar="NAME,...", listed=True, default="none",
        read=parse_peers,
    )] = ()
    against: Annotated[Sequence[tuple[str, str]], Flag(
        f"OpenAI-compatible server to time too: URL, NAME=URL, or NAME=COMMAND with {PORT} in it, "
        "which is run only for its turn; repeatable.",
        metavar="[NAME=]URL|COMMAND", read=parse_against,
    )] = ()
    batch: Annotated[tuple[int, ...], Flag(
        "Concurrent requests, comma-separated.", metavar="N,...", listed=True, read=parse_numbers,
    )] = (1,)
    shape: Annotated[str, Flag(
        "Use a target with random weights of this shape (llama-1b, llama-8b, llama-70b, "
        "llama-405b or tiny), --model's tokenizer, and its first eighth as the draft model.",
    )] = ""
    pad_target_layers: Annotated[int, Flag("Add N no-op layers to the target.", min=0)] = 0

    @property
    def makes_pair(self) -> bool:
        """True if the pair of models is made for the measurement."""
        return bool(self.shape or self.pad_target_layers)


@dataclass(frozen=True)
class ModelOptions:
    """A model that is read without a stack."""

    model: Annotated[str, Flag(
        "Model: a directory or hub id.", default="the bundled target model",
    )] = ""
    device: Annotated[str, Flag("Device: cpu, cuda, cuda:N or auto.")] = "auto"
    dtype: Annotated[Dtype, Flag("Data type of the weights.")] = "auto"
    threads: Annotated[int, Flag("CPU threads.", min=0, default="all cores")] = 0
# fmt: on
