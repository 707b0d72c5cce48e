"""Staged rounds: begun by the verdict that they wait for, and by no other."""

from dataclasses import replace

import pytest

from flyspec import wire
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Rule
from flyspec.values.rounds import (
    Budget,
    OpenWindow,
    Outcome,
    StagedOn,
    Verdict,
    VerifyOpen,
    VerifyRound,
    VerifyTimings,
)
from flyspec.values.tokens import SamplingParams
from tests.verify_service.sessions import HELD, SHORT_PROMPT, drained, open_message
from verify_service.staging import StagedRounds, WaitingRound


class Call:
    """A stream of rounds; `exact` verdicts unless it is opened otherwise."""

    def __init__(self, stub):
        self.stream = stub.Verify()

    async def send(self, *values):
        for value in values:
            await self.stream.write(value if hasattr(value, "ByteSize") else wire.encode(value))

    async def read(self, start_length=0):
        return wire.decode(Verdict, await self.stream.read(), start_length=start_length)

    def close(self):
        self.stream.cancel()


def staged(round_id, on, drafts, **changes):
    keep = changes.pop("keep_length", on.keep_length + 1)
    return VerifyRound(round_id, keep, [], drafts, staged_on=on, **changes)


@pytest.mark.parametrize("late", [False, True])
async def test_a_hit_begins_without_being_asked(service, engine, greedy, late):
    text = greedy(SHORT_PROMPT, 12)
    wrong = (text[2] + 1) % 400
    first = VerifyRound(1, HELD, [], [*text[:2], wrong])
    on = StagedOn(1, HELD + 2, text[2])
    others = [staged(2, StagedOn(1, HELD + 3, 9), [7]), staged(3, StagedOn(1, HELD + 1, 5), [8])]
    async with service() as stub:
        call = Call(stub)
        await call.send(open_message(), first)
        if not late:
            await call.send(*others, staged(4, on, text[3:6]))
        verdict = await call.read(HELD)
        assert verdict.on == on
        if late:
            assert verdict.started_staged_round_id == 0
            await call.send(*others, staged(4, on, text[3:6]))
        following = await call.read(HELD + 3)
        assert (following.round_id, following.num_accepted) == (4, 3)
        assert following.next_token_id == text[6]
        # The session goes on from there, and what was staged for the first verdict is gone.
        await call.send(staged(5, StagedOn(1, HELD + 6, text[6]), [1]))
        await call.send(VerifyRound(6, HELD + 7, [], [text[7]]))
        assert (await call.read(HELD + 7)).next_token_id == text[8]
        call.close()
    assert await drained(engine)


async def test_rounds_staged_for_rounds_that_wait(service, engine, greedy):
    """All are sent at once; those that follow another verdict than the one reached are dropped."""
    text = greedy(SHORT_PROMPT, 12)
    async with service() as stub:
        call = Call(stub)
        await call.send(open_message(), VerifyRound(1, HELD, [], text[:2]))
        on = StagedOn(1, HELD + 2, text[2])
        await call.send(staged(2, StagedOn(1, HELD + 1, 9), [7]))
        await call.send(staged(3, StagedOn(2, HELD + 3, 9), [7]))
        await call.send(staged(4, on, text[3:5]))
        await call.send(staged(5, StagedOn(4, HELD + 5, text[5]), text[6:8]))
        await call.send(staged(6, StagedOn(4, HELD + 4, text[5]), [7]))
        await call.send(staged(7, StagedOn(5, HELD + 8, text[8]), text[9:10]))
        length = HELD
        for round_id, count in ((1, 2), (4, 2), (5, 2), (7, 1)):
            verdict = await call.read(length)
            assert (verdict.round_id, verdict.num_accepted) == (round_id, count)
            length += count + 1
        # A branch of what has been dropped comes too late.
        await call.send(staged(8, StagedOn(3, HELD + 5, 9), [7]))
        await call.send(VerifyRound(9, length, [], [7]))
        assert (await call.read(length)).round_id == 9
        call.close()
    assert await drained(engine)


ON = StagedOn(1, HELD + 1, 9)
RULES = [Rule("margin", margin_threshold=3.0), Rule("typical"), Rule("fly")]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ([staged(2, StagedOn(3, HELD, 9), [5])], "the last round is 1"),
        ([staged(2, ON, [])], "needs drafts"),
        ([staged(2, ON, [5], budget=Budget(3))], "leave them unset"),
        ([staged(2, ON, [5], open_window=OpenWindow(HELD, 5, 2, 0.5))], "leave them unset"),
        ([staged(2, ON, [5], keep_length=HELD)], f"the sequence has {HELD + 2} tokens"),
        ([staged(2 + i, StagedOn(1, HELD, i), [5]) for i in range(17)], "16 rounds are staged"),
    ],
)
def test_what_cannot_be_staged(bad, said):
    rounds = StagedRounds()
    rounds.received(VerifyRound(1, HELD, [], [7]))
    for round_ in bad[:-1]:
        rounds.stage(WaitingRound(round_, []))
    with pytest.raises(InvalidArgumentError, match=said):
        rounds.stage(WaitingRound(bad[-1], []))


@pytest.mark.parametrize("rule", RULES)
async def test_verdicts_are_those_of_rounds_that_are_sent(service, rule):
    """Whole texts, each round staged for the verdict that it turns out to follow."""
    text = [3, 8, 100, 21, 5, 90, 17, 4] * 6
    sampling = SamplingParams(temperature=1.0)

    async def run(stages):
        async with service() as stub:
            call = Call(stub)
            open_ = VerifyOpen(SHORT_PROMPT, HELD, rule, sampling, 4)
            await call.send(open_)
            verdicts, length, window, budget = [], HELD, None, Budget(6, 40.0)
            round_id = 1
            await call.send(VerifyRound(1, HELD, [], text[:4], budget=budget))
            while len(verdicts) < 8:
                verdict = await call.read(length)
                verdicts.append(verdict)
                spent = [d.gap_nats or 0.0 for d in verdict.decisions[: verdict.num_accepted]
                         if d.outcome in (Outcome.LOOSE, Outcome.PROVISIONAL)]  # fmt: skip
                whole = verdict.failed
                budget = Budget(6, 40.0) if whole else budget.less(len(spent), sum(spent))
                length, window = verdict.keep_length + 1, verdict.open_window
                drafts = text[length % 8 :][:4]
                round_id += 1
                following = VerifyRound(round_id, length, [], drafts)
                if stages and not verdict.failed:
                    await call.send(replace(following, staged_on=verdict.on))
                else:
                    await call.send(replace(following, budget=budget, open_window=window))
            call.close()
            return [
                replace(v, timings=VerifyTimings(), started_staged_round_id=0) for v in verdicts
            ]

    assert await run(True) == await run(False)
