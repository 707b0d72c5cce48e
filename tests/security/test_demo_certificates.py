"""The script that creates certificates for trying TLS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flyspec.client import AsyncClient, Credentials
from flyspec.security import TlsFiles
from tests.security.ports import listening

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
