"""A reimplementation of the rules: slow, obvious, from the definitions, without shared code.

Each verdict looks ahead as far as it likes.
"""

import math

import numpy as np

from tests.rules.rule_case import (
    Expected,
    Open,
    buckets,
    divergence,
    drafted,
    entropy,
    first_argmax,
    gumbel,
    own_tokens,
    probabilities,
    processed,
    sampling,
    setting,
    uniforms,
)

Segment = tuple[int, int, int | None, float | None]


def looked(case, j, token):
    """(value, margin by which it passes, whether 0 is enough) at j; None: nothing ever passes."""
    p = probabilities(processed(case, j))
    if case.rule in ("fly", "fly-paper", "fly-reference"):
        theta, measure = setting(case, "theta"), setting(case, "measure")
        if measure == "normalized" and theta >= 1:
            return None
        seen = probabilities(case.rows[j - 1]) if case.rule == "fly-reference" else p
        h = entropy(seen, measure, setting(case, "k"))
        return h, h - theta, True
    if case.rule == "typical":
        x = float(p[token])
        bound = min(setting(case, "epsilon"), setting(case, "delta") * math.exp(-entropy(p)))
        return x, x - bound, False
    if case.rule == "cactus":
        return None  # greedy: p is a single token, and nothing can be raised
    if case.rule == "ensemble":
        if setting(case, "weight") == 1:
            return None
        q = np.array([case.q[j - 1].get(t, 0.0) for t in range(len(p))])
        v = setting(case, "weight") * p + (1 - setting(case, "weight")) * q
        behind = float(v.max() - v[token])
        return behind, -behind if q[token] < 1 else -1.0, True
    if case.rule == "relaxed":
        x, top = float(p[token]), float(p.max())
        slack = max(x - (top - setting(case, "below")), x - setting(case, "share") * top)
        row = processed(case, j)
        rank = 1 + sum(1 for other in row if other > row[token])
        return x, slack if rank <= setting(case, "best") else -1.0, True
    if case.rule == "mars":
        if setting(case, "ratio") >= 1:
            return None
        row = case.rows[j - 1]
        if row.max() <= 0:
            return 0.0, -1.0, False
        share = float(row[token] / row.max())
        runner_up = np.sort(row)[-2]
        return share, share - setting(case, "ratio") if row[token] >= runner_up else -1.0, False
    threshold = setting(case, "threshold")
    if case.rule == "autojudge":
        assert case.regression is not None
        w, b, mean, scale, own = case.regression
        threshold = own if threshold is None else threshold
        if threshold == 0:
            return None
        row = case.hidden_rows[j]
        z = b + sum(w[i] * (row[i] - mean[i]) / scale[i] for i in range(len(w)))
        important = 1 / (1 + math.exp(-z))
        return important, threshold - important, True
    if case.rule == "fuzzy-reference":
        raw = probabilities(case.rows[j - 1])
        both = buckets(raw, case.q[j - 1], case.q_whole, setting(case, "top_k"))
        d = max(0.0, divergence(f"reversed {setting(case, 'kind')}", *both))
        return d, threshold - d, True
    if threshold == 0 and not setting(case, "matches"):
        return None
    if case.rule == "margin":
        row = processed(case, j)
        gap = float(row.max() - row[token])
        return gap, threshold - gap, False
    if case.rule == "kl":
        both = buckets(p, case.q[j - 1], case.q_whole, setting(case, "top_k"))
        d = max(0.0, divergence(setting(case, "kind"), *both))
        return d, min(threshold - d, setting(case, "confidence") - float(p.max())), False
    if case.rule == "fuzzy":
        both = buckets(p, case.q[j - 1], case.q_whole, setting(case, "top_k"))
        d = max(0.0, divergence(setting(case, "kind"), *both))
        return d, threshold - d, False
    assert case.rule == "random"
    u = float(uniforms(case.seed, case.start + j - 1, 3, 1)[0])
    return u, threshold - u, False


class Judgement:
    """The definitions applied to one case, position by position."""

    def __init__(self, case):
        self.case, self.x = case, drafted(case)
        self.length = len(self.x)
        self.result = Expected()
        self.tokens_left = math.inf if case.loose_tokens is None else case.loose_tokens
        self.cost_left = math.inf if case.loose_cost is None else case.loose_cost
        self.y = own_tokens(case, 0, self.length + 1)
        two = case.rule == "fly-reference" and case.temperature > 0
        self.second = own_tokens(case, 1, self.length + 1) if two else self.y
        self.window = setting(case, "window")
        self.across = setting(case, "scope") == "across"

    def exactly(self, j):
        early = self.case.start + j - 1 < self.case.exact_until
        return early or self.tokens_left <= 0 or self.cost_left <= 0

    def matches(self, j):
        return self.x[j - 1] in (self.y[j - 1], self.second[j - 1])

    def criterion(self, j):
        """Measure, record the value, compare."""
        case, result = self.case, self.result
        found = looked(case, j, self.x[j - 1])
        if found is None:
            return False
        number, slack, enough = found
        told = result.entropies if case.rule.startswith("fly") else result.measures
        told[j] = number
        if slack == 0 or (j == case.equal_at and abs(slack) <= case.tolerance):
            return enough
        if abs(slack) < (1e-6 if case.tolerance < 1e-6 else 1e-3):
            result.close = True
        return slack > 0

    def pay(self, gap):
        self.tokens_left -= 1
        self.cost_left -= gap

    def next_mismatch(self, j):
        return next((i for i in range(j + 1, self.length + 1) if not self.matches(i)), None)

    def window_lets(self, j):
        """Within a round, before anything is measured."""
        if self.across:
            return True
        if self.case.rule == "fly-reference":
            following, reach = max(0, self.window - 1), self.window
        else:
            following = reach = self.window
        after = range(j + 1, j + following + 1)
        return j + reach <= self.length and all(self.matches(i) for i in after)

    def lets(self, j):
        """True if the mismatch at j passes everything but a window across rounds."""
        case, token, y = self.case, self.x[j - 1], self.y[j - 1]
        gap = self.result.gaps[j] = float(case.rows[j - 1].max() - case.rows[j - 1][token])
        accept = case.rule not in ("exact", "rejection") and not self.exactly(j)
        special = case.eos | case.control | case.guarded
        if token in special or y in special or np.isneginf(processed(case, j)[token]):
            accept = False
        if not accept or gap > self.cost_left or not self.window_lets(j):
            return False
        if case.rule == "fly-reference" and setting(case, "theta") <= 0.01:
            return True
        return self.criterion(j)

    def ends(self):
        """True if accepting all drafts ends the sequence."""
        last = self.length > 0 and self.x[-1] in self.case.eos
        return last or self.y[self.length] in self.case.eos or self.length == 0

    def mark(self, outcome, j, target):
        self.result.outcomes.append(outcome)
        self.result.targets[j] = target

    def stop(self, accepted, next_token):
        result = self.result
        result.num_accepted, result.next_token = accepted, next_token
        result.keep_length = self.case.start + accepted
        missing = len(self.case.drafts) - len(result.outcomes)
        result.outcomes += ["NOT_REACHED"] * missing
        return result

    def fail_what_came_open(self):
        window = self.case.open
        assert window is not None
        result = self.stop(0, window.target)
        result.keep_length, result.failed = window.position, window
        return result

    def came_open(self):
        """The window that came with the round; None if it closed."""
        window = self.case.open
        assert window is not None
        if self.length == 0:
            return self.fail_what_came_open()
        m = self.next_mismatch(0)
        if m is not None and m <= window.remaining:
            for j in range(1, m):
                self.mark("EXACT", j, self.x[j - 1])
            self.mark("REJECTED", m, self.y[m - 1])
            token, row = self.x[m - 1], self.case.rows[m - 1]
            self.result.gaps[m] = float(row.max() - row[token])
            return self.fail_what_came_open()
        if window.remaining <= self.length:
            return None
        for j in range(1, self.length + 1):
            self.mark("EXACT", j, self.x[j - 1])
        if self.ends():
            return self.fail_what_came_open()
        self.result.open = window._replace(remaining=window.remaining - self.length)
        return self.stop(self.length, self.y[self.length])

    def across_rounds(self, j):
        """Decide on a mismatch at j that passed everything else, looking ahead in the round."""
        m = self.next_mismatch(j)
        if m is not None and m <= j + self.window:
            return "REJECTED"
        if j + self.window <= self.length:
            return "LOOSE"
        return "REJECTED" if self.ends() else "PROVISIONAL"

    def walk(self):
        case = self.case
        if case.open is not None:
            ended = self.came_open()
            if ended is not None:
                return ended
        for j in range(1, self.length + 1):
            token, y = self.x[j - 1], self.y[j - 1]
            exactly = self.exactly(j)
            if token == y or (self.matches(j) and not exactly):
                if setting(case, "matches") and not exactly and not self.criterion(j):
                    self.mark("REJECTED", j, token)
                    return self.stop(j - 1, token)
                self.mark("EXACT", j, token)
                continue
            outcome = "LOOSE" if self.lets(j) else "REJECTED"
            if outcome == "LOOSE" and self.across:
                outcome = self.across_rounds(j)
            self.mark(outcome, j, y)
            if outcome == "REJECTED":
                return self.stop(j - 1, y)
            gap = self.result.gaps[j]
            self.pay(gap)
            if outcome == "PROVISIONAL":
                remaining = self.window - (self.length - j)
                self.result.open = Open(case.start + j - 1, y, remaining, gap)
                for i in range(j + 1, self.length + 1):
                    self.mark("EXACT", i, self.x[i - 1])
                break
        return self.stop(self.length, self.y[self.length])

    def may_loosen(self, j):
        """True if guards and budgets leave a draft that p / q rejects to the loosened ratio."""
        case, token, y = self.case, self.x[j - 1], self.y[j - 1]
        if case.rule == "rejection" or self.tokens_left <= 0 or self.cost_left <= 0:
            return False
        special = case.eos | case.control | case.guarded
        if token in special or y in special or np.isneginf(processed(case, j)[token]):
            return False
        return self.result.gaps[j] <= self.cost_left

    def loosened(self, p, q, token):
        """The distribution that takes the place of p for this draft."""
        if self.case.rule == "ensemble":
            w = setting(self.case, "weight") if q[token] < 1 else 1.0
            return w * p + (1 - w) * np.array([q.get(t, 0.0) for t in range(len(p))])
        n = float(p[token])
        raised = min(1.0, n + math.sqrt(2 * setting(self.case, "spend") * n * (1 - n)))
        h = p * ((1 - raised) / (1 - n)) if n < 1 else p.copy()
        h[token] = raised
        return h

    def sample(self):
        """Speculative sampling: ratios, and residuals where they are missed."""
        for j in range(1, self.length + 1):
            rejected = self.sample_at(j)
            if rejected is not None:
                return self.stop(j - 1, rejected)
        return self.stop(self.length, self.y[self.length])

    def sample_at(self, j):
        """Judge the draft at j by p / q; the token that replaces it if it is rejected."""
        case, close = self.case, (1e-6 if self.case.tolerance < 1e-6 else 1e-3)
        token, position = self.x[j - 1], case.start + j - 1
        gap = float(case.rows[j - 1].max() - case.rows[j - 1][token])
        correction = self.y[j - 1]
        if position < case.exact_until:
            if token == correction:
                self.mark("EXACT", j, token)
                return None
        else:
            p, q = probabilities(processed(case, j)), case.q[j - 1]
            self.result.gaps[j] = gap
            may = self.may_loosen(j)
            u = float(uniforms(case.seed, position, 3, 1)[0])
            ratio = float(p[token]) / q[token]
            self.result.close |= abs(u - ratio) < close
            self.result.measures[j] = ratio
            if u < ratio:
                del self.result.gaps[j]
                self.mark("EXACT", j, token)
                return None
            target = p
            if may:
                target = self.loosened(p, q, token)
                ratio = float(target[token]) / q[token]
                self.result.close |= abs(u - ratio) < close
                self.result.measures[j] = ratio
                if u < ratio:
                    self.pay(gap)
                    self.mark("LOOSE", j, correction)
                    return None
            left = target - np.array([q.get(t, 0.0) for t in range(len(p))])
            if left.max() <= 0:
                left = target
            with np.errstate(divide="ignore"):
                weights = np.log(np.maximum(left, 0.0))
            weights += gumbel(case.seed, position, 4, len(p))
            correction = first_argmax(weights)
            best, other = np.sort(weights)[::-1][:2]
            self.result.close |= best - other < 100 * close or left.max() < 0.01
        self.result.gaps[j] = gap
        self.mark("REJECTED", j, correction)
        return correction


class SegmentedJudgement(Judgement):
    """Several rules, each for its segments of the round; `cases` differ only in the rule's side.

    `segments` are (start position, index of the case, loose tokens, loose cost) in order. Each
    position is judged as by its own rule; a window looks on into the next segment, where only
    matches count.
    """

    def __init__(self, cases, segments):
        super().__init__(cases[0])
        self.segments = segments
        self.of = [Judgement(case) for case in cases]
        self.own = {}
        for _, index, tokens, cost in segments:
            bounds = (math.inf if b is None else b for b in (tokens, cost))
            self.own.setdefault(index, tuple(bounds))
        for judgement in self.of:
            judgement.result = self.result
            judgement.matches = self.matches

    def index_at(self, j):
        position = self.case.start + j - 1
        return [index for start, index, *_ in self.segments if start <= position][-1]

    def at(self, j):
        """The rule's judgement at j, with what is left of both budgets."""
        judgement, (tokens, cost) = self.of[self.index_at(j)], self.own[self.index_at(j)]
        judgement.tokens_left = min(tokens, self.tokens_left)
        judgement.cost_left = min(cost, self.cost_left)
        return judgement

    def matches(self, j):
        judgement = self.of[self.index_at(j)]
        return self.x[j - 1] in (judgement.y[j - 1], judgement.second[j - 1])

    def walk(self):
        if self.case.open is not None:
            ended = self.came_open()
            if ended is not None:
                return ended
        j = 1
        while j <= self.length:
            judgement = self.at(j)
            outcome, token = self.decide(judgement, j)
            if outcome == "REJECTED":
                return self.stop(j - 1, token)
            if outcome in ("LOOSE", "PROVISIONAL"):
                gap, index = self.result.gaps[j], self.index_at(j)
                tokens, cost = self.own[index]
                self.own[index] = tokens - 1, cost - gap
                self.tokens_left -= 1
                self.cost_left -= gap
            if outcome == "PROVISIONAL":
                remaining = judgement.window - (self.length - j)
                self.result.open = Open(self.case.start + j - 1, token, remaining, gap)
                for i in range(j + 1, self.length + 1):
                    self.mark("EXACT", i, self.x[i - 1])
                break
            j += 1
        return self.stop(self.length, self.y[self.length])

    def decide(self, judgement, j):
        """The outcome at j and, of a mismatch, the target's token or what replaces it."""
        x, y = self.x[j - 1], self.y[j - 1]
        if sampling(judgement.case):
            rejected = judgement.sample_at(j)
            outcome = self.result.outcomes[-1]
            return outcome, y if rejected is None else rejected
        exactly = judgement.exactly(j)
        if x == y or (self.matches(j) and not exactly):
            rejects = setting(judgement.case, "matches") and not exactly
            outcome = "REJECTED" if rejects and not judgement.criterion(j) else "EXACT"
            self.mark(outcome, j, x)
            return outcome, x
        outcome = "LOOSE" if judgement.lets(j) else "REJECTED"
        if outcome == "LOOSE" and judgement.across:
            outcome = judgement.across_rounds(j)
        self.mark(outcome, j, y)
        return outcome, y


def restate_segments(cases, segments):
    """The verdict by definition where several rules judge one round."""
    return SegmentedJudgement(cases, segments).walk()


def restate(case):
    """The verdict by definition."""
    judgement = Judgement(case)
    return judgement.sample() if sampling(case) else judgement.walk()
