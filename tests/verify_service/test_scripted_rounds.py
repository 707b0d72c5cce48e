"""The verify engine over a scripted model: rounds, plain decoding, hidden rows."""

from __future__ import annotations

from flyspec.engine.model import Draw, Step
from flyspec.rules import Rule
from flyspec.values.rounds import VerifyOpen, VerifyRound
from flyspec.values.tokens import SamplingParams
from tests.scripted import ScriptedModel
from tests.verify_service.sessions import answers, engine_over, tokenizer_of
from verify_service.engine import VerifyEngine

EOS = 31


async def test_rounds_and_plain_decoding() -> None:
    model = ScriptedModel()
    async with engine_over(model) as engine:
        open_ = VerifyOpen([5, 6, 7], 3, Rule("exact"), SamplingParams(), 0)
        session = engine.open(open_)
        (verdict,) = await answers(engine, session, VerifyRound(1, 3, [], [8, 9, 4, 5]))
        assert (verdict.keep_length, verdict.next_token_id) == (5, 10)
        (verdict,) = await answers(engine, session, VerifyRound(2, 6, [], [11, 12]))
        assert (verdict.keep_length, verdict.next_token_id) == (8, 13)
        # What the verdict let stand is not run again.
        assert model.calls[-1] == [Step(0, 5, [10, 11, 12], 3)]
        plain = await answers(engine, session, VerifyRound(3, 6, [28], [], max_plain_tokens=9))
        assert [v.next_token_id for v in plain] == [29, 30, EOS]
        assert [v.last for v in plain] == [False, False, True]
        engine.close(session)
    assert model.cache.num_free == model.cache.num_slots


async def test_hidden_rows_come_back_as_each_asks_for_them() -> None:
    engine = VerifyEngine(ScriptedModel(), tokenizer_of(EOS), max_queue=8)
    wants = [
        Draw(Step(0, 0, [4, 5], 2, (3, 1))),
        Draw(Step(1, 0, [6])),
        Draw(Step(2, 0, [7], 1, (2,))),
    ]
    rows = engine.run_batch(wants)
    assert [[h.tolist() for h in r.hidden] for r in rows] == [
        [[[4, 3], [5, 3]], [[4, 1], [5, 1]]],
        [],
        [[[7, 2]]],
    ]
