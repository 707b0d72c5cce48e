"""Calls to the orchestrator's admin port."""

from __future__ import annotations

from typing import Any

from flyspec import wire
from flyspec.client.connection import AsyncConnection
from flyspec.config import ADMIN_PORT, TOKENIZER_TIMEOUT_S
from flyspec.credentials import Credentials
from flyspec.v1 import admin_pb2, admin_pb2_grpc
from flyspec.values.admin import DrafterStatus, Status

REGISTER_TIMEOUT_S = TOKENIZER_TIMEOUT_S + 30.0
"""Default time limit of registering a drafter: the orchestrator's own come first."""
DEFAULT_ADMIN_ADDRESS = f"127.0.0.1:{ADMIN_PORT}"


class AdminClient(AsyncConnection):
    """Client of the admin service. Methods raise `FlyspecError`, as `admin.proto` documents."""

    _kind, _default_port = "admin", ADMIN_PORT

    def __init__(
        self, address: str = DEFAULT_ADMIN_ADDRESS, credentials: Credentials | None = None
    ) -> None:
        super().__init__(address, credentials)

    async def status(self, timeout_s: float = 10.0) -> Status:
        response = await self._ask("GetStatus", admin_pb2.GetStatusRequest(), timeout_s)
        return wire.decode(Status, response)

    async def list_drafters(self, timeout_s: float = 10.0) -> list[DrafterStatus]:
        """List the drafters, the active one first."""
        response = await self._ask("ListDrafters", admin_pb2.ListDraftersRequest(), timeout_s)
        return [wire.decode(DrafterStatus, d) for d in response.drafters]

    async def register_drafter(
        self, name: str, address: str, kind: str = "", timeout_s: float = REGISTER_TIMEOUT_S
    ) -> tuple[DrafterStatus, int]:
        """Add a drafter or a replica of it. Return it and the time of its test proposal, ns.

        A drafter with another tokenizer first prepares the target's, for up to the orchestrator's
        `--tokenizer-timeout-s`.
        """
        request = admin_pb2.RegisterDrafterRequest(name=name, address=address, kind=kind)
        response = await self._ask("RegisterDrafter", request, timeout_s)
        return wire.decode(DrafterStatus, response.drafter), response.probe_ns

    async def activate_drafter(
        self, name: str, share: float | None = None, timeout_s: float = 10.0
    ) -> DrafterStatus:
        """Make a drafter the default, or give it a share of new generations (0: end that)."""
        request = admin_pb2.ActivateDrafterRequest(name=name, share=share)
        return await self._drafter("ActivateDrafter", request, timeout_s)

    async def drain_drafter(self, name: str, wait_s: float = 0.0) -> DrafterStatus:
        """Give a drafter no new work; wait up to `wait_s` for its generations to leave."""
        request = admin_pb2.DrainDrafterRequest(name=name, wait_ms=round(wait_s * 1000))
        return await self._drafter("DrainDrafter", request, wait_s + 10.0)

    async def remove_drafter(self, name: str, force: bool = False, timeout_s: float = 10.0) -> None:
        """Remove a drafter; with `force` even if generations use it."""
        request = admin_pb2.RemoveDrafterRequest(name=name, force=force)
        await self._ask("RemoveDrafter", request, timeout_s)

    async def drain(self, resume: bool = False, timeout_s: float = 10.0) -> int:
        """Refuse new requests, or accept them again. Return the number of running generations."""
        response = await self._ask("Drain", admin_pb2.DrainRequest(resume=resume), timeout_s)
        return int(response.active_generations)

    async def _drafter(self, method: str, request: Any, timeout_s: float) -> DrafterStatus:
        return wire.decode(DrafterStatus, (await self._ask(method, request, timeout_s)).drafter)

    async def _ask(self, method: str, request: Any, timeout_s: float) -> Any:
        stub = admin_pb2_grpc.AdminServiceStub(self._channel)
        return await self._call(getattr(stub, method), request, timeout_s)
