"""Flags that commands share which read prompts or measure: what is asked, of which server or model.

Those of a request are its own, as `GenerateOptions` and `SamplingParams` declare them.
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
    "Prompts: lines, HumanEval, GSM8K, Spec-Bench or MGSM, told by the content; repeatable.",
)]  # fmt: skip
Limit = Annotated[int | None, Flag("Maximum prompts per file.", min=1)]
ProblemSeed = Annotated[int, Flag("Seed of the word problems.")]
Address = Annotated[str | None, Flag(
    "Address of a running stack.", default="one is started for this command",
)]  # fmt: skip
Local = Annotated[bool, Flag("Start a stack (the default).")]
Chat = Annotated[bool | None, Flag(
    "Ask an assistant.", default="questions are asked, code is continued",
)]  # fmt: skip
K = Annotated[int, Flag("K: maximum drafted tokens per round.", min=1)]
KOrAuto = Annotated[SpeculationLength, Flag(
    "K: maximum drafted tokens per round; auto drafts as many as pay.",
    metavar="INTEGER|auto", read=read_speculation_length,
)]  # fmt: skip
Ks = Annotated[str, Flag(
    "K: maximum drafted tokens per round, or auto for the server's choice; with several, as in "
    "auto,0,4,8, each is measured, and the best fixed one of each prompt, chosen with hindsight.",
)]  # fmt: skip
PlainOrK = Annotated[int, _request("num_speculative_tokens", default=None)]
MaxTokens = Annotated[int, _request("max_tokens")]
IgnoreEos = Annotated[bool, _request("ignore_eos")]
Temperature = Annotated[float, _request("temperature")]
TopP = Annotated[float, _request("top_p")]
Drafter = Annotated[str, _request("drafter")]
Model = Annotated[str | None, Flag(
    "Model: a directory or hub id.", default="the bundled pair's target",
)]  # fmt: skip
Device = Annotated[str, Flag("Device: cpu, cuda, cuda:N or auto.")]
ModelDtype = Annotated[Dtype, Flag("Data type of the weights.")]
Threads = Annotated[int, Flag("CPU threads.", min=0, default="all cores")]
Repeats = Annotated[int, Flag("Number of timed runs of everything.", min=1)]
Json = Annotated[bool, Flag("Print one JSON document instead of tables.")]
Output = Annotated[Path | None, Flag("Also write the JSON document, with all samples, here.")]
Plot = Annotated[Path | None, Flag("Draw a plot: a .svg, .png or .pdf file. Needs matplotlib.")]
