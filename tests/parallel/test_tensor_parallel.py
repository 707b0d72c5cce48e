"""A tensor-parallel target: the same tokens, a share of the weights per rank, a common end.

The verify service runs as it is deployed, a process that starts the others; an orchestrator in this
process talks to it.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from flyspec.bundled import TARGET
from flyspec.cli.service import Child
from flyspec.client import AsyncClient, GenerateOptions
from flyspec.config import OrchestratorSettings, VerifySettings
from flyspec.engine import loading
from flyspec.engine.autojudge import write_judge
from flyspec.engine.cache_size import slot_bytes
from flyspec.engine.parallel import place_from_environment, rank_device, weight_bytes
from flyspec.errors import ConfigError, FlyspecError
from flyspec.rules import Rule
from flyspec.values.generation import Chunk
from flyspec.values.tokens import Origin
from flyspec_lab.bench.reference import Reference
from flyspec_lab.ports import free_port
from orchestrator.server import Orchestrator
from tests.autojudges import facts_of, tensors_of
from tests.tiny import HIDDEN_SIZE, make_model
from tests.waiting import is_gone, until
from verify_service.ranks import EXIT_LOST_RANK, find_place

ROOT = Path(__file__).resolve().parents[2]
LONG = GenerateOptions(max_tokens=200, ignore_eos=True, rule=Rule("exact"))
HEAD_DIM = 48 // 8
DATA = (
    "HumanEval.jsonl.gz", "gsm8k_test.jsonl", "spec_bench_question.jsonl", "mgsm_de.tsv",
    "mgsm_fr.tsv", "mgsm_th.tsv", "acp_prog_gen_dev.json",
)  # fmt: skip
PROMPTS = [[0, 17, 45, 120], [0, 5, 6, 7, 5, 6, 7, 5, 6], [0, *range(40, 120)]]


@pytest.fixture(scope="module")
def target(model_dirs):
    """Four attention heads, two KV heads."""
    return model_dirs[0]


@pytest.fixture(scope="module")
def expected(target):
    """transformers' own greedy text of each prompt, in float64."""
    return texts_of(target)


def texts_of(model):
    reference = Reference(model, "float64", threads=1)
    return [reference.generate(ids, 200, ignore_eos=True)[:100] for ids in PROMPTS]


class Target:
    """A verify service of two ranks, with all it logged."""

    def __init__(self, service, log):
        self.service, self.log = service, log

    @property
    def pids(self):
        """Process of each rank."""
        found = re.findall(r"rank \d is process (\d+)", "\n".join(self.log))
        return [self.service.pid, *map(int, found)]

    async def end(self):
        """Wait for the end of all ranks; rank 0's exit code."""
        code = await self.service.ended()
        await until(lambda: all(map(is_gone, self.pids)))
        return code


@asynccontextmanager
async def serving(server, model, *flags, port=0, size=2):
    log = []
    every = ["--model", model, "--port", str(port), "--device", "cpu", "--dtype", "float64",
             "--threads", str(size), "--max-sessions", "4", "--drain-grace-s", "1",
             "--tensor-parallel-size", str(size)]  # fmt: skip
    service = await Child.start("verify", "verify_service", [*every, *flags], 1, log.append, server)
    try:
        await service.ready()
        yield Target(service, log)
    finally:
        service.send(signal.SIGKILL)
        await service.ended()


@asynccontextmanager
async def client_of(port):
    settings = OrchestratorSettings(
        port=0,
        admin_port=0,
        verify_address=f"127.0.0.1:{port}",
        draft_address="",
        reopen_timeout_s=300,  # a busy machine loads slowly
    )
    running = Orchestrator(settings)
    await running.start()
    try:
        async with AsyncClient(f"127.0.0.1:{running.ports[0]}") as client:
            yield client
    finally:
        await running.stop(0)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
async def test_the_same_tokens_with_fewer_kv_heads_than_ranks(kind, tmp_path, fork_server):
    """Two KV heads, each on two of four ranks, which have two of eight query heads each.

    The cache is in blocks. Qwen 2 has biases; Gemma 2's own attention, which it is tried against,
    repeats heads itself.
    """
    # Of a seed whose texts have no end of sequence, which the reference would not choose.
    model = str(make_model(tmp_path, seed=4, kind=kind, num_attention_heads=8))
    async with serving(fork_server, model, "--block-size", "16", size=4) as running:
        async with client_of(running.service.facts["port"]) as client:
            await generates(client, texts_of(model))
        await ends_in_order(running)


async def generates(client, expected):
    for k in (0, 4):
        options = GenerateOptions(
            max_tokens=100, ignore_eos=True, rule=Rule("exact"), num_speculative_tokens=k
        )
        got = await asyncio.gather(*(client.complete(ids, options) for ids in PROMPTS))
        assert [generation.token_ids for generation in got] == expected


async def ends_in_order(running):
    running.service.send(signal.SIGTERM)
    assert await running.end() == 0
    assert not re.findall("ERROR|CRITICAL|Traceback", "\n".join(running.log))


@pytest.mark.timeout(600)
@pytest.mark.slow
async def test_a_judge_reads_the_hidden_rows_of_rank_0(target, expected, tmp_path, fork_server):
    """They are whole there: the texts are those of a service in one process."""
    fingerprint = loading.load_model(target, "cpu", "float64").info.weights_fingerprint
    facts = facts_of(HIDDEN_SIZE, weights_fingerprint=fingerprint, threshold=0.5)
    tensors = tensors_of(HIDDEN_SIZE, np.random.default_rng(1))
    tensors["bias"] -= 10.0  # about the middle of the others' sum
    write_judge(tmp_path / "judge", tensors, facts)

    def options(text):
        """Drafts are the target's text with every fourth token replaced."""
        drafts = [token if i % 4 else 7 + i for i, token in enumerate(text, 1)]
        return GenerateOptions(
            max_tokens=60, ignore_eos=True, rule=Rule("autojudge"), disable_loop_guard=True,
            num_speculative_tokens=6, prediction=drafts,
        )  # fmt: skip

    async def texts(size):
        flags = "--autojudge-file", str(tmp_path / "judge")
        async with (
            serving(fork_server, target, *flags, size=size) as running,
            client_of(running.service.facts["port"]) as client,
        ):
            found = [
                await client.complete(ids, options(text))
                for ids, text in zip(PROMPTS, expected, strict=True)
            ]
        return [([*t.token_ids], sum(o is Origin.LOOSE for o in t.origins)) for t in found]

    alone = await texts(1)
    assert sum(loose for _, loose in alone) > 0
    assert await texts(2) == alone


@pytest.mark.timeout(600)  # two starts, and a stream between them
@pytest.mark.slow
async def test_a_killed_rank_ends_the_service_and_a_stream_goes_on_after_restart(
    target, expected, fork_server
):
    """Before and after, every text is that of one process; the second service exits cleanly."""
    port = free_port()
    async with serving(fork_server, target, port=port) as first, client_of(port) as client:
        tokens = []
        events = client.generate(PROMPTS[0], LONG)
        async for event in events:
            if isinstance(event, Chunk):
                tokens += event.token_ids
                break
        os.kill(first.pids[1], signal.SIGKILL)
        assert await asyncio.wait_for(first.end(), 60) == EXIT_LOST_RANK
        assert "rank 1 ended by SIGKILL" in "\n".join(first.log)
        assert len(tokens) < 100
        async with serving(fork_server, target, port=port) as second:
            async for event in events:
                if isinstance(event, Chunk):
                    tokens += event.token_ids
            await generates(client, expected)
            await ends_in_order(second)
        assert len(tokens) == 200
        assert tokens[:100] == expected[0]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.slow
async def test_a_stopped_rank_ends_the_service(target, rank, fork_server):
    async with serving(fork_server, target, "--heartbeat-timeout-s", "2") as running:
        os.kill(running.pids[rank], signal.SIGSTOP)
        code = await asyncio.wait_for(running.end(), 60)
        assert re.search(f"rank {rank} has been silent for [0-9.]+ s", "\n".join(running.log))
        # Rank 0 cannot end itself while it is stopped; another rank kills it.
        assert code == (EXIT_LOST_RANK if rank else -signal.SIGKILL)


@pytest.mark.full
async def test_a_step_that_no_rank_finishes_ends_the_service(target, fork_server):
    flags = ("--heartbeat-timeout-s", "600", "--step-timeout-s", "1")
    async with (
        serving(fork_server, target, *flags) as running,
        client_of(running.service.facts["port"]) as client,
    ):
        os.kill(running.pids[1], signal.SIGSTOP)
        stream = asyncio.create_task(client.complete(PROMPTS[0], LONG))
        try:
            assert await asyncio.wait_for(running.end(), 60) == EXIT_LOST_RANK
        finally:
            stream.cancel()
        assert re.search("rank 1 has not finished a step for [0-9.]+ s", "\n".join(running.log))


@pytest.mark.slow
async def test_ranks_started_by_others_join(target):
    """As torchrun or a LeaderWorkerSet starts them: the same command everywhere."""
    port, meeting = free_port(), free_port()
    command = ["-m", "verify_service", "--model", target, "--port", str(port), "--device", "cpu",
               "--dtype", "float64", "--threads", "1", "--max-sessions", "4"]  # fmt: skip
    join = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting)}
    ranks = [
        await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=ROOT, env={**os.environ, **join, "RANK": str(rank)}
        )
        for rank in (1, 0)
    ]
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:

            async def serves():
                assert [rank.returncode for rank in ranks] == [None, None]
                try:
                    return await client.check_health("flyspec.v1.VerifyService") == "SERVING"
                except FlyspecError:
                    return False

            await until(serves, 120)
        # Whoever ends a deployment tells all processes at once; rank 0 drains.
        for rank in ranks:
            rank.terminate()
        ends = asyncio.gather(*(rank.wait() for rank in ranks))
        assert await asyncio.wait_for(ends, 60) == [0, 0]
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()


# --- loading --------------------------------------------------------------------------------


def test_each_rank_reads_its_share_of_the_checkpoint(monkeypatch):
    model, size = TARGET, 4
    stored = (model / "model.safetensors").stat().st_size
    counted = count_reads(monkeypatch)
    for rank in range(size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            counted.clear()
            loaded = loading.load_model(str(model), "cpu", "bfloat16", 0, size)
            own, total = weight_bytes(loaded.model)
        finally:
            dist.destroy_process_group()
        assert total == loaded.info.num_parameters * 2
        # Norms are a share of their own on every rank.
        assert total / size <= own < 1.01 * total / size
        assert sum(counted) == own
        assert sum(counted) < 1.01 * stored / size
        assert max(counted) <= own / 2


@pytest.mark.parametrize(("kind", "size"), [("llama", 8), ("qwen2", 4)])
def test_each_rank_reads_the_kv_head_of_its_query_heads(size, kind, tmp_path, monkeypatch):
    model = str(make_model(tmp_path, kind=kind, num_attention_heads=8))
    whole = loading.load_model(model, "cpu", "float32").model.state_dict()
    counted = count_reads(monkeypatch)
    for rank in range(size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            counted.clear()
            loaded = loading.load_model(model, "cpu", "float32", 0, size)
            assert sum(counted) == weight_bytes(loaded.model)[0]
            local = {name: w.to_local() for name, w in loaded.model.state_dict().items()
                     if isinstance(w, DTensor)}  # fmt: skip
            rows_kept = [
                len(w) for name, w in local.items() if re.search(r"[kv]_proj\.weight", name)
            ]
            assert slot_bytes(loaded.model.config, 1, torch.float32, size) == 4 * sum(rows_kept)
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it knows the last rank's groups
        assert loaded.info.num_parameters == sum(w.numel() for w in whole.values())
        heads = {"q": (rank * 8 // size, 8 // size), "k": (rank * 2 // size, 1)}
        heads["v"] = heads["k"]
        suffixes = ("weight", "bias") if kind == "qwen2" else ("weight",)
        for layer, (projection, (first, count)), suffix in product(
            range(2), heads.items(), suffixes
        ):
            name = f"model.layers.{layer}.self_attn.{projection}_proj.{suffix}"
            rows = slice(first * HEAD_DIM, (first + count) * HEAD_DIM)
            assert torch.equal(local[name], whole[name][rows]), name


def count_reads(monkeypatch):
    """Bytes of each tensor that transformers takes from a safetensors file from now on."""
    import transformers.modeling_utils as modeling

    sizes = []

    class Slice:
        def __init__(self, inner):
            self._inner = inner

        def __getitem__(self, index):
            tensor = self._inner[index]
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        def __getattr__(self, name):
            return getattr(self._inner, name)

    class File:
        def __init__(self, *arguments, **options):
            self._inner = safe_open(*arguments, **options)

        def get_slice(self, name):
            return Slice(self._inner.get_slice(name))

        def get_tensor(self, name):
            raise AssertionError(f"{name} is read whole")

        def __enter__(self):
            self._inner.__enter__()
            return self

        def __exit__(self, *error):
            return self._inner.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self._inner, name)

    safe_open = modeling.safe_open
    monkeypatch.setattr(modeling, "safe_open", File)
    return sizes


# --- what cannot work -------------------------------------------------------------------------


def test_heads_that_do_not_divide(tmp_path, target, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    six = str(make_model(tmp_path, hidden_size=48, num_attention_heads=6))
    for model, size, numbers in (
        (target, 3, r"4 attention heads and 2 KV heads, .* that work: 1, 2, 4$"),
        (target, 8, r"4 attention heads and 2 KV heads, .* that work: 1, 2, 4$"),
        (six, 3, r"6 attention heads and 2 KV heads, which 3 ranks .* that work: 1, 2, 6$"),
    ):
        with pytest.raises(ConfigError, match=numbers):
            find_place(VerifySettings(model=model, tensor_parallel_size=size))


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    place = find_place_of(4)
    with pytest.raises(ConfigError, match=r"4 ranks on this host need .* but torch found 2"):
        rank_device("auto", place)
    with pytest.raises(ConfigError, match=r"--device cuda:1: .* use cpu, cuda or auto"):
        rank_device("cuda:1", place)
    assert rank_device("cpu", place) == torch.device("cpu")
    assert rank_device("cuda", place._replace(local_size=2, local_rank=1)) == torch.device("cuda:1")


def find_place_of(size):
    environment = {"RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    place = place_from_environment({**environment, "LOCAL_WORLD_SIZE": str(size)})
    assert place is not None
    return place


def test_places_from_the_environment(target, monkeypatch):
    whole = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "leader", "MASTER_PORT": "29500"}
    assert place_from_environment(whole) == (1, 2, 0, 1, "leader", 29500)
    place = place_from_environment({**whole, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert place == (1, 2, 1, 2, "leader", 29500)
    assert place_from_environment(place.environment()) == place
    assert place_from_environment({}) is None
    assert place_from_environment({"RANK": "0", "WORLD_SIZE": "1"}) is None
    with pytest.raises(ConfigError, match="set without MASTER_ADDR and MASTER_PORT"):
        place_from_environment({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="MASTER_PORT=x: must be a whole number"):
        place_from_environment({**whole, "MASTER_PORT": "x"})
    with pytest.raises(ConfigError, match="RANK=2: must be between 0 and"):
        place_from_environment({**whole, "RANK": "2"})
    for name, value in whole.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="contradicts WORLD_SIZE=2 in the environment"):
        find_place(VerifySettings(model=target, tensor_parallel_size=4))


# --- the long form ----------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [2, 4])
def test_exactness_of_tensor_parallel(size):
    """20 prompts of each kind against transformers, through all services."""
    command = [sys.executable, "-m", "bench.exactness", "--limit", "20", "--k", "15"]
    data = ROOT / os.environ.get("FLYSPEC_DATA", "../shared/data")
    command += [f"--prompt-file={data / name}" for name in DATA if (data / name).exists()]
    done = subprocess.run(
        [*command, "--tensor-parallel-size", str(size)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
