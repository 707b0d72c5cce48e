"""The installation under test: started here, or running at an address."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flyspec.client import AdminClient, AsyncClient, Credentials
from flyspec.errors import FlyspecError
from tests.waiting import until

PORTS = ("address", "admin_address", "draft_address", "verify_address")


@dataclass(frozen=True)
class Installation:
    """Addresses and credentials of an installation; addresses that are not known are empty."""

    address: str
    admin_address: str = ""
    draft_address: str = ""
    verify_address: str = ""
    credentials: Credentials = field(default_factory=Credentials)
    operator: Credentials = field(default_factory=Credentials)

    def client(self) -> AsyncClient:
        """A client of the generation port."""
        return AsyncClient(self.address, credentials=self.credentials, max_retries=0)

    def admin(self) -> AdminClient:
        """A client of the admin port; skips the test if that is not known."""
        if not self.admin_address:
            pytest.skip("--admin-address is not given")
        return AdminClient(self.admin_address, self.operator)

    def environment(self) -> dict[str, str]:
        """Environment in which `flyspec` commands have the client's credentials."""
        given = {
            "FLYSPEC_API_KEY": self.credentials.api_key,
            "FLYSPEC_SSL_CA_CERTS": self.credentials.ssl_ca_certs,
            "FLYSPEC_SSL_CERTFILE": self.credentials.ssl_certfile,
            "FLYSPEC_SSL_KEYFILE": self.credentials.ssl_keyfile,
        }
        return os.environ | {name: value for name, value in given.items() if value}

    async def is_serving(self) -> bool:
        """True if the orchestrator serves now, over a new connection."""
        try:
            async with self.client() as client:
                return await client.check_health(timeout_s=1.0) == "SERVING"
        except FlyspecError:
            return False

    async def ready(self) -> None:
        """Wait until the orchestrator serves and, if it can be asked, both services are ready."""

        async def is_ready() -> bool:
            await asyncio.sleep(0.2)
            if not await self.is_serving():
                return False
            if not self.admin_address:
                return True
            try:
                async with self.admin() as admin:
                    status = await admin.status()
            except FlyspecError:
                return False
            return status.verify.ready and status.draft.ready

        await until(is_ready, seconds=900.0)


def credentials_from(folder: Path | None, name: str, api_key: str = "") -> Credentials:
    """Credentials of `name` in a folder of deploy/demo_certificates.sh; None: no TLS."""
    if folder is None:
        return Credentials(api_key=api_key)
    own = folder / name
    return Credentials(
        api_key=api_key,
        ssl_ca_certs=str(own / "ca.crt"),
        ssl_certfile=str(own / "tls.crt"),
        ssl_keyfile=str(own / "tls.key"),
    )
