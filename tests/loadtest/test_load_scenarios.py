"""Every scenario for some seconds on the bundled models, without assertions on times."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flyspec.client import AdminClient
from flyspec.errors import ConfigError
from loadtest import scenarios
from loadtest.scenarios import SCENARIOS, scenario_app
from tests.loadtest.conftest import address_of
from tests.waiting import until

pytestmark = pytest.mark.slow

LOCUSTFILE = str(Path(scenarios.__file__).with_name("locustfile.py"))
SHORT = "--max-tokens 16 --seed 1"
SLOW = {"latency of p50", "latency of p99", "p99 of accepted requests", "time to a refusal",
        "normal latency"}  # fmt: skip
"""Checks that fail where others use the machine."""


def passed(ended, missed=frozenset()):
    """Assert that a test completed without failures, but for speed, and wrote its report."""
    assert ended.document, ended.errors
    broken = {check["name"] for check in ended.document["checks"] if not check["passed"]}
    others = {name for name in broken - SLOW if not name.startswith("memory of")}
    assert others == missed, ended.printed
    assert ended.code == bool(broken)
    assert ("FAILED" if broken else "PASSED") in ended.printed
    assert ended.document["target"]["num_parameters"] > 0
    assert ended.document["errors"] == {}
    return True


@pytest.mark.parametrize("protocol", ["http", pytest.param("grpc", marks=pytest.mark.full)])
async def test_ramp_on_a_stack_of_its_own_misses_a_goal(run_load, protocol):
    flags = "--serve=--draft-model= --seconds 1 --steps 1,3 --rule exact --num-speculative-tokens 4"
    ended = await run_load(
        "ramp", f"{flags} --against 0 --goodput e2e:60000 --max-p99 e2e:0.001 {SHORT}",
        module="loadtest.bundled", page=True, protocol=protocol,
    )  # fmt: skip
    assert passed(ended, missed={"p99 e2e"})
    assert ended.document["options"]["protocol"] == protocol
    assert f"over {protocol}" in ended.page
    series = {p["series"] for p in ended.document["phases"]} - {""}
    assert series == {"exact, K = 4", "K = 0"}
    assert {curve["series"] for curve in ended.document["found"]["curves"]} == series
    assert ended.phase("1 user, K = 0")["tokens_per_round"] == 1.0
    assert ended.phase("3 users, K = 0")["goodput"] == 1.0
    assert "knee" in ended.page
    assert "<svg" in ended.page
    assert set(ended.document["memory"]) == {"verify", "draft", "orchestrator"}


async def test_soak(run_load, protocol):
    flags = "--seconds 2 --rate 6 --cancelled 0.3 --cancel-after 0.05"
    ended = await run_load("soak", f"{flags} {SHORT} --temperature 0.7", protocol=protocol)
    assert passed(ended)
    assert ended.check("left open")["said"] == "nothing more than before"
    soak = ended.phase("soak")
    assert soak["complete"] > 0
    assert soak["sent"] == soak["complete"] + soak["cancelled"] + soak["refused"]
    assert "memory of verify" in {c["name"] for c in ended.document["checks"]}


async def test_overload(run_load, protocol):
    """Nothing about speed, which depends on what else the machine does."""
    ended = await run_load("overload", "--seconds 5 --max-tokens 16", protocol=protocol)
    assert passed(ended)
    load = ended.phase("burst")
    assert load["complete"] + load["refused"] == load["sent"]
    assert load["complete"] > 0
    assert load["refused"] > 0
    assert "p99 of accepted requests" in ended.printed


async def test_a_test_that_is_stopped_reports_what_it_saw(run_load, load_stack):
    async def some_are_complete():
        async with AdminClient(load_stack.admin_address) as admin:

            async def opened():
                return (await admin.status()).verify.sessions.opened_total

            before = await opened()

            async def more_than_fit():
                return await opened() > before + 6

            assert await until(more_than_fit)

    ended = await run_load("soak", f"--seconds 60 --rate 6 {SHORT}", stop_when=some_are_complete)
    assert ended.code == 1
    assert not ended.check("interrupted")["passed"]
    assert ended.phase("soak")["complete"] > 0
    assert ended.document["seconds"] < 60


async def test_a_server_that_is_not_there(run_load, protocol):
    ended = await run_load("ramp", "--address 127.0.0.1:1", protocol=protocol)
    assert ended.code == 2
    assert ended.errors.startswith("error: 127.0.0.1:1 does not answer")


async def test_locusts_own_command_line(load_stack, protocol):
    flags = f"--headless --users 2 --run-time 1s --stop-timeout 60 {SHORT} --json --host"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "locust", "--locustfile", LOCUSTFILE, *flags.split(),
        address_of(load_stack, protocol), "--protocol", protocol,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    printed, errors = await child.communicate()
    assert child.returncode == 0, errors.decode()
    rows = {row["method"]: row["num_requests"] for row in json.loads(printed)}
    assert rows["Generate"] == rows["TTFT"] > 0


# --- the command line -------------------------------------------------------------------------


def given(*flags):
    """The options that a command line gives a scenario, checked."""
    found = []

    def start(scenario, load, own):
        load.validate()
        load.transport().close()
        found.append((load, own))
        return 3

    ended = CliRunner().invoke(scenario_app("Tests.", start), list(flags))
    return ended, found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("ramp --plot a.txt", r"must end in \.svg"),
        ("ramp --html none/a.html", "no such directory: none"),
        ("soak --min-goodput 0.9", "needs --goodput"),
        ("overload --ssl-certfile a.pem", "ssl-ca-certs"),
        ("ramp --protocol http --address h:x", "--address h:x: not http://HOST:PORT"),
        ("ramp --protocol http --address https://h:1", "give --ssl-ca-certs for https"),
        ("ramp --protocol http --address http://h:1/v1", "not http://HOST:PORT"),
        ("ramp --protocol http --address h:1 --api-key k", "unencrypted"),
    ],
)
def test_what_cannot_work_is_said(flags, message):
    ended, _ = given(*flags.split())
    assert isinstance(ended.exception, ConfigError)
    assert re.search(message, str(ended.exception))


def test_flags_are_read():
    ended, ((load, own),) = given(
        "ramp", "--goodput", "ttft:500,tpot:40", "--rates", "4,1", "--watch", "verify=12",
        "--prompt-file", "a.jsonl", "--prompt-file", "b.jsonl", "--seconds", "9",
    )  # fmt: skip
    assert ended.exit_code == 3
    assert load.goals.latency == {"ttft": 500.0, "tpot": 40.0}
    assert load.watch == (("verify", 12),)
    assert load.requests.prompt_file == ("a.jsonl", "b.jsonl")
    assert own.rates == (1.0, 4.0)
    shown = load.shown(own)
    assert shown["prompt_file"] == "a.jsonl, b.jsonl"
    assert "address" not in shown
    _, ((load, own),) = given("overload", "--no-ignore-eos")
    assert (load.requests.rule, load.requests.ignore_eos) == ("exact", False)
    assert given("soak", "--watch", "verify")[0].exit_code == 2
    ended, found = given("ramp", "--goodput", "speed:3")
    assert (ended.exit_code, found) == (2, [])
    assert re.search(r"--goodput\s+speed:3:\s+not\s+METRIC:MS", ended.output)


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_every_scenario_explains_itself(scenario):
    ended, _ = given(scenario, "--help")
    assert "--prompt-file" in ended.output
    assert SCENARIOS[scenario].about
    assert SCENARIOS[scenario].__doc__


def test_only_what_must_know_locust_imports_it():
    code = (
        "import sys, loadtest.scenarios, loadtest.report\n"
        "assert not {'locust', 'torch', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
