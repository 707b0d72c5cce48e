"""Studies of what drafts: drafters with and without prompt lookup, tokenizers, sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flyspec import bundled
from flyspec.rules.presets import DEFAULT_RULE
from flyspec.values.admin import DrafterStatus
from flyspec_lab import tables
from flyspec_lab.statistics import is_larger
from flyspec_lab.studies.page import PageSection
from flyspec_lab.studies.study import (
    MODEL,
    ClaimFinding,
    Found,
    PaperClaim,
    Study,
    with_bounds,
)

LOOKUP, MULTI_LEVEL = "prompt_lookup", "multi_level"
"""Further kinds of drafters, and the names under which a stack has its own."""
SUMMARIES = "as summarised at en.papernotes.org; the paper itself was not at hand"
_RULES = f"exact,{DEFAULT_RULE},fly,margin"
_GATE_MS = 0.57
"""The longest time of the gate, per round, that the paper reports."""


def _drafted_faster(found: Found) -> ClaimFinding:
    alone, after_lookup = (
        found.one("fly", drafter=drafter).speedup for drafter in (MODEL, MULTI_LEVEL)
    )
    return ClaimFinding(
        is_larger(after_lookup, alone),
        f"{with_bounds(after_lookup, '.2f')} times plain decoding with prompt lookup before the "
        f"draft model, {with_bounds(alone, '.2f')} times without",
    )


def _gate_is_quick(found: Found) -> ClaimFinding:
    times = {report.condition: report.times.judge_ms for _, report in found.of("fly")}
    known = [ms for ms in times.values() if ms is not None]
    shown = "; ".join(f"{name}: {ms:.2f} ms" for name, ms in times.items() if ms is not None)
    return ClaimFinding(max(known) <= _GATE_MS if known else None, shown or "unknown")


def _where_time_goes(found: Found) -> list[PageSection]:
    section = PageSection(
        "Where the time of a round goes",
        [
            "One request at a time, so that nothing waits for another one; all conditions of a "
            "problem run one after the other. " + tables.TIMES_NOTES + ".",
        ],
        [tables.times_table(found.reports)],
    )
    return [section]


def _as_papers_table(found: Found) -> list[PageSection]:
    (section,) = _where_time_goes(found)
    known = (
        "FLy's Table 1 has these times for its pairs of models; of it, only the gate's 0.45 to "
        f"0.57 ms are known here ({SUMMARIES})."
    )
    return [replace(section, paragraphs=[*section.paragraphs, known])]


def _by_tokenizer(drafters: Sequence[DrafterStatus]) -> list[str]:
    """Return a draft model with the target's tokenizer, and all with others."""
    models = [drafter for drafter in drafters if drafter.kind == MODEL]
    own = [drafter.name for drafter in models if not drafter.translated]
    others = [drafter.name for drafter in models if drafter.translated]
    return [own[0], *others] if own and others else []


def _by_size(drafters: Sequence[DrafterStatus]) -> list[str]:
    """Return draft models of several sizes, smallest first, all with the target's tokenizer."""
    sizes = {
        drafter.name: drafter.model.num_parameters
        for drafter in drafters
        if drafter.kind == MODEL and drafter.model is not None and not drafter.translated
    }
    return sorted(sizes, key=lambda name: sizes[name]) if len(set(sizes.values())) > 1 else []


DRAFTER_KINDS = Study(
    name="drafter",
    title="Kinds of drafters",
    question="What do prompt lookup, a draft model and both together draft, under which rule?",
    rules=_RULES,
    grid=(f"drafter={MODEL},{LOOKUP},{MULTI_LEVEL}",),
    axis="drafter",
)
MULTI_LEVEL_DRAFTING = Study(
    name="multi-level",
    title="Multi-level acceleration",
    question="Does prompt lookup before the draft model pay, and where does a round's time go?",
    rules="exact,fly",
    grid=(f"drafter={MODEL},{MULTI_LEVEL}",),
    axis="drafter",
    settings={"concurrency": 1},
    sections=_as_papers_table,
    claims=(
        PaperClaim(
            "prompt lookup before the draft model makes FLy faster: 2.86 instead of 2.69 times "
            "plain decoding",
            f"FLy, arXiv 2511.22972, Table 5, {SUMMARIES}",
            _drafted_faster,
        ),
        PaperClaim(
            "the gate takes no more than 0.57 ms per round",
            f"FLy, arXiv 2511.22972, Table 1, {SUMMARIES}",
            _gate_is_quick,
        ),
    ),
)
TOKENIZERS = Study(
    name="tokenizer",
    title="Draft models with another tokenizer",
    question="What does a draft model with another tokenizer draft, and what do rules gain by it?",
    rules=_RULES,
    axis="drafter",
    settings={"concurrency": 1},
    sections=_where_time_goes,
    drafters=_by_tokenizer,
    needs="it needs a draft model with the target's tokenizer (--draft-model) and one with another "
    "(--draft NAME=MODEL)",
    drafts={"bytes": bundled.DRAFT_BYTES},
)
DRAFTER_SIZES = Study(
    name="drafter-size",
    title="Sizes of draft models",
    question="How large may a draft model be before its time costs more than its drafts save?",
    rules="exact,fly,margin",
    axis="drafter",
    settings={"concurrency": 1},
    sections=_where_time_goes,
    drafters=_by_size,
    needs="it needs draft models of several sizes with the target's tokenizer (--draft-model, "
    "--draft NAME=MODEL)",
    # The largest draft model of all: it drafts what it will accept, and is as slow as the target.
    drafts={"target": bundled.TARGET},
)
