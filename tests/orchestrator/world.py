"""A target, a drafter and a rule as keyed functions of the prefix: random but reproducible."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from flyspec.values.rounds import Decision, OpenWindow, Outcome, Verdict, VerifyRound
from flyspec.values.tokens import TokenLogprobs

EOS = 1


@dataclass(frozen=True)
class World:
    """The target's, drafter's and rule's answers for a prefix: random but reproducible."""

    seed: int = 0
    alphabet: tuple[int, ...] = (3, 4, 5, 6)
    agreement: float = 0.7
    tolerance: float = 0.6
    eos_share: float = 0.02

    def _draw(self, name: str, tokens) -> float:
        data = repr((self.seed, name, list(tokens))).encode()
        return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest()) / (1 << 48)

    def _token(self, name: str, prefix) -> int:
        u = self._draw(name, prefix)
        if u < self.eos_share:
            return EOS
        return self.alphabet[int(self._draw(name + "'", prefix) * len(self.alphabet))]

    def own(self, prefix) -> int:
        """The target's own token."""
        return self._token("own", prefix)

    def guess(self, prefix) -> int:
        """The drafter's token."""
        if self._draw("agree", prefix) < self.agreement:
            return self.own(prefix)
        return self._token("guess", prefix)

    def confidence(self, prefix) -> float:
        """The drafter's probability for its token, in eighths."""
        return 0.125 * (1 + self.choice(prefix, 8))

    def choice(self, prefix, count: int) -> int:
        """A keyed choice among so many."""
        return int(self._draw("choice", prefix) * count)

    def gap(self, prefix, token) -> float:
        """The token's cost, in eighths so that sums are exact."""
        return 0.125 * (1 + int(8 * self._draw("gap", [*prefix, token])))

    def passes(self, prefix, token) -> bool:
        """True if the rule's criterion and guards accept a mismatch."""
        if EOS in (token, self.own(prefix)):
            return False
        return self._draw("passes", [*prefix, token]) < self.tolerance

    def logprobs(self, prefix, token) -> TokenLogprobs:
        """A token's reported value, in eighths."""
        return TokenLogprobs(-self.gap(prefix, token), (token,), (-self.gap(prefix, token),))


def judge(world: World, prefix, round_: VerifyRound, window_size: int) -> Verdict:
    """A rule with a window across rounds, with the semantics of the service's `judge`."""
    drafts, budget = list(round_.draft_token_ids), round_.budget
    tokens_left, cost_left = budget.loose_tokens, budget.loose_cost_nats
    start = len(prefix)
    window, opened_at = round_.open_window, None
    decisions: list[Decision] = []

    def verdict(keep_length, next_token, open_=None):
        missing = [Decision(Outcome.NOT_REACHED)] * (len(drafts) - len(decisions))
        return Verdict(
            keep_length,
            next_token,
            (*decisions, *missing),
            open_,
            start_length=start,
            round_id=round_.round_id,
        )

    def fail():
        if opened_at is None:
            return verdict(window.position, window.target_token_id)
        decisions[opened_at:] = [decisions[opened_at]._replace(outcome=Outcome.REJECTED)]
        return verdict(start + opened_at, window.target_token_id)

    ended = False
    for index, token in enumerate(drafts):
        before = [*prefix, *drafts[:index]]
        own = world.own(before)
        if token == own:
            decisions.append(Decision(Outcome.EXACT))
            if window is not None:
                window = window._replace(remaining_matches=window.remaining_matches - 1)
                if window.remaining_matches == 0:
                    if opened_at is not None:
                        kept = decisions[opened_at]._replace(outcome=Outcome.LOOSE)
                        decisions[opened_at] = kept
                    window = opened_at = None
            if token == EOS:
                ended = True
                break
            continue
        gap = world.gap(before, token)
        if window is not None:
            decisions.append(Decision(Outcome.REJECTED, own, None, gap))
            return fail()
        if (
            not world.passes(before, token)
            or start + index < round_.exact_until_position
            or (tokens_left is not None and tokens_left < 1)
            or (cost_left is not None and gap > cost_left)
        ):
            decisions.append(Decision(Outcome.REJECTED, own, None, gap))
            return verdict(start + index, own)
        tokens_left = None if tokens_left is None else tokens_left - 1
        cost_left = None if cost_left is None else cost_left - gap
        outcome = Outcome.PROVISIONAL if window_size else Outcome.LOOSE
        decisions.append(Decision(outcome, own, None, gap))
        if window_size:
            own_logprobs = world.logprobs(before, own)
            window = OpenWindow(start + index, own, window_size, gap, own_logprobs)
            opened_at = index
    accepted = drafts[: len(decisions)]
    bonus = world.own([*prefix, *accepted])
    if window is not None and (ended or bonus == EOS):
        return fail()
    return verdict(start + len(accepted), bonus, window)


GOOD = World(agreement=1.0, tolerance=0.0, eos_share=0.0)


def text_of(world: World, plan) -> list[int]:
    tokens = list(plan.prompt_token_ids)
    for _ in range(plan.limits.max_tokens):
        tokens.append(world.own(tokens))
    return tokens[len(plan.prompt_token_ids) :]
