"""`flyspec bench pair`: its checkpoints, its replaying drafter, its bound; nothing about times."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from draft_service.drafters.model import ModelDrafter
from draft_service.proposal import SessionState, propose
from flyspec.cli.main import app
from flyspec.engine.loading import load_model
from flyspec.engine.loop import Ran
from flyspec.engine.model import Draw, Step
from flyspec.engine.runner import ModelRunner, Paging
from flyspec.errors import ConfigError, InvalidArgumentError
from flyspec.values.admin import ModelInfo
from flyspec.values.rounds import DistributionSpec, DraftAdvance, DraftChunk, DraftOpen
from flyspec.values.tokens import SamplingParams, TokenDistribution, TokenLogprobs
from flyspec_lab.bench.modes import Sample
from flyspec_lab.bench.options import WantedPadding
from flyspec_lab.bench.pair import pair_table, report
from flyspec_lab.bench.pair_checkpoints import pad_layers, write_random
from flyspec_lab.bench.pair_padding import choose_padding
from flyspec_lab.bench.replay import DraftErrors, ReplayModel, Said
from flyspec_lab.bench.shapes import SHAPES
from tests.tiny import VOCAB_SIZE, make_model

GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("target"), seed=3)


# --- checkpoints ----------------------------------------------------------------------------------


def logits_of(model: Path, dtype: str) -> torch.Tensor:
    loaded = load_model(str(model), "cpu", dtype)
    token_ids = (torch.arange(90) * 7 % loaded.info.vocab_size)[None]
    with torch.inference_mode():
        return loaded.model(token_ids).logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_layers_change_nothing(target: Path, tmp_path: Path, dtype: str) -> None:
    padded = pad_layers(target, tmp_path / "padded", 3)
    assert load_model(str(padded), "cpu", dtype).model.config.num_hidden_layers == 5
    assert torch.equal(logits_of(target, dtype), logits_of(padded, dtype))
    twice = pad_layers(padded, tmp_path / "twice", 1)  # of a checkpoint in pieces
    assert torch.equal(logits_of(target, dtype), logits_of(twice, dtype))


def test_what_is_no_directory_of_a_model_cannot_be_padded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a directory with a model, not to a name"):
        pad_layers(Path("org/model"), tmp_path / "padded", 1)


def test_random_weights_are_those_of_their_seed(target: Path, tmp_path: Path) -> None:
    shape = SHAPES["tiny"]
    first, again, other = (
        write_random(shape, tmp_path / str(i), target, seed) for i, seed in enumerate((1, 1, 2))
    )
    loaded = load_model(str(first), "cpu", "auto")
    assert loaded.info.vocab_size == shape.vocab_size > VOCAB_SIZE
    assert (
        loaded.tokenizer.fingerprint == load_model(str(target), "cpu", "auto").tokenizer.fingerprint
    )
    assert loaded.tokenizer.eos_token_ids == (1,)
    logits = logits_of(first, "float32")
    assert torch.equal(logits, logits_of(again, "float32"))
    assert not torch.equal(logits, logits_of(other, "float32"))
    # As unsure as a language model is: some positions are below fly's threshold, some above.
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1) / math.log(shape.vocab_size)
    assert entropy.min() < 0.3 < entropy.max()


def test_a_llama_of_1b_has_its_parameters() -> None:
    config = SHAPES["llama-1b"].config()
    attention = 2 * 2048 * 2048 + 2 * 2048 * 512
    layers = 16 * (attention + 3 * 2048 * 8192 + 2 * 2048)
    # https://huggingface.co/meta-llama/Llama-3.2-1B tells 1.24 billion.
    assert layers + 128_256 * 2048 + 2048 == 1_235_814_400
    assert config.tie_word_embeddings


# --- layers for a ratio ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "layers"), [(3.6, (0, 4)), (10.0, (0, 0)), (11.7, (5, 0)), (40.0, (90, 0))]
)
async def test_layers_for_a_ratio(ratio: float, layers: tuple[int, int]) -> None:
    async def measured(target_layers: int, draft_layers: int) -> float:
        return (10 + target_layers / 3) / (1 + 0.45 * draft_layers)

    chosen = await choose_padding(ratio, measured)
    assert (chosen.target_layers, chosen.draft_layers) == layers
    assert await measured(*layers) == pytest.approx(ratio, rel=0.05)
    with pytest.raises(ConfigError, match=r"than 1024 further layers: .*'s is 10, and 12\.7 with"):
        await choose_padding(400.0, measured)


# --- the replaying drafter ------------------------------------------------------------------------

VOCAB = 50
INFO = ModelInfo("replay", "", VOCAB, 120)


def says(prefix: Sequence[int]) -> int:
    """A target whose tokens depend on everything before."""
    return (3 * sum(prefix) + 7 * prefix[-1] + len(prefix)) % VOCAB


class Asked:
    """Returns the target's answer with its three likeliest tokens; records its requests."""

    def __init__(self) -> None:
        self.questions: list[tuple[tuple[int, ...], int]] = []

    def __call__(self, token_ids: Sequence[int], count: int) -> list[Said]:
        self.questions.append((tuple(token_ids), count))
        tokens = list(token_ids)
        found = []
        for _ in range(count):
            token = says(tokens)
            top = (token, (token + 1) % VOCAB, (token + 2) % VOCAB)
            logprobs = TokenLogprobs(-0.5, top, tuple(map(math.log, (0.6, 0.2, 0.1))))
            found.append(Said(token, logprobs))
            tokens.append(token)
        return found


def model_of(
    rate: float, seed: int = 0, asks_after_errors: bool = True
) -> tuple[ReplayModel, Asked]:
    ask = Asked()
    return ReplayModel(INFO, 2, DraftErrors(rate, seed), ask, (1,), asks_after_errors), ask


def drawn(model: ReplayModel, prompt: list[int], max_tokens: int, **fields) -> list[int]:
    step = Step(0, 0, prompt)
    (found,) = model.draw([Draw(step, GREEDY, max_tokens=max_tokens, **fields)])
    return list(found.token_ids)


def test_without_errors_it_drafts_what_the_target_says() -> None:
    model, ask = model_of(0.0)
    prompt = [5, 6, 7]
    tokens = drawn(model, prompt, 8)
    for i, token in enumerate(tokens):
        assert token == says([*prompt, *tokens[:i]])
    assert ask.questions == [((5, 6, 7), 8)]
    assert drawn(model, prompt, 8) == tokens
    assert len(ask.questions) == 1, "what was asked once is remembered"
    assert model.num_asked == 8


@given(rate=st.floats(0, 1), seed=st.integers(0, 2**63), prompt_length=st.integers(1, 40))
def test_errors_are_where_their_key_says_and_the_target_goes_on_from_them(
    rate: float, seed: int, prompt_length: int
) -> None:
    model, _ = model_of(rate, seed)
    errors = DraftErrors(rate, seed)
    prompt = list(range(2, prompt_length + 2))
    tokens = drawn(model, prompt, 20)
    assert len(tokens) == 20
    for i, token in enumerate(tokens):
        own = says([*prompt, *tokens[:i]])
        assert (token != own) == errors.at(prompt_length + i)
        assert token != 1 or own == 1, "an error ends no text"
    other = model_of(rate, seed)[0]
    assert drawn(other, prompt, 20) == tokens


def test_for_exact_rules_it_asks_nothing_after_an_error() -> None:
    prompt, text = [5, 6, 7], [5, 6, 7]
    model, ask = model_of(0.2, 4, asks_after_errors=False)
    while len(text) < 60:
        drafts = drawn(model, text, 16)
        assert len(drafts) == 16
        accepted = next((i for i, t in enumerate(drafts) if t != says([*text, *drafts[:i]])), 16)
        assert accepted == 16 or DraftErrors(0.2, 4).at(len(text) + accepted)
        text += [*drafts[:accepted], says([*text, *drafts[:accepted]])]
    assert all(list(asked) == text[: len(asked)] for asked, _ in ask.questions)
    known = model.num_asked
    drawn(model, prompt, 40)
    assert model.num_asked == known


def test_it_tells_what_it_would_have_drafted() -> None:
    model, _ = model_of(0.3, 2)
    text = [5, 6, 7]
    for _ in range(20):
        text.append(says(text))
    for num_rows in (2, 15):
        step = Step(0, 0, text[:-1], num_rows)
        (found,) = model.draw([Draw(step, GREEDY)])
        positions = range(len(text) - num_rows, len(text))
        drafted = [drawn(model, text[:position], 1)[0] for position in positions]
        assert list(found.token_ids) == drafted
        wrong = [token != text[p] for token, p in zip(drafted, positions, strict=True)]
        assert wrong == [DraftErrors(0.3, 2).at(position) for position in positions]


def test_errors_come_at_their_rate() -> None:
    errors = DraftErrors(0.2, 4)
    assert sum(map(errors.at, range(5000))) == pytest.approx(1000, rel=0.1)


def test_it_stops_where_the_draft_service_says() -> None:
    model, _ = model_of(0.0)
    tokens = drawn(model, [5, 6, 7], 8)
    assert drawn(model, [5, 6, 7], 8, stop_token_ids={tokens[2]}) == tokens[:3]


def test_distributions_have_the_draft_first() -> None:
    for rate in (0.0, 1.0):
        model, _ = model_of(rate)
        for spec in (DistributionSpec(top_k=4), DistributionSpec()):
            step = Step(0, 0, [5, 6, 7])
            (found,) = model.draw([Draw(step, GREEDY, distribution=spec, max_tokens=3)])
            assert len(found.distributions) == 3
            for token, (log_probs, token_ids) in zip(
                found.token_ids, found.distributions, strict=True
            ):
                values = np.frombuffer(log_probs, "<f2").astype(float)
                ids = list(token_ids) or list(range(VOCAB))
                assert len(values) == len(ids) == (spec.top_k or VOCAB)
                assert ids[values.argmax()] == token
                assert np.exp(values).max() == pytest.approx(0.6, abs=0.01)
    step = Step(0, 0, [5, 6, 7])
    certain = DistributionSpec(draw_from_it=True)
    (found,) = model.draw([Draw(step, GREEDY, distribution=certain)])
    assert found.distributions == [TokenDistribution()]


@pytest.mark.parametrize("paging", [None, Paging(16)], ids=["slots", "blocks"])
def test_a_pace_changes_no_drafts(target: Path, paging: Paging | None) -> None:
    pace = ModelRunner(load_model(str(target), "cpu", "float32", 120), 2, paging=paging)
    alone, _ = model_of(0.3)
    paced = ReplayModel(INFO, 2, DraftErrors(0.3), Asked(), (1,), pace=pace)
    assert paced.cache is pace.cache
    text = [5, 6, 7]
    for _ in range(4):
        drafts = drawn(alone, text, 6)
        assert drawn(paced, text, 6) == drafts
        assert paced.cache.held(0) == [*text, *drafts[:-1]]
        text += [*drafts[:3], 9]
    assert paced.bytes_per_token == pace.bytes_per_token > 0


def test_what_was_decoded_greedily_is_no_sample() -> None:
    model, _ = model_of(0.0)
    with pytest.raises(InvalidArgumentError, match="leave sampling out"):
        model.draw([Draw(Step(0, 0, [5]), SamplingParams(temperature=0.5))])
    with pytest.raises(InvalidArgumentError, match="no logits"):
        model.forward([Step(0, 0, [5])])


@given(data=st.data())
def test_a_session_replays_whatever_the_target_kept(data: st.DataObject) -> None:
    """Proposals by the draft service's own parts, after moves that keep, drop and append."""
    model, _ = model_of(0.3, 1)
    errors = DraftErrors(0.3, 1)
    tokens = [5, 6, 7]
    drafter = ModelDrafter(model, ())
    state = SessionState(lambda: drafter.open(DraftOpen(tuple(tokens), GREEDY, 0)))
    held = list(tokens)
    for round_id in range(4):
        keep = data.draw(st.integers(1, len(held)))
        more = data.draw(st.lists(st.integers(2, VOCAB - 1), max_size=3))
        tokens = [*held[:keep], *more]
        chunks: list[DraftChunk] = []
        work = propose(state, DraftAdvance(round_id, keep, more, 5), 4, 0, chunks.append)
        try:
            want = next(work)
            while True:
                (result,) = model.draw([want])
                want = work.send(Ran(result, 0, 0))
        except StopIteration:
            pass
        proposed = [token for chunk in chunks for token in chunk.token_ids]
        assert len(proposed) == 5
        for i, token in enumerate(proposed):
            own = says([*tokens, *proposed[:i]])
            assert (token != own) == errors.at(len(tokens) + i)
        held = [*tokens, *proposed]


# --- the report -----------------------------------------------------------------------------------


def test_the_bound_and_the_share_that_is_reached() -> None:
    tokens = [5] * 100
    plain = Sample("g", 0, 1, "plain", 10.0, 100, tokens, rounds=100, target_ns=5 * 10**9,
                   judge_ns=10**8, round_bytes=3000)  # fmt: skip
    fast = Sample("g", 0, 1, "exact", 2.5, 100, tokens, rounds=20, drafted=200, accepted=80,
                  target_ns=2 * 10**9, draft_ns=10**9, judge_ns=4 * 10**8,
                  round_bytes=5000)  # fmt: skip
    slow = replace(fast, repeat=2, seconds=7.5, token_ids=[6] * 100)
    uncounted = [replace(s, repeat=0, seconds=99.0) for s in (plain, fast)]
    reports = report([*uncounted, fast, plain, slow, replace(plain, repeat=2)])
    assert [r.mode for r in reports] == ["plain", "exact"]
    assert reports[0].speedup == reports[0].bound == 1.0
    assert reports[0].cost_ratio is None
    exact = reports[1]
    assert exact.tokens_per_round == 5
    assert exact.plain_step_ms == pytest.approx(50)
    assert exact.verify_step_ms == pytest.approx(100)
    assert exact.draft_step_ms == pytest.approx(5)
    assert exact.cost_ratio == pytest.approx(20)
    assert exact.bound == pytest.approx(2.5)
    assert exact.bound_in_turn == pytest.approx(5 * 50 / 150)
    assert exact.speedup == pytest.approx(2.0)  # the median of 2.5 and 7.5 s is 5 s
    assert exact.share == pytest.approx(0.8)
    assert exact.judge_ms == pytest.approx(20)
    assert exact.bytes_per_round == 250
    assert (exact.worst_prompt, exact.worst_speedup) == (0, pytest.approx(10 * (40 + 40 / 3) / 200))
    assert (exact.same, exact.same_as_plain, exact.generations) == (1, 1, 2)
    assert len(pair_table(reports, "a pair").rows) == 2


# --- the command ----------------------------------------------------------------------------------


def run(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["bench", "pair", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout)


SMALL = ("--problems", "2", "--repeats", "1", "--max-tokens", "24", "--json",
         "--num-speculative-tokens", "7", "--threads", "1")  # fmt: skip


def test_a_random_target_with_a_replaying_drafter(target: Path, tmp_path: Path) -> None:
    output = tmp_path / "pair.json"
    document = run(*SMALL, "--model", str(target), "--shape", "tiny", "--replay-drafter", "0.2",
                   "--pad-target-layers", "2", "--output", str(output))  # fmt: skip
    assert len(json.loads(output.read_text())["samples"]) == 16
    modes = {mode["mode"]: mode for mode in document["modes"]}
    assert list(modes) == ["plain", "exact", "fly", "fuzzy"]
    for mode in modes.values():
        assert mode["same"] == mode["generations"] == 2, "a run repeats"
    assert modes["exact"]["same_as_plain"] == 2
    assert 1 < modes["exact"]["tokens_per_round"] < 8
    assert modes["exact"]["loose_share"] == 0 == modes["exact"]["distribution_bytes_per_round"]
    assert modes["fuzzy"]["distribution_bytes_per_round"] > 0
    assert modes["fly"]["judge_ms"] > 0
    assert document["shape"]["vocab_size"] == 6000
    assert document["target"] == "random tiny, 2 extra layers in the target"


def test_drafts_that_take_the_time_of_a_model() -> None:
    # With the bundled pair's tokenizer; its judge is of another target.
    document = run(*SMALL, "--shape", "tiny", "--draft-shape", "tiny", "--replay-drafter", "0.2",
                   "--rules", "exact,fly")  # fmt: skip
    modes = {mode["mode"]: mode for mode in document["modes"]}
    assert document["target"] == "random tiny, drafts at the pace of a tiny"
    assert modes["exact"]["same_as_plain"] == 2
    assert 1 < modes["exact"]["tokens_per_round"] < 8
    for mode in modes.values():
        assert mode["worst_speedup"] <= mode["speedup"] * (1 + 1e-9)
        assert mode["worst_prompt"] in (0, 1)


def test_sampled_texts_are_those_of_plain_decoding() -> None:
    document = run(*SMALL, "--temperature", "1", "--rules", "exact,relaxed")
    modes = {mode["mode"]: mode for mode in document["modes"]}
    assert modes["exact"]["same_as_plain"] == 2
    for mode in modes.values():
        assert mode["same"] == mode["generations"] == 2


def test_others_are_timed_greedily() -> None:
    with pytest.raises(ConfigError, match="timed greedily; remove --temperature"):
        CliRunner().invoke(
            app, ["bench", "--peers", "greedy", "--temperature", "1"], catch_exceptions=False
        )


def test_pair_refuses_before_it_starts_anything(target: Path) -> None:
    with pytest.raises(ConfigError, match=r"--shape huge: must be one of llama-1b, .*tiny"):
        run("--model", str(target), "--shape", "huge")
    for layers in ("-1", "many", "auto:", "auto:0", "auto:inf", "x,auto:3", "auto:3,4"):
        with pytest.raises(ValueError, match=f"^{layers}: "):
            WantedPadding.read(layers)
    with pytest.raises(ConfigError, match=r"replays greedy texts; remove --temperature"):
        run("--model", str(target), "--replay-drafter", "0", "--temperature", "0.5")
    with pytest.raises(ConfigError, match=r"--draft-shape: .*; add --replay-drafter"):
        run("--model", str(target), "--shape", "tiny", "--draft-shape", "tiny")
    with pytest.raises(ConfigError, match="needs a draft model"):
        run("--model", str(target), "--draft-model", str(target), "--replay-drafter", "0",
            "--pad-target-layers", "auto:3.6")  # fmt: skip
    with pytest.raises(ConfigError, match="needs a draft model"):
        run("--model", str(target), "--pad-target-layers", "auto:3.6")
