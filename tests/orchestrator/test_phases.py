"""Which rule judges which position, against reading the whole output again."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyspec.rules import Rule
from flyspec.values.phases import Phase
from flyspec.values.rounds import Budget, RuleSegment
from orchestrator.generation.phases import Phases, PhaseWalk
from tests.orchestrator.tokenizer import TOKENIZER

PIECES = [
    "", "a", " ", "\n", "#", "##", "# #", "###", "</", "think", ">", "</think>x", "{", "}", "[",
    "]", '"', "\\", '{"a": "}"}', "```", "json", "``", "`json\n", "```json\n{", "<tool", "_call>",
    "</tool_call>", "<tool_call>{", "</tool_call><tool_call>", "ä",
]  # fmt: skip
ENDS = ["#", "####", "</think>", "a", "\n", "}", "xa"]
TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=40)
EXACT = Rule("exact")


class Texts:
    """A detokenizer of `PIECES`."""

    def push(self, token_id: int) -> str:
        return PIECES[token_id]

    def copy(self) -> Texts:
        return Texts()


@st.composite
def phases(draw: st.DrawFn) -> list[Phase]:
    found = []
    for _ in range(draw(st.integers(0, 3))):
        until = draw(st.lists(st.sampled_from(ENDS), max_size=2))
        tokens = draw(st.lists(st.sampled_from([4, 7, 11]), max_size=1, min_size=not until))
        found.append(Phase(Rule("fly"), until, tokens, max_loose_tokens=len(found)))
    return [*found, Phase(EXACT)]


def closes(text: str) -> bool:
    """Whether all brackets outside of strings are closed."""
    bare = re.sub(r'"(?:\\.|[^"\\])*("|\\?$)', "", text, flags=re.DOTALL)
    return sum(map(bare.count, "{[")) == sum(map(bare.count, "}]"))


def in_json(parts: Sequence[str]) -> bool:
    """Whether the text ends in a value that begins a part, or in a fence.

    Parts are the texts of the phases; what began before a part goes on in it.
    """
    inside, marks = "", ""
    for part in parts:
        may_begin = not inside
        for character in part:
            if inside:
                inside += character
                if inside.startswith("```"):
                    ended = len(inside) >= len("```json\n```") and inside.endswith("```")
                else:
                    ended = closes(inside)
                if ended:
                    inside = ""
                continue
            if may_begin and character in "{[":
                inside, marks, may_begin = character, "", False
                continue
            may_begin = may_begin and character.isspace()
            marks += character
            if marks.endswith("```json\n"):
                inside, marks = "```json\n", ""
    return bool(inside)


def rule_at(found: Sequence[Phase], inside: Sequence[str], tokens: Sequence[int]) -> int:
    """The rule after these tokens, by reading them all again."""
    number, first, parts = 0, 0, []
    for end in range(1, len(tokens) + 1):
        phase = found[number]
        text = "".join(PIECES[token] for token in tokens[first:end])
        if tokens[end - 1] in phase.until_token_ids or any(e in text for e in phase.until):
            parts.append(text)
            number, first = number + 1, end
    parts.append("".join(PIECES[token] for token in tokens[first:]))
    if "tool_call" in inside:
        rest = re.sub("<tool_call>.*?</tool_call>", "|", "".join(parts), flags=re.DOTALL)
        if "<tool_call>" in rest:
            return len(found)
    if "json" in inside and in_json(parts):
        return len(found)
    return number


INSIDE = st.sampled_from([(), ("tool_call",), ("json",), ("tool_call", "json")])


@settings(max_examples=400, deadline=None)
@given(phases(), INSIDE, TOKENS)
def test_the_walk_is_a_function_of_the_output(
    found: list[Phase], inside: tuple[str, ...], tokens: list[int]
) -> None:
    walk = PhaseWalk(found, inside, Texts())
    for length in range(len(tokens) + 1):
        assert walk.rule_index == rule_at(found, inside, tokens[:length])
        if length < len(tokens):
            walk.copy().push(1)  # leaves the original as it is
            walk.push(tokens[length])


@settings(max_examples=300, deadline=None)
@given(phases(), INSIDE, st.data())
def test_segments_of_proposals_through_rollbacks(
    found: list[Phase], inside: tuple[str, ...], data: st.DataObject
) -> None:
    """Tokens that are not final may be taken back; proposals may be accepted or not."""
    prompt = [9, 9, 9]
    tracked = Phases(found, inside, Texts(), len(prompt))
    output: list[int] = []
    final = 0

    def at(length: int, more: Sequence[int] = ()) -> int:
        return rule_at(found, inside, [*output, *more][:length])

    for _ in range(data.draw(st.integers(1, 6))):
        drafts = data.draw(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=8))
        segments = tracked.segments([*prompt, *output], drafts, None)
        assert segments[0].start_position == len(prompt) + len(output)
        for index in range(len(drafts)):
            position = len(prompt) + len(output) + index
            holds = [s for s in segments if s.start_position <= position][-1]
            assert holds.rule_index == at(len(output) + index, drafts)
            limited = holds.rule_index < len(found) and found[holds.rule_index].has_budget
            assert holds.budget == (Budget(holds.rule_index) if limited else Budget())
        assert segments[-1].start_position < len(prompt) + len(output) + len(drafts)
        output += drafts[: data.draw(st.integers(0, len(drafts)))]
        output.append(data.draw(st.integers(0, len(PIECES) - 1)))
        final = data.draw(st.integers(final, len(output)))
        tracked.commit([*prompt, *output], len(prompt) + final)
        for length in range(final + 1):
            assert tracked.rule_index_at(len(prompt) + length) == at(length)
        del output[data.draw(st.integers(final, len(output))) :]


def test_a_text_is_found_across_tokens_and_characters_across_bytes() -> None:
    text = "one ### two\n#### drei ü 12"
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    for end in ("####", "ü", "two\n#"):
        walk = PhaseWalk([Phase(Rule("fly"), (end,)), Phase(EXACT)], (), TOKENIZER.detokenizer())
        detokenizer, known = TOKENIZER.detokenizer(), ""
        for token in tokens:
            walk.push(token)
            known += detokenizer.push(token)
            assert walk.rule_index == (end in known)
        assert walk.settled


def test_a_text_does_not_begin_in_the_phase_before() -> None:
    """`##` ends the first phase with its second `#`; two more end the second."""
    two = ("##",)
    walk = PhaseWalk([Phase(None, two), Phase(None, two), Phase(None)], (), Texts())
    found = []
    for token in (4, 4, 4, 4, 4):
        walk.push(token)
        found.append(walk.rule_index)
    assert found == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("rules", "after", "exact"),
    [(["fly", "exact"], 0, False), (["fly", "exact"], 1, True), (["exact", "fly"], 1, False)],
)
def test_what_is_exact_from_here(rules: list[str], after: int, exact: bool) -> None:
    first, second = map(Rule, rules)
    tracked = Phases([Phase(first, ("#",)), Phase(second)], (), Texts(), 1)
    tracked.commit([0, 4], 1 + after)
    assert tracked.exact_from_here is exact


def test_a_settled_output_is_not_read_any_more() -> None:
    class Ended(Texts):
        def push(self, token_id: int) -> str:
            raise AssertionError

    tracked = Phases([Phase(EXACT, max_loose_tokens=3)], (), Ended(), 1)
    tracked.commit([0, 4, 4], 3)
    assert tracked.segments([0, 4, 4], [4, 4], None) == [RuleSegment(3, 0, Budget(3))]
