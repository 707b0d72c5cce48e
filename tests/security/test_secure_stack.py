"""The three services as processes, with mutual TLS between them, API keys for clients."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys

import grpc
import psutil
import pytest

from flyspec import rpc
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.client import AdminClient, AsyncClient, GenerateOptions
from flyspec.errors import PermissionDeniedError, UnavailableError
from flyspec.rules import Rule
from flyspec.security import ApiKey, ChannelSecurity, Scope
from flyspec.security.keys import entry_of, new_key
from flyspec.v1 import verify_pb2, verify_pb2_grpc
from tests.security.authority import (
    DAY,
    Authority,
    credentials,
    files,
    flags,
    replace_files,
    unchecked,
)  # fmt: skip
from tests.tiny import make_model
from tests.waiting import until

EXACT = GenerateOptions(
    rule=Rule("exact"), max_tokens=60, ignore_eos=True, num_speculative_tokens=2
)
NUM_PORTS = 7
"""Generation, admin, draft, verify, and three of metrics."""


class Secure:
    """The stack, its authorities, certificates and a key."""

    def __init__(self, folder) -> None:
        self.ours, self.others = Authority(folder, "ours"), Authority(folder, "others")
        self.service = self.ours.server("service")
        self.orchestrator = self.ours.server("orchestrator")
        self.operator = self.ours.pair("operator")
        self.key = new_key()
        keys = folder / "keys.toml"
        keys.write_text(entry_of(self.key, ApiKey("team", frozenset({Scope.GENERATE}))))
        models = [make_model(folder / n, seed=i) for i, n in enumerate(("target", "draft"))]
        names = ("--ssl-client-names", "orchestrator")
        self.options = StackOptions(
            model=str(models[0]),
            draft_model=str(models[1]),
            dtype="float64",
            draft_dtype="float64",
            service_flags=(*flags(self.service, self.ours), *names),
            orchestrator_flags=(
                *flags(self.orchestrator, self.ours),
                *("--ssl-client-auth", "none", "--api-keys-file", str(keys)),
                *("--admin-ssl-client-names", "operator"),
            ),
        )
        self.stack: Stack

    def client(self) -> AsyncClient:
        given = credentials(self.ours, api_key=self.key)
        return AsyncClient(self.stack.address, credentials=given, max_retries=0)

    def admin(self, pair=None) -> AdminClient:
        return AdminClient(self.stack.admin_address, credentials(self.ours, pair))

    def environment(self, pair) -> dict[str, str]:
        """For the command line."""
        return {
            **os.environ,
            "FLYSPEC_API_KEY": self.key,
            "FLYSPEC_SSL_CA_CERTS": self.ours.file,
            "FLYSPEC_SSL_CERTFILE": pair.certfile,
            "FLYSPEC_SSL_KEYFILE": pair.keyfile,
        }


@pytest.fixture(scope="module")
async def secure(tmp_path_factory):
    found = Secure(tmp_path_factory.mktemp("secure"))
    async with Stack(found.options) as found.stack:
        yield found


@pytest.mark.parametrize("port", ["verify_address", "draft_address", "admin_address"])
async def test_without_a_certificate_with_a_wrong_one_with_an_expired_one_refused(secure, port):
    address = getattr(secure.stack.options, port)
    stranger = secure.others.pair("orchestrator", stem="wrong")
    for given, said in (
        (credentials(), "if it uses TLS, give ssl_ca_certs"),
        (credentials(secure.ours), "if it requires a client certificate, give ssl_certfile"),
        (credentials(secure.ours, stranger), "the certificate in ssl_certfile may"),
    ):
        async with AsyncClient(address, credentials=given, max_retries=0) as client:
            with pytest.raises(UnavailableError, match=f"no connection to .*: .*{said}"):
                await client.check_health()
    expired = secure.ours.pair("orchestrator", end=-DAY / 24, stem="expired")
    async with rpc.connect(address, unchecked(secure.ours, expired)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_of_another_part_may_not_do_the_orchestrators_work(secure):
    request = verify_pb2.VerifyServiceDescribeRequest()
    for pair, status in (
        (secure.service, grpc.StatusCode.PERMISSION_DENIED),
        (secure.operator, grpc.StatusCode.PERMISSION_DENIED),
        (secure.orchestrator, grpc.StatusCode.OK),
    ):
        link = rpc.Link(
            secure.stack.options.verify_address, ChannelSecurity(files(pair, secure.ours))
        )
        call = verify_pb2_grpc.VerifyServiceStub(link.channel).Describe(request)
        assert await call.code() is status
        await link.close()
    async with secure.admin(secure.operator) as admin:
        assert (await admin.status()).ready
    async with secure.admin(secure.orchestrator) as admin:
        with pytest.raises(PermissionDeniedError, match=r"name \(.*orchestrator"):
            await admin.drain()
    # Probes of a service come with the service's own.
    own = credentials(secure.ours, secure.service)
    address = secure.stack.options.verify_address
    async with AsyncClient(address, credentials=own, max_retries=0) as client:
        assert await client.check_health() == "SERVING"


async def test_a_drafter_that_is_registered_is_spoken_to_over_tls(secure):
    port = secure.stack.options.draft_address.rpartition(":")[2]
    async with secure.admin(secure.operator) as admin:
        drafter, _ = await admin.register_drafter("second", f"dns:///localhost:{port}")
        assert drafter.usable
        await admin.drain_drafter("second", 5.0)
        await admin.remove_drafter("second")


def listening_ports(stack: Stack) -> set[tuple[str, int]]:
    """Where the processes of the stack listen."""
    found = set()
    for service in stack.services.values():
        parent = psutil.Process(service.pid)
        for process in (parent, *parent.children(recursive=True)):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip, connection.laddr.port))
    return found


def answer_in_the_clear(address: tuple[str, int], question: bytes) -> bytes:
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(question)
        answer = b""
        try:
            while len(answer) < 1024 and (more := connection.recv(1024)):
                answer += more
        except OSError:  # it hung up on us
            pass
        return answer


def speaks_tls(address: tuple[str, int], authority: Authority, pair) -> str:
    context = ssl.create_default_context(cafile=authority.file)
    context.load_cert_chain(pair.certfile, pair.keyfile)
    with (
        socket.create_connection(address, timeout=5) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as secured,
    ):
        return secured.version() or ""


async def test_nothing_listens_in_the_clear(secure):
    ports = listening_ports(secure.stack)
    assert len(ports) == NUM_PORTS, ports
    questions = (
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]),
    )
    for port in sorted(ports):
        for question in questions:
            answer = await asyncio.to_thread(answer_in_the_clear, port, question)
            # Nothing at all, or an alert of TLS.
            assert not answer or answer[0] == 0x15, (port, answer)
        version = await asyncio.to_thread(speaks_tls, port, secure.ours, secure.orchestrator)
        assert version in ("TLSv1.2", "TLSv1.3"), port


@pytest.mark.slow
async def test_new_certificates_on_all_sides_under_load_drop_no_stream(secure):
    async with secure.client() as client:
        expected = (await client.complete("the cat", EXACT)).token_ids
        running = [asyncio.create_task(client.complete("the cat", EXACT)) for _ in range(4)]
        for step in range(3):
            await asyncio.sleep(0.15)
            replace_files(secure.service, secure.ours.server(f"service-{step}"))
            replace_files(
                secure.orchestrator,
                secure.ours.pair("orchestrator", "localhost", "127.0.0.1", stem=f"new-{step}"),
            )
            running.append(asyncio.create_task(client.complete("the cat", EXACT)))
        for generation in await asyncio.gather(*running):
            assert generation.token_ids == expected
            assert not generation.completion.recoveries
        # The watch over the services goes on with the new ones, too: after two of its probes.
        await asyncio.sleep(2.5)
        async with secure.admin(secure.operator) as admin:

            async def all_ready() -> bool:
                status = await admin.status()
                return status.ready and all(u.ready for u in (*status.targets, *status.drafters))

            await until(all_ready)
        generation = await client.complete("the cat", EXACT)
        assert not generation.completion.recoveries


def flyspec(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = "import sys; from flyspec.cli.main import main; sys.argv[0] = 'flyspec'; main()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.mark.slow
async def test_the_command_line_takes_keys_and_certificates_from_the_environment(secure):
    stack, env = secure.stack, secure.environment(secure.operator)

    async def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        changed = {k: v for k, v in {**env, **changes}.items() if v}
        return await asyncio.to_thread(flyspec, *arguments, env=changed)

    generate = ("generate", "--address", stack.address, "--max-tokens", "4", "--json", "the cat")
    made = await run(*generate)
    assert len(json.loads(made.stdout)["token_ids"]) == 4, made.stderr
    made = await run(*generate, FLYSPEC_API_KEY="")
    assert made.returncode == 1
    assert "error: no API key" in made.stderr
    made = await run(*generate, FLYSPEC_SSL_CA_CERTS=secure.others.file)
    assert "certificate is not trusted" in made.stderr
    assert "Handshake failed" not in made.stderr  # gRPC's own words
    made = await run("drafters", "list", "--admin-address", stack.admin_address, "--json")
    assert json.loads(made.stdout)["drafters"]
    probe = ("healthcheck", "--address", stack.options.verify_address)
    assert (await run(*probe)).returncode == 0
    made = await run(*probe, FLYSPEC_SSL_CERTFILE="", FLYSPEC_SSL_KEYFILE="")
    assert made.returncode == 1
    assert "give --ssl-certfile and --ssl-keyfile" in made.stdout


@pytest.mark.usefixtures("default_ports")
def test_serve_says_at_once_what_is_not_secure(secure):
    """One of `preflight`'s checks, whose errors have tests of their own."""
    given = ("--port", "0", "--admin-port", "0", "--ssl-certfile", secure.service.certfile)
    said = flyspec("serve", *given, env={**os.environ})
    assert said.returncode == 2
    assert "error: --ssl-certfile is given without" in said.stderr


def test_services_with_certificates_by_environment_are_spoken_to_over_tls(monkeypatch):
    stack = Stack(StackOptions(model="m", draft_model=""))
    assert not stack.options.services_speak_tls()
    monkeypatch.setenv("FLYSPEC_VERIFY_SSL_CERTFILE", "tls.crt")
    monkeypatch.setenv("FLYSPEC_VERIFY_SSL_KEYFILE", "tls.key")
    assert stack.options.services_speak_tls()
