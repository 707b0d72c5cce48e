"""TLS on a port: which clients get a connection, and what the others see."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flyspec.client import AsyncClient, Credentials
from flyspec.config import OrchestratorSettings
from flyspec.errors import ConfigError, UnavailableError
from flyspec.security import TlsFiles
from orchestrator.fleet.fleet import Fleet
from orchestrator.upstreams.connector import GrpcConnector
from tests.security.authority import DAY, credentials, files
from tests.security.ports import listening


async def health(address: str, given: Credentials) -> str:
    async with AsyncClient(address, credentials=given, max_retries=0) as client:
        return await client.check_health()


async def refused(address: str, given: Credentials) -> str:
    """The error of a client that gets no connection."""
    with pytest.raises(UnavailableError) as caught:
        await health(address, given)
    return str(caught.value)


async def test_a_server_that_is_not_to_be_trusted_is_not_spoken_to(ours, others, monkeypatch):
    async with listening(files(others.server(), None)) as address:
        assert "is not trusted: unable to get local issuer" in await refused(
            address, credentials(ours)
        )
    async with listening(files(ours.pair("elsewhere"), None)) as address:
        assert "is not for 127.0.0.1; use one of its" in await refused(address, credentials(ours))
        assert await health(address, credentials(ours, ssl_target_name="elsewhere")) == "SERVING"
    monkeypatch.setattr("flyspec.security.certificates._check_pair", lambda *_: None)
    async with listening(files(ours.server(end=-DAY / 24), None)) as address:
        assert "certificate has expired" in await refused(address, credentials(ours))


async def test_tls_and_none_do_not_understand_each_other_and_the_client_says_what_to_do(ours):
    async with listening(files(None, None)) as address:
        assert "does not use TLS" in await refused(address, credentials(ours))
    async with listening(files(ours.server(), None)) as address:
        assert "if it uses TLS, give ssl_ca_certs" in await refused(address, Credentials())
        assert await health(address, credentials(ours)) == "SERVING"


async def test_a_key_does_not_travel_in_the_clear(ours):
    AsyncClient("127.0.0.1:1", credentials=Credentials("fsk_x"), max_retries=0)
    AsyncClient("elsewhere:1", credentials=credentials(ours, api_key="fsk_x"), max_retries=0)
    AsyncClient("elsewhere:1", credentials=Credentials("fsk_x", allow_insecure=True), max_retries=0)
    with pytest.raises(ConfigError, match="would be sent to elsewhere:1 unencrypted"):
        AsyncClient("elsewhere:1", credentials=Credentials("fsk_x"), max_retries=0)
    assert "fsk_x" not in repr(Credentials("fsk_x"))


def test_a_key_that_cannot_be_sent_is_told_before():
    assert Credentials("fsk_x\n").metadata() == (("authorization", "Bearer fsk_x"),)
    assert Credentials().metadata() == ()
    for key in ("fsk_\nx", "fsk_\u00e4"):
        with pytest.raises(ConfigError, match="contains invalid characters") as caught:
            AsyncClient("127.0.0.1:1", credentials=Credentials(key), max_retries=0)
        assert key not in str(caught.value)


async def test_a_replica_found_by_a_name_must_have_that_name_in_its_certificate(ours):
    async with listening(files(ours.pair("localhost"), None)) as address:
        port = address.rpartition(":")[2]
        settings = OrchestratorSettings(ssl_ca_certs=ours.file)
        fleet = Fleet(settings, GrpcConnector(settings))
        for spec, problem in {
            f"dns:///localhost:{port}": "DraftService is at the port of a draft service",
            f"127.0.0.1:{port}": "Hostname Verification Check failed",
        }.items():
            pool = fleet._connect_drafter(spec, "x")
            await pool.start()
            replica = next(r for r in pool.replicas if r.address == address)
            assert problem in replica.problem
            await pool.close()
        await fleet.close()


SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "demo_certificates.sh"


def make(folder: Path, *names: str) -> None:
    subprocess.run(["sh", str(SCRIPT), str(folder), *names], check=True, capture_output=True)


def content(file: str) -> bytes:
    return Path(file).read_bytes()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
async def test_its_certificates_are_accepted_and_can_be_made_anew(tmp_path):
    make(tmp_path, "verify", "client")
    file = {n: {f: str(tmp_path / n / f) for f in ("tls.crt", "tls.key", "ca.crt")}
            for n in ("verify", "client")}  # fmt: skip
    given = Credentials(
        ssl_ca_certs=file["client"]["ca.crt"],
        ssl_certfile=file["client"]["tls.crt"],
        ssl_keyfile=file["client"]["tls.key"],
    )
    async with listening(TlsFiles(*file["verify"].values())) as address:
        for _ in range(2):
            async with AsyncClient(address, credentials=given, max_retries=0) as client:
                assert await client.check_health() == "SERVING"
            before = content(file["verify"]["tls.crt"])
            make(tmp_path, "verify")
            assert content(file["verify"]["tls.crt"]) != before
