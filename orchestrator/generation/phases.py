"""Which rule judges which position: phases of the output, and what is exact inside any of them.

It is a pure function of the output before the position (`PhaseWalk`, token by token). `Phases`
applies it to a generation: it keeps the walk up to the last final token, which nothing takes back,
and walks on from there through held tokens and a proposal, as if all of it were accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from typing import Protocol

from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.phases import JSON, TOOL_CALL, Phase
from flyspec.values.rounds import Budget, OpenWindow, RuleSegment
from flyspec.values.tokens import Origin
from orchestrator.generation.window import Token

TOOL_CALL_TAGS = "<tool_call>", "</tool_call>"
"""Around a function call, as chat templates of the Hermes and Qwen models have it."""
JSON_FENCE, FENCE = "```json\n", "```"
"""Around a JSON value in Markdown."""


class OutputTexts(Protocol):
    """A detokenizer: `push` returns the text that a token completes, possibly none."""

    def push(self, token_id: int) -> str: ...

    def copy(self) -> OutputTexts: ...


class PhaseWalk:
    """The phase of the next token, after some output.

    `rule_index` is the phase's, or the number of phases where `exact_inside` applies. `texts` is a
    new detokenizer.
    """

    def __init__(
        self, phases: Sequence[Phase], exact_inside: Collection[str], texts: OutputTexts
    ) -> None:
        self._phases = phases
        self._texts = texts
        self._regions = [_REGIONS[name]() for name in sorted(exact_inside)]
        self.phase = 0
        self._tail = ""  # of the phase's text, as much as a text that ends it may have begun with

    @property
    def rule_index(self) -> int:
        inside = any(region.inside for region in self._regions)
        return len(self._phases) if inside else self.phase

    @property
    def settled(self) -> bool:
        """Whether no more output can change the rule."""
        return not self._regions and self.phase == len(self._phases) - 1

    def push(self, token_id: int) -> None:
        """Add the next token of the output."""
        if self.settled:
            return
        text = self._texts.push(token_id)
        for region in self._regions:
            region.push(text)
        phase = self._phases[self.phase]
        if not phase.ends:
            return
        known = self._tail + text
        if token_id in phase.until_token_ids or any(end in known for end in phase.until):
            self.phase, self._tail = self.phase + 1, ""
            for region in self._regions:
                region.phase_begins()
        else:
            kept = max((len(end) for end in phase.until), default=0) - 1
            self._tail = known[-kept:] if kept > 0 else ""

    def copy(self) -> PhaseWalk:
        """Return an independent walk in the same state."""
        other = copy(self)
        other._texts, other._regions = self._texts.copy(), [*map(copy, self._regions)]
        return other


class ToolCalls:
    """A region whose `inside` is judged exactly: function calls, between their tags.

    A region goes from its beginning up to the token that completes it.
    """

    def __init__(self) -> None:
        self.inside = False
        self._tail = ""

    def push(self, text: str) -> None:
        known = self._tail + text
        while True:
            _, tag, rest = known.partition(TOOL_CALL_TAGS[self.inside])
            if not tag:
                break
            known, self.inside = rest, not self.inside
        self._tail = known[1 - len(TOOL_CALL_TAGS[self.inside]) :]

    def phase_begins(self) -> None:
        """Change nothing: a call may begin in one phase and end in the next."""


class JsonValues:
    """JSON objects and arrays that begin the output or a phase, and Markdown fences marked json.

    A value's bracket may follow white space; the value ends with the bracket that closes it. A
    fence ends with the next three backticks. Brackets are counted outside of strings; what is no
    valid JSON goes on until they are closed.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._fenced = self._in_string = self._escaped = False
        self._begins = True  # only white space since the output or the phase began
        self._tail = ""

    @property
    def inside(self) -> bool:
        return self._fenced or self._depth > 0

    def push(self, text: str) -> None:
        for character in text:
            self._push(character)

    def _push(self, character: str) -> None:
        if self._depth:
            self._in_value(character)
        elif self._begins and character in "{[":
            self._depth, self._begins, self._tail = 1, False, ""
        else:
            self._begins = self._begins and character.isspace()
            mark = FENCE if self._fenced else JSON_FENCE
            self._tail = (self._tail + character)[-len(mark) :]
            if self._tail == mark:
                self._fenced, self._tail = not self._fenced, ""

    def _in_value(self, character: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1

    def phase_begins(self) -> None:
        """Let a value begin here, unless the text ends inside one."""
        self._begins = not self.inside


_REGIONS: dict[str, type[ToolCalls | JsonValues]] = {TOOL_CALL: ToolCalls, JSON: JsonValues}


class Phases:
    """A generation's phases; positions are absolute, from `prompt_length` on.

    The caller commits tokens as they become final, and then spends the loose ones of them.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        exact_inside: Collection[str],
        texts: OutputTexts,
        prompt_length: int,
    ) -> None:
        self._phases = phases
        self._final = PhaseWalk(phases, exact_inside, texts)
        self._length = self._num_spent = prompt_length  # final tokens; those of them spent
        self._starts = [(prompt_length, self._final.rule_index)]
        self._spent: dict[int, tuple[int, float]] = {}  # loose tokens and their cost

    def commit(self, tokens: Sequence[int], length: int) -> None:
        """Add what became final since the last call: up to `length` tokens of a sequence are."""
        for token_id in tokens[self._length : length]:
            self._final.push(token_id)
            self._length += 1
            self._note(self._starts, self._length, self._final.rule_index)

    def spend(self, final: Sequence[Token]) -> None:
        """Count the loose ones of the next final tokens against the budgets of their phases."""
        for position, token in enumerate(final, self._num_spent):
            if token.origin is Origin.LOOSE:
                index = self.rule_index_at(position)
                count, cost = self._spent.get(index, (0, 0.0))
                self._spent[index] = count + 1, cost + (token.gap_nats or 0.0)
        self._num_spent += len(final)

    def budget(self, index: int, window: OpenWindow | None) -> Budget:
        """Return what is left of a phase's own budget, minus the token of an open window in it.

        There is no limit for an index behind the phases.
        """
        if index >= len(self._phases) or not (phase := self._phases[index]).has_budget:
            return Budget()
        spent = self._spent.get(index, (0, 0.0))
        left = Budget(phase.max_loose_tokens, phase.max_loose_cost_nats).less(*spent)
        inside = window is not None and self.rule_index_at(window.position) == index
        return left.less(1, window.gap_nats) if window is not None and inside else left

    def rule_index_at(self, position: int) -> int:
        """Return the index of the rule that judges a position up to the first one not final."""
        return next(index for start, index in reversed(self._starts) if start <= position)

    @property
    def exact_from_here(self) -> bool:
        """Whether all that follows what is final is judged exactly."""
        rest = self._phases[self._final.phase :]
        return all(RULE_PRESETS[p.rule.name].token_exact for p in rest if p.rule is not None)

    def segments(
        self, tokens: Sequence[int], draft_token_ids: Sequence[int], window: OpenWindow | None
    ) -> list[RuleSegment]:
        """Return which rule judges which of the drafts behind a sequence, `tokens`."""
        starts = [(len(tokens), self._final.rule_index)]
        if not self._final.settled:
            walk = self._final.copy()
            for token_id in tokens[self._length :]:
                walk.push(token_id)
            starts = [(len(tokens), walk.rule_index)]
            for position, token_id in enumerate(draft_token_ids[:-1], len(tokens) + 1):
                walk.push(token_id)
                self._note(starts, position, walk.rule_index)
        return [RuleSegment(at, index, self.budget(index, window)) for at, index in starts]

    @staticmethod
    def _note(starts: list[tuple[int, int]], position: int, rule_index: int) -> None:
        if rule_index != starts[-1][1]:
            starts.append((position, rule_index))
