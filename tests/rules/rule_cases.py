"""Random cases for the rules, near enough to their boundaries to be worth comparing."""

import math
import random
from functools import cache

import numpy as np
import torch

from flyspec.engine.distributions import Distributions
from flyspec.engine.model import History
from flyspec.rules import Divergence, EntropyMeasure, Rule, WindowScope
from flyspec.rules.resolve import resolve_rule
from flyspec.values.rounds import Budget, OpenWindow, Outcome
from flyspec.values.tokens import SamplingParams
from tests.autojudges import random_judge
from tests.rules.restatement import restate
from tests.rules.rule_case import (
    Case,
    Open,
    Regression,
    drafted,
    own_tokens,
    perturbed,
    probabilities,
    processed,
    sampling,
    setting,
)
from verify_service.rules.inquiry import Round
from verify_service.rules.presets import compose


def draw_q(case, rng, gen, j):
    """A distribution over the vocabulary, mostly close to the target's."""
    row = case.rows[j - 1] if case.rule == "fuzzy-reference" else processed(case, j)
    if rng.random() < 0.5:
        row = np.where(np.isneginf(row), row.max() - 6.0, row)  # more support than the target
    scale = rng.choice([0.02, 0.1, 0.3, 0.5, 1.5])
    return probabilities(row + gen.normal(size=len(row)) * scale)


def draw_from_distributions(case, rng, gen, j):
    """A draft for the position j and its distribution, from which it is drawn."""
    q = draw_q(case, rng, gen, j)
    form = rng.random()
    if form < 0.15:  # as prompt lookup: a point mass
        wrong = rng.random() < 0.3
        token = rng.randrange(len(q)) if wrong else own_tokens(case, 0, j)[j - 1]
        case.q.append({token: 1.0})
        return token
    kept = np.argsort(-q)[: 5 if form < 0.5 else len(q)]
    listed = {int(t): float(q[t]) for t in kept if q[t] > 1e-6}
    total = sum(listed.values())
    case.q.append({t: x / total for t, x in listed.items()})
    return rng.choices([*listed], weights=[*listed.values()])[0]


def draw_distributions(case, rng, gen):
    """Set `draft`, and `q` to exactly the same numbers."""
    vocab, count = case.rows.shape[1], len(case.drafts)
    if not sampling(case):
        top_k = setting(case, "top_k")
        points = rng.random() < 0.05
        may_list = case.rule != "fuzzy-reference"  # compares whole distributions
        lists = points or (may_list and top_k > 0 and rng.random() < 0.5)
        kept = min(vocab, top_k if top_k else 1)
        case.q = []
        for j in range(1, count + 1):
            q = draw_q(case, rng, gen, j)
            tokens = np.argsort(-q)[:kept] if lists else np.arange(vocab)
            one = points or rng.random() < 0.05
            case.q.append({case.drafts[j - 1]: 1.0} if one else {int(t): q[t] for t in tokens})
    else:
        lists = rng.random() < 0.5
    if not count:
        return
    width = max(len(q) for q in case.q) if lists else vocab
    log_probs = np.full((count, width), -np.inf)
    ids = np.zeros((count, width), dtype=np.int64)
    for row, q in enumerate(case.q):
        tokens = [*q]
        ids[row] = tokens[0]  # padding repeats a token
        ids[row, : len(tokens)] = tokens
        columns = range(len(tokens)) if lists else tokens
        with np.errstate(divide="ignore"):
            log_probs[row, columns] = np.log([q[t] for t in tokens])
    rounded = torch.from_numpy(log_probs)
    rounded = rounded.half().float() if rng.random() < 0.5 else rounded.float()
    if sampling(case):
        rounded = rounded.log_softmax(dim=-1)
    case.draft = Distributions(rounded, torch.from_numpy(ids) if lists else None)
    case.q_whole = not lists
    exact = np.exp(rounded.double().numpy())
    for row, q in enumerate(case.q):
        if lists:
            case.q[row] = {t: float(exact[row, i]) for i, t in enumerate(q)}
        else:
            case.q[row] = {t: float(exact[row, t]) for t in range(vocab)}


MEASURES = {"normalized": EntropyMeasure.NORMALIZED, "top_k": EntropyMeasure.TOP_K}
DIVERGENCES = {"js": Divergence.JS, "kl": Divergence.KL, "tv": Divergence.TV}
SCOPES = {"within": WindowScope.WITHIN_ROUND, "across": WindowScope.ACROSS_ROUNDS}
FLY = ("fly", "fly-paper", "fly-reference")
NO_WINDOW = ("exact", "rejection", "fuzzy-reference", "ensemble", "cactus")
NEED_DRAFT = ("fuzzy", "fuzzy-reference", "kl", "ensemble")
LENGTHS = [0, 1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 12, 13, 14, 15, 16]
SHORT_LENGTHS = [0, 1, 2, 3, 4, 4, 6, 8, 10, 12, 14, 16, 16]  # so that windows outlast rounds


def draw_logits(rng, gen, rows, vocab):
    """Continuous, or small integers (ties); sometimes with -inf; from flat to peaked."""
    kind = rng.random()
    if kind < 0.3:
        logits = gen.integers(0, 4, size=(rows, vocab)).astype(np.float64)
    else:
        logits = gen.normal(size=(rows, vocab)) * rng.choice([0.5, 1.0, 2.0, 3.0])
    if rng.random() < 0.2:
        hidden = gen.random((rows, vocab)) < rng.choice([0.05, 0.3])
        hidden[np.arange(rows), gen.integers(0, vocab, size=rows)] = False
        logits[hidden] = -np.inf
    return logits


def draw_case(rule, scope, rng, gen, before=None):
    """One case and its verdict by definition; `before` is the round it may continue."""
    vocab = rng.randint(12, 40)
    easy = rule not in ("exact", "rejection") and rng.random() < 0.35
    length = rng.choice(SHORT_LENGTHS if scope == "across" and not easy else LENGTHS)
    values = draw_logits(rng, gen, length + 1, vocab)
    hot = rng.random() < {"rejection": 0.8, "cactus": 0.9, "ensemble": 0.6}.get(rule, 0.35)
    case = Case(rule, [], None, values, seed=rng.getrandbits(64), start=rng.randint(10, 5000))
    dtype = rng.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16])
    if hot:
        case.temperature = rng.choice([0.5, 0.7, 1.0, 1.5])
        case.top_k = rng.choice([0, 0, 0, 3, 8, 64])
        if rng.random() < 0.3:
            case.top_p = rng.choice([0.5, 0.9])
            values += gen.normal(size=values.shape) * 0.01  # no ties at the nucleus' edge
            dtype = torch.float64
    draw_parameters(case, rng, scope, length, easy)
    if rule in NEED_DRAFT and setting(case, "top_k"):
        values += gen.normal(size=values.shape) * 0.01  # nor at the edge of the target's top k
        dtype = torch.float64 if rng.random() < 0.5 else torch.float32
    adjust = rng.random() < 0.1
    if adjust:
        draw_adjustments(case, rng, vocab)
        dtype = torch.float64
    continue_from(case, rng, scope, before)
    set_logits(case, values, dtype)
    if hot and dtype != torch.float64 and any_close(case):
        set_logits(case, values, torch.float64)  # float32 could see another winner
    draw_drafts(case, rng, gen)
    if not easy:
        draw_guards(case, rng, vocab)
    if rule in NEED_DRAFT and case.drafts and not sampling(case):
        draw_distributions(case, rng, gen)
    if rule == "autojudge":
        draw_judge(case, rng, gen)
    if rule not in ("exact", "rejection") and case.drafts:
        draw_threshold(case, rng, easy)
    expected = restate(case)
    return draw_case(rule, scope, rng, gen, before) if expected.close else (case, expected)


def set_logits(case, values, dtype):
    case.logits = torch.tensor(values, dtype=torch.float64).to(dtype)
    case.rows = case.logits.double().numpy()
    case.tolerance = 1e-9 if dtype == torch.float64 else 1e-5


def any_close(case):
    """True if two tokens compete for a sample so closely that rounding decides."""
    streams = (0, 1) if case.rule == "fly-reference" else (0,)
    for stream in streams:
        for j in range(1, len(case.rows) + 1):
            top = np.sort(perturbed(case, j, stream))[-2:]
            if top[1] - top[0] < 1e-4:
                return True
    return False


def draw_parameters(case, rng, scope, length, easy):
    """Budgets, an exact beginning and a window; `easy` cases have no bounds and short windows."""
    if not easy:
        draw_bounds(case, rng)
    elif rng.random() < 0.2:
        case.loose_tokens = rng.choice([1, 1, 2])
    given = case.given
    if scope is not None:
        given["scope"] = scope
    if case.rule not in NO_WINDOW:
        kind = 0.0 if easy else rng.random()
        if kind < 0.82:
            given["window"] = rng.choice([0, 0, 0, 1, 1, 1, 2, 2, 3, 4])
        elif kind < 0.9:
            given["window"] = max(0, length + rng.choice([-1, 0, 1])) if length else 3
    if case.rule in FLY:
        if rng.random() < 0.2:
            given["measure"] = rng.choice(["normalized", "top_k"])
        if setting(case, "measure") == "top_k" and rng.random() < 0.3:
            given["k"] = rng.choice([2, 3, 5, 64])
    if case.rule in ("fuzzy", "kl"):
        given["kind"] = rng.choice(["js", "js", "kl", "tv"] if case.rule == "fuzzy" else ["kl"])
        given["top_k"] = rng.choice([0, 0, 2, 4, 8, 50])
    if case.rule == "kl" and rng.random() < 0.5:
        given["confidence"] = rng.choice([0.3, 0.5, 0.7, 0.95, 1.0])
    if case.rule == "relaxed":
        given["best"] = rng.choice([1, 2, 3, 5, 10, 10, 64])
        given["share"] = rng.choice([1.0, 0.9, 0.5, 0.2, 0.1])
    if case.rule == "fuzzy-reference":
        given["kind"] = rng.choice(["js", "js", "kl", "tv"])
        given["top_k"] = rng.choice([0, 0, 0, 2, 8])

    if case.rule == "random" and scope != "across":
        given["matches"] = rng.random() < 0.3


def draw_bounds(case, rng):
    if rng.random() < 0.1:
        case.loose_tokens = rng.choice([0, 1, 1, 1, 1, 2])
    if rng.random() < 0.1:
        case.loose_cost = rng.choice([0.0, 0.25, 0.5, 1.0, 2.0])
    if rng.random() < 0.1:
        case.exact_until = case.start + rng.randint(0, 6)


def draw_adjustments(case, rng, vocab):
    """Dyadic, so that float64 has no rounding and ties stay ties."""
    case.output = [rng.randrange(vocab) for _ in range(rng.randint(0, 8))]
    case.start = len(case.output) + 10
    case.presence = rng.choice([0.0, 0.5, -0.25])
    case.frequency = rng.choice([0.0, 0.25, 1.0])
    case.bias = {rng.randrange(vocab): rng.choice([-1.5, 0.75, 2.0]) for _ in range(2)}


def continue_from(case, rng, scope, before):
    """Give a round with windows across rounds an open window: the previous verdict's, or any."""
    if scope != "across":
        return
    opened = before[1].open if before else None
    if before and opened and not case.output:
        shift = case.exact_until - case.start
        case.start = before[1].keep_length + 1
        case.exact_until = case.start + shift if case.exact_until else 0
        case.open = opened
    elif rng.random() < 0.15:
        position = case.start - rng.randint(1, 9)
        case.open = Open(position, rng.randrange(12), rng.randint(1, 6), rng.uniform(0.0, 2.0))


def draw_drafts(case, rng, gen):
    """Nine in ten match. With penalties a row depends on the drafts before it."""
    sampled = sampling(case)
    two = case.rule == "fly-reference" and case.temperature > 0
    vocab = case.rows.shape[1]
    if not (case.presence or case.frequency or sampled):
        y = own_tokens(case, 0)
        second = own_tokens(case, 1) if two else y
    doubly = rng.random() < 0.03  # two mismatches at once
    for j in range(len(case.rows) - 1):
        if sampled:
            case.drafts.append(draw_from_distributions(case, rng, gen, j + 1))
            continue
        if case.presence or case.frequency:
            y = [*case.drafts, own_tokens(case, 0, j + 1)[j]]
            second = [*case.drafts, own_tokens(case, 1, j + 1)[j]] if two else y
        if rng.random() < 0.9 and not (doubly and j < 2):
            case.drafts.append(rng.choice([y[j], second[j]]))
            continue
        number = 2 if case.rule == "mars" and rng.random() < 0.8 else 4
        likely = np.argsort(-case.rows[j])[:number].tolist()
        others = likely if rng.random() < 0.92 else list(range(vocab))
        case.drafts.append(rng.choice([t for t in others if t != y[j]]))
    if sampled:
        draw_distributions(case, rng, gen)


def draw_judge(case, rng, gen):
    """A random judge, and hidden rows in the data type of some engine."""
    size = rng.choice([1, 3, 8, 33])
    judge = random_judge(size, rng.getrandbits(32), threshold=rng.choice([0.0, 0.3, 0.6, 0.9]))
    dtype = rng.choice([torch.float64, torch.float32, torch.bfloat16])
    case.hidden = torch.tensor(gen.normal(size=(len(case.rows), size))).to(dtype)
    case.hidden_rows = case.hidden.double().tolist()
    case.judge = judge
    case.regression = Regression(
        judge.weight.tolist(), float(judge.bias), judge.mean.tolist(), judge.scale.tolist(),
        judge.facts.threshold,
    )  # fmt: skip


def draw_guards(case, rng, vocab):
    ids = range(vocab)
    if rng.random() < 0.12:
        case.eos = frozenset(rng.sample(ids, rng.randint(1, 2)))
    if rng.random() < 0.12:
        case.control = frozenset(rng.sample(ids, rng.randint(1, 3)))
    if case.rule not in ("exact", "rejection") and rng.random() < 0.08:
        case.guarded = frozenset(rng.sample(ids, rng.randint(1, 3)))
    y = own_tokens(case, 0)
    wrong = [j for j, token in enumerate(case.drafts) if token != y[j]]
    if wrong and case.guarded:
        case.guarded |= {rng.choice([case.drafts[wrong[0]], y[wrong[0]]])}
    if wrong and rng.random() < 0.08:
        case.control = frozenset([rng.choice([case.drafts[wrong[0]], y[wrong[0]]])])
    if wrong and wrong[0] + 1 < len(case.drafts) and rng.random() < 0.1:
        case.eos = frozenset([case.drafts[wrong[0] + 1]])
    if setting(case, "scope") == "across" and rng.random() < 0.12:
        case.eos = frozenset([y[-1]])


def draw_threshold(case, rng, easy):
    """Mostly lenient; sometimes the very number at a mismatch; sometimes what gives `exact`."""
    y = own_tokens(case, 0)
    seconds = own_tokens(case, 1) if case.rule == "fly-reference" and case.temperature else y
    length = len(drafted(case))
    wrong = [j for j in range(length) if case.drafts[j] not in (y[j], seconds[j])]
    given = case.given
    lenient = {
        "fly": ("theta", lambda: rng.uniform(0.02, 0.3)),
        "fly-paper": ("theta", lambda: rng.uniform(0.02, 0.3)),
        "fly-reference": ("theta", lambda: rng.uniform(0.02, 0.3)),
        "margin": ("threshold", lambda: rng.uniform(1.0, 6.0)),
        "fuzzy": ("threshold", lambda: rng.uniform(0.15, 0.9)),
        "kl": ("threshold", lambda: rng.uniform(0.2, 1.2)),
        "ensemble": ("weight", lambda: rng.uniform(0.2, 0.8)),
        "cactus": ("spend", lambda: rng.uniform(0.1, 2.0)),
        "relaxed": ("below", lambda: rng.uniform(0.1, 0.8)),
        "mars": ("ratio", lambda: rng.uniform(0.05, 0.7)),
        "fuzzy-reference": ("threshold", lambda: rng.uniform(0.3, 2.0)),
        "typical": ("epsilon", lambda: rng.uniform(0.005, 0.15)),
        "random": ("threshold", lambda: rng.uniform(0.75, 1.0)),
        "autojudge": ("threshold", lambda: rng.uniform(0.5, 1.0)),
    }
    name, draw = lenient[case.rule]
    kind = 0.5 if easy else rng.random()
    if kind < 0.12:
        return  # the preset's own
    if kind < 0.17 and setting(case, "measure") == "normalized":
        given[name] = 1.0
    elif kind < 0.24:
        given[name] = rng.choice([0.0, 0.005, 0.01]) if case.rule in FLY else 0.0
    else:
        given[name] = draw()
        if case.rule == "typical":
            given["delta"] = rng.uniform(0.05, 0.8)
        if kind > (0.8 if case.rule in FLY else 0.85) and (wrong or case.rule == "fuzzy-reference"):
            at = wrong[0] if wrong else rng.randrange(length)
            if name not in ("weight", "spend"):
                set_equal(case, name, at)


def set_equal(case, name, index):
    """Make the threshold what the implementation measures at an index, to the last bit."""
    args = arguments(case)
    criterion = compose(resolve_rule(args["rule"]), case.judge).criterion
    if criterion.never or criterion.always:
        return
    round_ = Round(
        case.drafts, case.logits, args["sampling"], case.seed, case.start, args["history"],
        case.draft, None if case.hidden is None else case.hidden[1:],
    )  # fmt: skip
    at = round_.evidence(round_.processed(), index, index + 1)
    number, *others = criterion.measure(at)[0].tolist()
    if name == "below":  # exact if both are near
        number = others[0] - number if 2 * number >= others[0] else 0.0
    shares = name in ("epsilon", "below", "ratio") or case.rule == "autojudge"
    shares = shares or setting(case, "measure") == "normalized"
    most = 1.0 if shares else 20.0
    if not 0.0 < number < most or not math.isfinite(number):
        return
    case.given[name] = number
    case.equal_at = index + 1
    if name == "epsilon":
        case.given["delta"] = 100.0  # so that ε is the smaller one


def arguments(case):
    """The case as `judge` takes it."""
    given = case.given
    threshold = {
        "margin": "margin_threshold",
        "random": "random_acceptance",
        "autojudge": "judge_threshold",
    }
    parameters = {
        "fly_window_size": given.get("window"),
        "fly_entropy_threshold": given.get("theta"),
        "fly_entropy_top_k": given.get("k"),
        "entropy_measure": MEASURES.get(given.get("measure", "")),
        "window_scope": SCOPES.get(given.get("scope", "")),
        threshold.get(case.rule, "divergence_threshold"): given.get("threshold"),
        "divergence": DIVERGENCES.get(given.get("kind", "")),
        "divergence_top_k": given.get("top_k"),
        "random_judges_matches": given.get("matches"),
        "relaxed_top_k": given.get("best"),
        "relaxed_delta": given.get("below"),
        "relaxed_ratio": given.get("share"),
        "confidence_threshold": given.get("confidence"),
        "mars_ratio": given.get("ratio"),
        "ensemble_weight": given.get("weight"),
        "cactus_delta": given.get("spend"),
        "typical_epsilon": given.get("epsilon"),
        "typical_delta": given.get("delta"),
        "guarded_token_ids": tuple(sorted(case.guarded)),
    }
    bias = tuple(sorted(case.bias.items()))
    adjusts = bool(bias or case.presence or case.frequency)
    return {
        "rule": Rule(case.rule, **parameters),
        "draft_token_ids": case.drafts,
        "target_logits": case.logits,
        "sampling": SamplingParams(
            case.temperature,
            case.top_p,
            case.top_k,
            presence_penalty=case.presence,
            frequency_penalty=case.frequency,
            logit_bias=bias,
        ),
        "seed": case.seed,
        "start_position": case.start,
        "eos_token_ids": case.eos,
        "control_token_ids": case.control,
        "budget": Budget(case.loose_tokens, case.loose_cost),
        "exact_until_position": case.exact_until,
        "open_window": None if case.open is None else OpenWindow(*case.open),
        "draft_distributions": case.draft,
        "history": History([0] * 10 + case.output, 10) if adjusts else None,
        "hidden_rows": case.hidden,
        "autojudge": case.judge,
    }


def cases(rule, count, scope=None, seed=1):
    """The same cases for the same arguments; across rounds, most open windows are followed up."""
    rng, gen = random.Random(f"{rule}/{scope}/{seed}"), np.random.default_rng(seed)
    before = None
    for _ in range(count):
        before = draw_case(rule, scope, rng, gen, before)
        yield before


def differences(case, expected, got):
    found = []
    for what, value, wanted in (
        ("accepted", got.num_accepted, expected.num_accepted),
        ("next token", got.next_token_id, expected.next_token),
        ("keep_length", got.keep_length, expected.keep_length),
        ("failed", got.failed, expected.failed is not None),
        ("outcomes", [d.outcome.name for d in got.decisions], expected.outcomes),
    ):
        if value != wanted:
            found.append(f"{what}: {value}, not {wanted}")
    found += compare_windows("open window", got.open_window, expected.open)
    tolerance = 1e-9 if case.tolerance < 1e-6 else 1e-5
    for j, decision in enumerate(got.decisions, start=1):
        if decision.outcome is Outcome.NOT_REACHED:
            continue
        if decision.target_token_id != expected.targets.get(j):
            found.append(f"target at {j}: {decision.target_token_id}")
        found += compare(f"gap at {j}", decision.gap_nats, expected.gaps.get(j), 1e-9)
        entropy, measure = expected.entropies.get(j), expected.measures.get(j)
        found += compare(f"entropy at {j}", decision.entropy, entropy, tolerance)
        found += compare(f"measure at {j}", decision.measure, measure, tolerance)
    return found


def compare_windows(what, got, expected):
    if got is None or expected is None:
        return [] if got is expected else [f"{what}: {got}, not {expected}"]
    if got[:3] != expected[:3] or abs(got.gap_nats - expected.gap) > 1e-9:
        return [f"{what}: {got}, not {expected}"]
    return []


def compare(what, got, expected, tolerance):
    if (got is None) != (expected is None):
        return [f"{what}: {got}, not {expected}"]
    if got is None or expected is None or got == expected:
        return []
    if abs(got - expected) <= tolerance * max(1.0, abs(expected)):
        return []
    return [f"{what}: {got}, not {expected}"]


@cache
def first_cases(rule, count, scope):
    """Kept for the tests that judge them in other ways; the long forms generate theirs."""
    return list(cases(rule, count, scope))
