"""Sessions in the target's IDs with the bundled byte-level draft, over gRPC; sending tokenizers."""

import json
from dataclasses import replace
from itertools import takewhile

import grpc
import pytest
from transformers import AutoTokenizer, GenerationConfig

from draft_service import tokenizers
from flyspec import wire
from flyspec.config import DraftSettings
from flyspec.engine.bundle import tokenizer_bundle
from flyspec.engine.loading import load_model
from flyspec.engine.model import Draw, Step
from flyspec.engine.runner import ModelRunner
from flyspec.tokenizer import Tokenizer
from flyspec.v1 import draft_pb2
from flyspec.values.admin import DraftServiceInfo
from flyspec.values.tokens import Origin, SamplingParams
from flyspec_lab.word_problems import problems
from tests.draft_service.draft_harness import start_service, tokens_of
from tests.draft_service.tokenizer_zoo import ASSISTANT, BOS, END, MODELS, USER
from tests.waiting import until

Code = grpc.StatusCode
TARGET_VOCAB_SIZE = 4096
BUNDLE = tokenizer_bundle(
    AutoTokenizer.from_pretrained(MODELS / "target"),
    GenerationConfig.from_pretrained(MODELS / "target"),
)
TARGET = Tokenizer(BUNDLE)


def prompt_of(problem):
    text = f"<|bos|><|user|>{problem.question}<|end|><|assistant|>"
    return TARGET.encode(text, add_special_tokens=False)


PROMPT = prompt_of(problems(7, 1)[0])


def upload_of(bundle, vocab_size=TARGET_VOCAB_SIZE):
    return wire.tokenizer_messages(bundle.facts(vocab_size), bundle.tokenizer_json)


def bytes_service(**settings):
    values = {
        "model": str(MODELS / "draft-bytes"), "dtype": "float64", "device": "cpu", "threads": 1,
        "port": 0,
    }  # fmt: skip
    return start_service(DraftSettings(**{**values, **settings}))


@pytest.fixture(scope="module")
async def service():
    """A service that knows the target's tokenizer, shared by tests that leave no session."""
    async with bytes_service() as running:
        await send(running, upload_of(BUNDLE))
        yield running


OPENED = []


@pytest.fixture(autouse=True)
async def _close(service):
    yield
    for client in OPENED:
        client.call.cancel()
    OPENED.clear()
    await until(lambda: service.active == 0)


async def send(service, messages):
    await service.stub.AddTokenizer(iter(list(messages)))


async def refusal(service, messages):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(service, messages)
    return caught.value.code(), caught.value.details() or ""


async def open_(service, token_ids=PROMPT, drafter="", **fields):
    fields = {"fingerprint": BUNDLE.fingerprint, **fields}
    client = await service.client().open(token_ids, drafter=drafter, **fields)
    OPENED.append(client)
    return client


async def proposed(client, keep, append=(), count=15):
    return tokens_of(await client.advance(keep, append, count))


async def test_a_tokenizer_is_made_known(service):
    async with bytes_service() as fresh:
        described = await fresh.stub.Describe(draft_pb2.DraftServiceDescribeRequest())
        info = wire.decode(DraftServiceInfo, described)
        assert info.tokenizer_fingerprints == ()
        assert info.drafters[0].model is not None
        assert info.drafters[0].model.tokenizer_fingerprint != BUNDLE.fingerprint
        status, details = await (await open_(fresh)).status()
        assert status is Code.FAILED_PRECONDITION
        assert "open.tokenizer_fingerprint" in details
        assert "AddTokenizer" in details
        messages = upload_of(BUNDLE)
        assert [m.WhichOneof("request") for m in messages] == ["facts", "tokenizer_json_chunk"]
        await send(fresh, messages)
        described = await fresh.stub.Describe(draft_pb2.DraftServiceDescribeRequest())
        assert tuple(described.tokenizer_fingerprints) == (BUNDLE.fingerprint,)
        client = await open_(fresh)
        ours = await proposed(client, len(PROMPT))
        assert len(ours) == 15
        client.call.cancel()
        # Sent again, with a session open: nothing is lost.
        await send(fresh, messages)
        assert await proposed(await open_(fresh), len(PROMPT)) == ours


async def test_proposals_are_text_in_the_targets_ids(service):
    client = await open_(service)
    chunks = await client.advance(len(PROMPT), [], 40)
    ids = tokens_of(chunks)
    assert len(ids) == 40 or ids[-1] in BUNDLE.eos_token_ids
    assert max(ids) < TARGET_VOCAB_SIZE
    text = TARGET.decode(ids)
    assert text.isascii()
    assert " " in text
    assert TARGET.encode(text, add_special_tokens=False) == [i for i in ids if i != END]
    assert {o for c in chunks for o in c.origins} == {Origin.EXACT_MODEL}
    assert not any(c.distributions for c in chunks)
    position = len(PROMPT)
    for chunk in chunks:
        assert (chunk.start_position, chunk.keep_length) == (position, len(PROMPT) - 1)
        assert chunk.next_token_id == PROMPT[-1] == ASSISTANT
        position += len(chunk.token_ids)
    assert 0 < chunks[-1].timings.model_ns < chunks[-1].timings.service_ns


@pytest.mark.parametrize("number", [1, pytest.param(20, marks=pytest.mark.full)])
async def test_most_of_a_targets_greedy_text_is_proposed(service, number):
    """Several tokens of word problems stand in each round."""
    runner = ModelRunner(load_model(str(MODELS / "target"), "cpu", "float64"), 1)
    emitted = rounds = 0
    for problem in problems(7, number):
        prompt = prompt_of(problem)
        draw = Draw(
            Step(0, 0, prompt), SamplingParams(), max_tokens=160,
            stop_token_ids=BUNDLE.eos_token_ids,
        )  # fmt: skip
        (drawn,) = runner.draw([draw])
        text, tokens, kept = [*prompt, *drawn.token_ids], prompt, len(prompt)
        client = await open_(service, prompt)
        while len(tokens) < len(text):
            drafts = await proposed(client, kept, tokens[kept:])
            own = text[len(tokens) :]
            pairs = zip(drafts, own, strict=False)
            kept = len(tokens) + len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
            tokens, rounds = text[: kept + 1], rounds + 1
        emitted += len(drawn.token_ids)
    assert emitted / rounds > 4


async def test_multi_level_proposes_what_the_model_proposes(service):
    context = [*PROMPT, *TARGET.encode("Tom has 12 apples. Ann has 12 apples. Tom has 12", False)]
    chunks = {}
    for drafter in ("model", "multi_level"):
        client = await open_(service, context, drafter)
        chunks[drafter] = await client.advance(len(context), [], 30)
    assert tokens_of(chunks["model"]) == tokens_of(chunks["multi_level"])
    assert Origin.EXACT_LOOKUP in {o for c in chunks["multi_level"] for o in c.origins}


async def test_sampling_reaches_no_further_than_it_can(service):
    """Settings for the target's tokens, and noise, are ignored."""
    plain = await proposed(await open_(service), len(PROMPT))
    sampling = SamplingParams(
        1.2, top_p=0.9, repetition_penalty=1.3, presence_penalty=1.0, min_tokens=40,
        logit_bias=((END, 100.0), (4095, -3.0)),
    )  # fmt: skip
    assert await proposed(await open_(service, sampling=sampling), len(PROMPT)) == plain


async def test_a_target_with_a_longer_context_than_the_drafts():
    """The draft holds the end of the text; only the target limits a session's length."""
    async with bytes_service(max_model_len=256) as service:
        await send(service, upload_of(BUNDLE))
        tokens = PROMPT * 8
        client = await open_(service, tokens)
        for _ in range(6):
            ids = await proposed(client, len(tokens))
            assert ids
            tokens = [*tokens, *ids]
        far = await proposed(client, len(PROMPT))
        fresh = await proposed(await open_(service, PROMPT), len(PROMPT))
        assert far == fresh
        # Without translation the limit is the draft's own.
        status, _ = await (await service.client().open([7] * 300)).status()
        assert status is Code.INVALID_ARGUMENT


async def test_the_drafts_own_ids_need_no_translation(service):
    model = service.sessions.describe().drafters[0].model
    assert model is not None
    own = [BOS, USER, 80, 90, 100]
    ids = await proposed(await open_(service, own, fingerprint=""), len(own))
    same = await open_(service, own, fingerprint=model.tokenizer_fingerprint)
    assert await proposed(same, len(own)) == ids
    assert max(ids) < model.vocab_size


async def test_a_table_padded_further_than_the_drafts(service):
    """The same tokenizer: IDs that exist only in the target's output layer end no session."""
    model = service.sessions.describe().drafters[0].model
    assert model is not None
    sampling = SamplingParams(logit_bias=((300, 1.0),))
    client = await open_(
        service, [BOS, 80, 290, 90], fingerprint=model.tokenizer_fingerprint, sampling=sampling
    )
    assert len(await proposed(client, 4)) == 15
    assert len(await proposed(client, 4, [80, 262])) == 15
    refused = await open_(service, [BOS, 80, 290, 90], fingerprint="")
    assert (await refused.status())[0] is Code.INVALID_ARGUMENT


async def test_lookup_speaks_any_tokenizer(service):
    client = await open_(service, [4000, 70_000, 9, 4000], "prompt_lookup", fingerprint="unheard")
    assert await proposed(client, 4, [70_000], 2) == [9, 4000]
    async with bytes_service(model="") as alone:
        await send(alone, upload_of(BUNDLE))
        assert alone.sessions.describe().tokenizer_fingerprints == (BUNDLE.fingerprint,)


async def test_bad_ids_end_that_session_only(service):
    other = await open_(service)
    status, details = await (await open_(service, [*PROMPT, TARGET_VOCAB_SIZE])).status()
    assert status is Code.INVALID_ARGUMENT
    assert "is not below the target's vocabulary size 4096" in details
    client = await open_(service)
    await client.send(len(PROMPT), [TARGET_VOCAB_SIZE])
    assert (await client.status())[0] is Code.INVALID_ARGUMENT
    client = await open_(service)
    await client.send(len(PROMPT) + 1)
    assert (await client.status())[0] is Code.FAILED_PRECONDITION
    assert await proposed(other, len(PROMPT))


def altered(**facts):
    """The messages with other facts."""
    first, *rest = upload_of(BUNDLE)
    message = draft_pb2.AddTokenizerRequest()
    message.CopyFrom(first)
    for name, value in facts.items():
        if isinstance(value, range):
            getattr(message.facts, name).extend(value)
        else:
            setattr(message.facts, name, value)
    return [message, *rest]


FACTS, CHUNK = upload_of(BUNDLE)
BAD = {
    "nothing": ([], "ended before facts"),
    "no chunks": ([FACTS], "ended before facts"),
    "no facts": ([CHUNK], "send facts first and once"),
    "facts twice": ([FACTS, FACTS, CHUNK], "send facts first and once"),
    "unset": ([FACTS, draft_pb2.AddTokenizerRequest()], "set one of facts, tokenizer_json_chunk"),
    "half": (
        [FACTS, draft_pb2.AddTokenizerRequest(tokenizer_json_chunk=BUNDLE.tokenizer_json[:1000])],
        "cannot be read",
    ),
    "another": (altered(fingerprint="0" * 32), "does not match the"),
    "controls": (altered(control_token_ids=range(1 << 17)), "facts.eos_token_ids: at most 65536"),
    "no vocabulary": (altered(vocab_size=0), "facts.vocab_size"),
}


@pytest.mark.parametrize("case", list(BAD))
async def test_tokenizers_refused(service, case):
    messages, message = BAD[case]
    status, details = await refusal(service, messages)
    assert status is Code.INVALID_ARGUMENT
    assert message in details
    assert service.sessions.tokenizers.fingerprints == (BUNDLE.fingerprint,)


async def test_sizes_and_numbers_are_bounded(service, monkeypatch):
    many = [CHUNK] * 3
    monkeypatch.setattr(tokenizers, "MAX_BYTES", 2 * len(BUNDLE.tokenizer_json))
    status, details = await refusal(service, [FACTS, *many])
    assert status is Code.RESOURCE_EXHAUSTED
    assert "tokenizer_json_chunk" in details
    calls = [service.stub.AddTokenizer() for _ in range(tokenizers.MAX_UPLOADS)]
    for call in calls:
        await call.write(FACTS)
    await until(lambda: service.sessions.tokenizers._uploads == len(calls))
    status, details = await refusal(service, [FACTS, CHUNK])
    assert status is Code.RESOURCE_EXHAUSTED
    assert "retry" in details
    for call in calls:
        call.cancel()
    await until(lambda: service.sessions.tokenizers._uploads == 0)


async def test_the_one_used_longest_ago_goes():
    """Sessions that use it continue; a new one must send it again."""
    spec = json.loads(BUNDLE.tokenizer_json)
    async with bytes_service() as service:
        known = service.sessions.tokenizers
        await send(service, upload_of(BUNDLE))
        client = await open_(service)
        for number in range(tokenizers.MAX_KNOWN + 1):
            token = {**spec["added_tokens"][-1], "id": 4096, "content": f"<|extra {number}|>"}
            data = json.dumps({**spec, "added_tokens": [*spec["added_tokens"], token]}).encode()
            other = replace(
                BUNDLE,
                tokenizer_json=data,
                fingerprint=fingerprint_of(data),
                control_token_ids=(*BUNDLE.control_token_ids, 4096),
            )
            await send(service, upload_of(other, 4097))
            if number == 0:
                await (await open_(service)).advance(len(PROMPT), [], 1)  # used again
            assert (BUNDLE.fingerprint in known.fingerprints) == (number < tokenizers.MAX_KNOWN)
        assert len(known.fingerprints) == tokenizers.MAX_KNOWN
        assert len(await proposed(client, len(PROMPT))) == 15
        assert (await (await open_(service)).status())[0] is Code.FAILED_PRECONDITION
        await send(service, upload_of(BUNDLE))
        assert len(await proposed(await open_(service), len(PROMPT))) == 15


def fingerprint_of(data):
    """As from a target's service: without the padding token, 2."""
    from tokenizers import Tokenizer as RustTokenizer

    from flyspec.tokenizer import fingerprint

    return fingerprint(RustTokenizer.from_buffer(data), 2)
