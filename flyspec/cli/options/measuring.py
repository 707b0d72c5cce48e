"""Flags shared by commands that read prompts or measure.

Those of a request are declared by `GenerateOptions` and `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from flyspec.flags import Dtype, Flag, flags_of
from flyspec.speculation_length import SpeculationLength, read_speculation_length
from flyspec.values.generation import GenerateOptions
from flyspec.values.tokens import SamplingParams


def _request(name: str, **changes: Any) -> Flag:
    _, flag = {**flags_of(GenerateOptions), **flags_of(SamplingParams)}[name]
    return replace(flag, group=None, **changes)


PromptFiles = Annotated[Sequence[str], Flag(
    "Prompt file: lines, HumanEval, GSM8K, Spec-Bench or MGSM (auto-detected); repeatable.",
)]  # fmt: skip
Limit = Annotated[int | None, Flag("Maximum prompts per file.", min=1)]
ProblemSeed = Annotated[int, Flag("Seed for generating the word problems.")]
Address = Annotated[str | None, Flag(
    "Address of a running stack.", default="start one for this command",
)]  # fmt: skip
Local = Annotated[bool, Flag("Start a stack for this command (the default).")]
Chat = Annotated[bool | None, Flag(
    "Send prompts as chat messages.", default="only questions, not code",
)]  # fmt: skip
K = Annotated[int, Flag("K: maximum drafted tokens per round.", min=1)]
KOrAuto = Annotated[SpeculationLength, Flag(
    "K: maximum drafted tokens per round, or auto to adapt it each round.",
    metavar="<int|auto>", read=read_speculation_length,
)]  # fmt: skip
Ks = Annotated[str, Flag(
    "K: maximum drafted tokens per round, or auto to adapt it each round. A list such as "
    "auto,0,4,8 measures each, and the best fixed K per prompt, chosen in hindsight.",
)]  # fmt: skip
PlainOrK = Annotated[int, _request("num_speculative_tokens", default=None)]
MaxTokens = Annotated[int, _request("max_tokens")]
IgnoreEos = Annotated[bool, _request("ignore_eos")]
Temperature = Annotated[float, _request("temperature")]
TopP = Annotated[float, _request("top_p")]
Drafter = Annotated[str, _request("drafter")]
Model = Annotated[str | None, Flag(
    "Model: a directory or hub id.", default="the bundled target model",
)]  # fmt: skip
Device = Annotated[str, Flag("Device: cpu, cuda, cuda:N or auto.")]
ModelDtype = Annotated[Dtype, Flag("Data type of the weights.")]
Threads = Annotated[int, Flag("CPU threads.", min=0, default="all cores")]
Repeats = Annotated[int, Flag("Timed runs per measurement.", min=1)]
Json = Annotated[bool, Flag("Print one JSON document instead of tables.")]
Output = Annotated[Path | None, Flag("Also write the JSON document, with all samples, to a file.")]
Plot = Annotated[Path | None, Flag("Write a plot to a .svg, .png or .pdf file (needs matplotlib).")]
