"""Grade-school word problems with worked solutions, generated from a seed. No I/O, no torch.

Solutions have two kinds of freedom. *Free* wording (how a line begins) has no consequences.
*Binding* choices also leave the target undecided, but the rest must be consistent with them: which
plan is used, whose amount is computed first, which number of a sum is written first. A draft that
starts with one choice and continues with another makes wrong sums where the target's entropy is
high.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flyspec_lab.word_problems import wording

LIMIT = 99  # maximum result
START = 50  # maximum number in a question, except for money


@dataclass(frozen=True, slots=True)
class WordProblem:
    """A question, its worked solution (ending in ``#### answer``) and the answer."""

    question: str
    solution: str
    answer: int


@dataclass(frozen=True, slots=True)
class _Draft:
    """A problem before assembly: question, solution lines without openers, and answer.

    ``opener`` is the plan sentence, if the family has one.
    """

    question: str
    sums: list[str]
    answer: int
    opener: str | None = None


class _TooLarge(Exception):
    """The drawn numbers lead to a result out of range; draw again."""


def _check(value: int) -> int:
    if not 1 <= value <= LIMIT:
        raise _TooLarge
    return value


def _add(rng: random.Random, a: int, b: int) -> tuple[str, int]:
    if rng.random() < 0.5:
        a, b = b, a
    return f"{a} + {b} = {a + b}", _check(a + b)


def _mul(rng: random.Random, a: int, b: int) -> tuple[str, int]:
    if rng.random() < 0.5:
        a, b = b, a
    return f"{a} * {b} = {a * b}", _check(a * b)


def _sub(a: int, b: int) -> tuple[str, int]:
    return f"{a} - {b} = {a - b}", _check(a - b)


def _plain(rng: random.Random, text: str) -> str:
    return rng.choice(wording.PLAIN_SUMS).format(sum=text)


def _person(rng: random.Random, name: str, things: str, text: str) -> str:
    return rng.choice(wording.PERSON_SUMS).format(name=name, things=things, sum=text)


def _total(rng: random.Random, numbers: Sequence[int]) -> tuple[list[str], int]:
    """Return sums that add up the numbers in random order, and the total."""
    left = list(numbers)
    rng.shuffle(left)
    running, sums = left[0], []
    for number in left[1:]:
        text, running = _add(rng, running, number)
        sums.append(_plain(rng, text))
    return sums, running


def _relation(rng: random.Random, name: str, other: str, base: int) -> tuple[str, str, int]:
    """Return a sentence relating a person's amount to another's, its sum, and the amount."""
    kind = rng.choice(["more", "more", "fewer", "times"])
    if kind == "times":
        factor = rng.randint(2, 4)
        text, value = _mul(rng, factor, base)
        return f"{name} has {factor} times as many as {other}.", text, value
    delta = rng.randint(2, 30)
    if kind == "more":
        text, value = _add(rng, base, delta)
        how = f"{delta} more than {other}"
    else:
        text, value = _sub(base, delta)
        how = f"{delta} fewer than {other}"
    return rng.choice([f"{name} has {how}.", f"What {name} has is {how}."]), text, value


def _people(rng: random.Random) -> _Draft:
    """Related amounts of people: two relative to one, or two pairs.

    A target of this size does not learn chains or larger groups in the available time.
    """
    names, things = rng.sample(wording.NAMES, 4), rng.choice(wording.THINGS)
    parents: list[int | None] = rng.choice([[None, 0, 0], [None, 0, 0], [None, 0, None, 2]])
    values: list[int] = []
    facts: list[str] = []
    sums: dict[int, str] = {}
    for i, parent in enumerate(parents):
        if parent is None:
            values.append(rng.randint(3, START))
            facts.append(
                rng.choice(
                    [
                        f"{names[i]} has {values[i]} {things}.",
                        f"There are {values[i]} {things} with {names[i]}.",
                    ]
                )
            )
        else:
            fact, text, value = _relation(rng, names[i], names[parent], values[parent])
            values.append(value)
            facts.append(fact)
            sums[i] = _person(rng, names[i], things, text)
    # The order is free.
    asked = list(sums)
    lines = [sums[i] for i in rng.sample(asked, len(asked))]
    people = [names[i] for i in asked]
    if values[asked[0]] != values[asked[1]] and rng.random() < 0.35:
        high, low = sorted(asked, key=lambda i: -values[i])
        text, answer = _sub(values[high], values[low])
        lines.append(_plain(rng, text))
        ask = f"How many more {things} does {names[high]} have than {names[low]}?"
    else:
        end, answer = _total(rng, [values[i] for i in asked])
        lines += end
        who = ", ".join(people[:-1]) + " and " + people[-1]
        ask = rng.choice(
            [f"How many {things} do {who} have together?", f"What is the total of {who}?"]
        )
    return _Draft(" ".join([*facts, ask]), lines, answer)


def _changes(rng: random.Random) -> _Draft:
    """An amount and two or three changes of one sign: applied one by one, or added up first."""
    count, name = rng.choice([2, 3, 3]), rng.choice(wording.NAMES)
    amounts = rng.sample(range(2, 31), count)
    spent = rng.random() < 0.6
    begin = rng.randint(20, LIMIT) if spent else rng.randint(5, START)
    if spent and rng.random() < 0.5:
        goods = rng.sample(wording.GOODS, count)
        parts = [f"a {good} for {cost} dollars" for good, cost in zip(goods, amounts, strict=True)]
        question = rng.choice(
            [
                f"{name} has {begin} dollars and buys {{}}. How many dollars are left?",
                f"With {begin} dollars in hand, {name} pays for {{}}. What is left over?",
            ]
        )
    else:
        things = rng.choice(wording.THINGS)
        others = rng.sample([n for n in wording.NAMES if n != name], count)
        verb, side = ("gives", "to") if spent else ("gets", "from")
        parts = [f"{n} {side} {other}" for other, n in zip(others, amounts, strict=True)]
        question = rng.choice(
            [
                f"{name} has {begin} {things} and {verb} {{}}. "
                f"How many {things} does {name} have now?",
                f"There are {begin} {things} in a bowl. {name} {verb} {{}}. "
                f"How many {things} are there then?",
            ]
        )
        if "bowl" in question:
            question = question.replace("gives", "hands").replace("gets", "adds")
    question = question.format(", ".join(parts[:-1]) + " and " + parts[-1])
    stepwise = rng.random() < 0.5
    lines: list[str] = []
    if stepwise:
        order, running = rng.sample(amounts, count), begin
        for amount in order:
            text, running = _sub(running, amount) if spent else _add(rng, running, amount)
            lines.append(_plain(rng, text))
    else:
        lines, change = _total(rng, amounts)
        text, running = _sub(begin, change) if spent else _add(rng, begin, change)
        lines.append(_plain(rng, text))
    plans = wording.PLAN_STEPWISE if stepwise else wording.PLAN_GATHERED
    return _Draft(question, lines, running, rng.choice(plans))


def _bus(rng: random.Random) -> _Draft:
    """People get on and off: counted stop by stop, or all ons and all offs added up first."""
    begin = rng.randint(10, START)
    vehicle = rng.choice(["bus", "train", "boat", "tram"])
    on, off = rng.sample(range(2, 20), 2), rng.sample(range(2, 10), 2)
    question = (
        f"A {vehicle} sets out with {begin} people. At the first stop {on[0]} get on and {off[0]} "
        f"get off. At the second stop {on[1]} get on and {off[1]} get off. "
        f"How many people are on the {vehicle} then?"
    )
    stepwise = rng.random() < 0.5
    lines: list[str] = []
    running = begin
    if stepwise:
        for up, down in zip(on, off, strict=True):
            changes = [up, -down]
            rng.shuffle(changes)
            for c in changes:
                text, running = _add(rng, running, c) if c > 0 else _sub(running, -c)
                lines.append(_plain(rng, text))
    else:
        up_text, up = _add(rng, *on)
        down_text, down = _add(rng, *off)
        both = [_plain(rng, up_text), _plain(rng, down_text)]
        rng.shuffle(both)
        text, running = _add(rng, begin, up)
        end, running = _sub(running, down)
        lines = [*both, _plain(rng, text), _plain(rng, end)]
    plans = wording.PLAN_STEPWISE if stepwise else wording.PLAN_GATHERED
    return _Draft(question, lines, running, rng.choice(plans))


def _kinds(rng: random.Random) -> _Draft:
    """Two kinds of boxes with different contents, in either order."""
    things, box = rng.choice(wording.THINGS), rng.choice(wording.BOXES)
    colours = rng.sample(wording.COLOURS, 2)
    counts, sizes = rng.sample(range(2, 10), 2), rng.sample(range(2, 10), 2)
    facts = [
        f"{n} {c} {box} with {s} {things} each"
        for n, c, s in zip(counts, colours, sizes, strict=True)
    ]
    question = f"In a shop there are {facts[0]} and {facts[1]}."
    lines, answer = _kind_by_kind(rng, counts, sizes, colours, things)
    if rng.random() < 0.5:
        gone = rng.randint(2, 30)
        text, answer = _sub(answer, gone)
        lines.append(_plain(rng, text))
        question += f" Then {gone} {things} are sold. How many {things} are left?"
    else:
        question += f" How many {things} are there in all?"
    return _Draft(question, lines, answer)


def _kind_by_kind(
    rng: random.Random, counts: list[int], sizes: list[int], colours: list[str], things: str
) -> tuple[list[str], int]:
    """Return sums of the contents of each kind, in any order, and of both, and the total."""
    lines, held = [], []
    for i in rng.sample([0, 1], 2):
        text, value = _mul(rng, counts[i], sizes[i])
        held.append(value)
        phrase = rng.choice(wording.KIND_SUMS)
        lines.append(phrase.format(colour=colours[i], things=things, sum=text))
    end, answer = _total(rng, held)
    return lines + end, answer


def _alike(rng: random.Random) -> _Draft:
    """Two kinds of boxes with equal contents: kind by kind, or with the boxes counted first."""
    things, box = rng.choice(wording.THINGS), rng.choice(wording.BOXES)
    colours, counts = rng.sample(wording.COLOURS, 2), rng.sample(range(2, 10), 2)
    if sum(counts) > 12:
        raise _TooLarge
    size = rng.randint(2, 9)
    name = rng.choice(wording.NAMES)
    question = (
        f"{name} has {counts[0]} {colours[0]} {box} and {counts[1]} {colours[1]} {box}. "
        f"Each holds {size} {things}. How many {things} does {name} have?"
    )
    if rng.random() < 0.5:
        lines, answer = _kind_by_kind(rng, counts, [size] * 2, colours, things)
        return _Draft(question, lines, answer, rng.choice(wording.PLAN_EACH_KIND))
    first, number = _add(rng, *counts)
    second, answer = _mul(rng, number, size)
    lines = [_plain(rng, first), _plain(rng, second)]
    return _Draft(question, lines, answer, rng.choice(wording.PLAN_COUNT_FIRST))


def _days(rng: random.Random) -> _Draft:
    """Amounts of several days, added in any order, then shared equally."""
    name, things = rng.choice(wording.NAMES), rng.choice(wording.THINGS)
    days = rng.sample(wording.DAYS, rng.choice([2, 3]))
    amounts = rng.sample(range(2, 41), len(days))
    verb = rng.choice(["collects", "finds", "buys", "makes"])
    facts = [f"{n} on {day}" for n, day in zip(amounts, days, strict=True)]
    listed = ", ".join(facts[:-1]) + " and " + facts[-1]
    question = f"{name} {verb} some {things}: {listed}."
    lines, total = _total(rng, amounts)
    shares = [g for g in range(2, 10) if total % g == 0 and total // g <= 12]
    if not shares:
        raise _TooLarge
    share = rng.choice(shares)
    lines.append(_plain(rng, f"{total} / {share} = {total // share}"))
    question += f" They are shared equally among {share} friends. How many does each friend get?"
    return _Draft(question, lines, total // share)


_FAMILIES: tuple[Callable[[random.Random], _Draft], ...] = (
    _people, _people, _changes, _changes, _bus, _kinds, _alike, _days,
)  # fmt: skip
# For training: more of the families in which it is hardest to see what belongs to whom.
_HARD = (*_FAMILIES, _people, _people, _people, _people, _people, _days)


def _assemble(rng: random.Random, draft: _Draft) -> WordProblem:
    lines = [draft.opener or rng.choice(wording.STARTS)]
    for i, text in enumerate(draft.sums):
        if i == len(draft.sums) - 1:
            text = f"{rng.choice(wording.ENDS)} {text}"
        elif i > 0 or draft.opener is None:
            text = f"{rng.choice(wording.MIDDLES)} {text}"
        else:
            text = text[0].upper() + text[1:]
        lines.append(text)
    return WordProblem(draft.question, "\n".join([*lines, f"#### {draft.answer}"]), draft.answer)


def stream(seed: int | str, *, hard: bool = False) -> Iterator[WordProblem]:
    """Yield problems forever; the same on any machine for the same seed.

    `hard`: more of the families that are hard to learn.
    """
    rng = random.Random(f"flyspec-problems-{seed}")
    while True:
        family = rng.choice(_HARD if hard else _FAMILIES)
        while True:  # keep the family, so that those with strict limits are not rarer
            try:
                draft = family(rng)
                break
            except _TooLarge:
                continue
        yield _assemble(rng, draft)
