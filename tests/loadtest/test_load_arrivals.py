"""Poisson arrivals are Poisson; prompts come in the requested proportions."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyspec.client import Chat
from flyspec.errors import ConfigError
from loadtest.control import Control
from loadtest.prompts import FRESH, VARIED, Source, prompt_mix
from loadtest.scenarios.overload import vary_length
from loadtest.work import Closed, LoadPhase, Open, Text, Variant
from tests.loadtest.load_data import PLAIN, VARIANT


def test_gaps_are_exponential_and_counts_have_the_variance_of_a_poisson_process():
    rate, seconds = 50.0, 400.0
    times = list(Open(rate).arrivals(seconds, random.Random(1)))
    assert len(times) == pytest.approx(rate * seconds, rel=0.03)
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / rate, rel=0.03)
    # Of an exponential the deviation is the mean, and a share 1/e is longer than it.
    assert statistics.stdev(gaps) == pytest.approx(1 / rate, rel=0.05)
    longer = sum(gap > 1 / rate for gap in gaps) / len(gaps)
    assert longer == pytest.approx(0.3679, abs=0.015)
    counts = Counter(int(t) for t in times)
    each = [counts[second] for second in range(int(seconds))]
    assert statistics.variance(each) / statistics.mean(each) == pytest.approx(1.0, abs=0.25)


@given(st.floats(0.01, 500), st.floats(0, 5), st.integers())
def test_arrivals_ascend_within_their_time_and_depend_on_the_seed_alone(rate, seconds, seed):
    times = list(Open(rate).arrivals(seconds, random.Random(seed)))
    assert times == sorted(times)
    assert all(0 <= t < seconds for t in times)
    assert times == list(Open(rate).arrivals(seconds, random.Random(seed)))


def test_nothing_comes_at_rate_zero():
    assert list(Open(0.0).arrivals(10.0, random.Random(0))) == []


# --- prompts ----------------------------------------------------------------------------------


def test_a_mix_draws_by_weight_and_takes_a_files_prompts_in_turn(tmp_path):
    code, questions = tmp_path / "code.jsonl", tmp_path / "questions.jsonl"
    code.write_text('{"prompt": "def f"}\n{"prompt": "def g"}\n')
    questions.write_text('{"question": "Q?", "answer": "#### 1"}\n')
    following = prompt_mix([Source(str(code), 3.0), Source(str(questions))], 0, None, 0)
    drawn = [following() for _ in range(2000)]
    asked = [p for p in drawn if isinstance(p, Chat)]
    continued = [p for p in drawn if isinstance(p, str)]
    assert len(asked) == pytest.approx(500, abs=80)
    assert set(pairwise(continued)) == {
        ("def f", "def g"), ("def g", "def f")
    }  # fmt: skip


def text_of(chat):
    return "".join(chat.texts)


def test_fresh_problems_are_different_and_the_same_for_a_seed():
    drawn = [prompt_mix([Source(FRESH)], 50, None, seed) for seed in (1, 1, 2)]
    first, again, others = ([text_of(following()) for _ in range(50)] for following in drawn)
    assert first == again
    assert len(set(first)) > 45
    assert not set(first) & set(others)


def test_varied_prompts_are_questions_code_and_long_chats():
    following = prompt_mix([Source(VARIED)], 60, None, 0)
    drawn = [following() for _ in range(60)]
    chats = [p.messages[0]["content"] for p in drawn if isinstance(p, Chat)]
    assert 0 < len(chats) < len(drawn)
    assert max(map(len, chats)) > 4 * min(map(len, chats))


def test_chat_says_how_prompts_are_asked(tmp_path):
    file = tmp_path / "lines.txt"
    file.write_text("one\n")
    assert prompt_mix([Source(str(file))], 0, None, 0)() == "one"
    assert prompt_mix([Source(str(file))], 0, True, 0)() == Chat.of_user("one")
    with pytest.raises(ConfigError, match="cannot be read"):
        prompt_mix([Source(str(tmp_path / "none"))], 0, None, 0)


def test_sources_are_files_with_weights(tmp_path):
    assert Source.parse("a.jsonl:2.5") == Source("a.jsonl", 2.5)
    assert Source.parse("a.jsonl") == Source("a.jsonl", 1.0)
    odd = tmp_path / "a:1"
    odd.write_text("x\n")
    assert Source.parse(str(odd)) == Source(str(odd), 1.0)
    with pytest.raises(ValueError, match="greater than 0"):
        Source.parse("a.jsonl:0")


# --- jobs -------------------------------------------------------------------------------------


def test_jobs_draw_variants_by_weight_and_clients_that_leave():
    control = Control(None, lambda: "prompt", 3)  # type: ignore[arg-type]
    variants = (VARIANT, Variant("rare", PLAIN.options, 0.25))
    control.open_phase(LoadPhase("p", Closed(1), 1.0, variants, cancelled=0.5, cancel_after_s=2.0))
    jobs = [control.next_job(planned=1.5) for _ in range(4000)]
    assert sum(j.variant == "rare" for j in jobs) == pytest.approx(800, abs=120)
    delays = [j.leave_after_s for j in jobs if j.leave_after_s is not None]
    assert len(delays) == pytest.approx(2000, abs=150)
    assert statistics.mean(delays) == pytest.approx(2.0, rel=0.15)
    assert {j.planned for j in jobs} == {1.5}


def test_a_variant_may_vary_its_options_and_fixed_texts_take_turns():
    control = Control(None, lambda: "prompt", 3)  # type: ignore[arg-type]
    mean = replace(VARIANT, options=replace(VARIANT.options, max_tokens=100), vary=vary_length)
    control.open_phase(LoadPhase("p", Closed(1), 1.0, (mean,)))
    lengths = {control.next_job().options.max_tokens for _ in range(500)}
    assert {min(lengths), max(lengths)} == {50, 150}
    texts = [Text(f"prompt {i}", PLAIN.options) for i in range(3)]
    control.open_phase(LoadPhase("p", Closed(1), 1.0, (VARIANT,), texts=texts))
    jobs = [control.next_job() for _ in range(6)]
    assert [job.text for job in jobs] == texts * 2
    assert not texts[0].differs([1, 2])
    assert not texts[0].differs([1, 2])
    assert texts[0].differs([1, 3])
