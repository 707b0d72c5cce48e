"""Servers with only health and a method that streams as long as it is read."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc

from flyspec import rpc
from flyspec.security import PortSecurity, TlsFiles

STREAM = "/test.Test/Stream"


class _Test(grpc.GenericRpcHandler):
    def service(self, call):
        if call.method == STREAM:
            return grpc.stream_stream_rpc_method_handler(self._stream, bytes, bytes)
        return None

    @rpc.handler
    async def _stream(self, request, context):
        while (message := await rpc.read(context, 60.0)) is not None:
            await rpc.write(context, message, 60.0)
            await asyncio.sleep(0.002)


def _add(_, server):
    server.add_generic_rpc_handlers((_Test(),))


@asynccontextmanager
async def listening(tls: TlsFiles, *args, **more):
    """The address of a port with that security."""
    security = PortSecurity("127.0.0.1", tls, *args, **more)
    server = rpc.GrpcServer(
        "127.0.0.1",
        0,
        [(_add, None)],
        ["test.Test"],
        credentials=security.credentials(),
        checks=rpc.checks_of(security),
    )
    port = await server.start()
    await server.set_ready(True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
