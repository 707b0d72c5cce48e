"""The operator API: `AdminService`, served on its own port."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from flyspec import rpc, wire
from flyspec.v1 import admin_pb2, admin_pb2_grpc
from flyspec.values.admin import Status
from orchestrator.admission.admission import Admission
from orchestrator.fleet.drafter import RegisteredDrafter
from orchestrator.fleet.fleet import Fleet
from orchestrator.front.statuses import drafter_status, replica_status

log = logging.getLogger(__name__)


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Reports status and manages drafters and draining."""

    def __init__(self, fleet: Fleet, admission: Admission, servers: list[rpc.GrpcServer]) -> None:
        self._fleet, self._admission = fleet, admission
        self._servers = servers
        """Generation servers; their health reflects whether requests are accepted."""

    @rpc.handler
    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: Any
    ) -> admin_pb2.GetStatusResponse:
        fleet, admission = self._fleet, self._admission
        pools = fleet.drafters.pools
        await asyncio.gather(fleet.targets.refresh(), *(pool.refresh() for pool in pools))
        targets = [replica_status(r) for r in fleet.targets.replicas]
        drafters = [replica_status(r) for pool in pools for r in pool.replicas]
        status: admin_pb2.GetStatusResponse = wire.encode(
            Status(
                ready=any(target.ready for target in targets),
                active_generations=admission.active,
                waiting_generations=admission.waiting,
                targets=targets,
                drafters=drafters,
                outstanding_tokens=admission.outstanding_tokens,
                draining=admission.draining,
                refused_total=admission.refused_total,
            )
        )
        return status

    @rpc.handler
    async def ListDrafters(
        self, request: admin_pb2.ListDraftersRequest, context: Any
    ) -> admin_pb2.ListDraftersResponse:
        drafters = self._fleet.drafters.all
        return admin_pb2.ListDraftersResponse(drafters=[self._status(d) for d in drafters])

    @rpc.handler
    async def RegisterDrafter(
        self, request: admin_pb2.RegisterDrafterRequest, context: Any
    ) -> admin_pb2.RegisterDrafterResponse:
        drafter, probe_ns = await self._fleet.drafters.register(
            request.name, request.address, request.kind
        )
        return admin_pb2.RegisterDrafterResponse(drafter=self._status(drafter), probe_ns=probe_ns)

    @rpc.handler
    async def ActivateDrafter(
        self, request: admin_pb2.ActivateDrafterRequest, context: Any
    ) -> admin_pb2.ActivateDrafterResponse:
        share = request.share if request.HasField("share") else None
        drafter = self._fleet.drafters.activate(request.name, share)
        return admin_pb2.ActivateDrafterResponse(drafter=self._status(drafter))

    @rpc.handler
    async def DrainDrafter(
        self, request: admin_pb2.DrainDrafterRequest, context: Any
    ) -> admin_pb2.DrainDrafterResponse:
        drafter = await self._fleet.drafters.drain(request.name, request.wait_ms / 1000)
        return admin_pb2.DrainDrafterResponse(drafter=self._status(drafter))

    @rpc.handler
    async def RemoveDrafter(
        self, request: admin_pb2.RemoveDrafterRequest, context: Any
    ) -> admin_pb2.RemoveDrafterResponse:
        await self._fleet.drafters.remove(request.name, request.force)
        return admin_pb2.RemoveDrafterResponse()

    @rpc.handler
    async def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.DrainResponse:
        if request.resume:
            self._admission.resume()
        else:
            self._admission.drain()
        for server in self._servers:
            await server.set_ready(request.resume)
        log.info("%s", "accepting requests again" if request.resume else "not accepting requests")
        return admin_pb2.DrainResponse(active_generations=self._admission.active)

    def _status(self, drafter: RegisteredDrafter) -> admin_pb2.DrafterStatus:
        status = drafter_status(drafter, self._fleet.target.info.model)
        message: admin_pb2.DrafterStatus = wire.encode(status)
        return message
