"""Certificates change under load: no stream ends, and new connections use the new ones."""

from __future__ import annotations

import asyncio
import shutil
import ssl

import grpc

from flyspec import rpc
from flyspec.security import ChannelSecurity
from tests.security.authority import Authority, files, replace_files
from tests.security.ports import STREAM, listening
from tests.waiting import until

STREAMS = 24


class Reader:
    """A stream that echoes numbers, all of them in order."""

    def __init__(self, link: rpc.Link) -> None:
        self.count = 0
        self._call = link.channel.stream_stream(STREAM)()
        self._ending = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._ending.is_set():
            await self._call.write(str(self.count).encode())
            assert await self._call.read() == str(self.count).encode()
            self.count += 1
        await self._call.done_writing()
        assert await self._call.read() is grpc.aio.EOF
        assert await self._call.code() is grpc.StatusCode.OK

    async def end(self) -> None:
        self._ending.set()
        await self.task


async def go_on(*readers: Reader) -> None:
    """Wait until each of them has read more."""
    counts = [reader.count for reader in readers]

    def have_read() -> bool:
        assert not any(reader.task.done() for reader in readers)
        return all(r.count > n for r, n in zip(readers, counts, strict=True))

    await until(have_read)


async def served(address: str, link_files) -> str:
    """The name in the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=link_files.ca_certs)
    context.load_cert_chain(link_files.certfile, link_files.keyfile)
    _, writer = await asyncio.open_connection(*address.split(":"), ssl=context)
    subject = writer.get_extra_info("peercert")["subject"]
    writer.close()
    return subject[0][0][1]


async def test_no_stream_ends_when_both_sides_get_new_certificates(ours):
    server, client = ours.server(), ours.pair("client")
    server_files, client_files = files(server, ours), files(client, ours)
    async with listening(server_files) as address:
        link = rpc.Link(address, ChannelSecurity(client_files))
        first = link.channel
        readers = [Reader(link) for _ in range(STREAMS)]
        for step in range(3):
            await asyncio.sleep(0.1)
            replace_files(server, ours.server(f"server-{step}"))
            replace_files(client, ours.pair(f"client-{step}"))
            readers += [Reader(link) for _ in range(STREAMS // 4)]
            assert await served(address, client_files) == f"server-{step}"
        assert link.channel is not first
        await go_on(*readers)
        await asyncio.gather(*(reader.end() for reader in readers))
        await link.close()


async def test_another_authority_is_taken_up_and_the_old_one_no_longer_trusted(ours, tmp_path):
    server, client = ours.server(), ours.pair("client")
    server_files, client_files = files(server, ours), files(client, ours)
    async with listening(server_files) as address:
        link = rpc.Link(address, ChannelSecurity(client_files))
        reader = Reader(link)
        await go_on(reader)
        (tmp_path / "next").mkdir()
        following = Authority(tmp_path / "next", "next")
        left_behind = ours.pair("left-behind")
        shutil.copyfile(following.file, ours.file)
        replace_files(server, following.server())
        replace_files(client, following.pair("client"))
        second = Reader(link)
        await go_on(reader, second)
        await asyncio.gather(reader.end(), second.end())
        await link.close()
        stranger = rpc.Link(
            address, ChannelSecurity(files(left_behind, following)), server_name="localhost"
        )
        call = stranger.channel.stream_stream(STREAM)()
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await stranger.close()


async def test_who_is_no_longer_accepted_gets_nothing_new_but_what_runs_goes_on(
    ours, others, monkeypatch
):
    monkeypatch.setattr(rpc.server, "CONNECTION_AGE_MS", 300)
    server = ours.server()
    server_files, client_files = files(server, ours), files(ours.pair("client"), ours)
    async with listening(server_files) as address:
        link = rpc.Link(address, ChannelSecurity(client_files))
        reader = Reader(link)
        channel = link.channel
        await go_on(reader)
        shutil.copyfile(others.file, ours.file)  # of which the client takes no notice here
        check = channel.unary_unary("/grpc.health.v1.Health/Check")

        async def refused() -> bool:
            code = await check(b"").code()
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
            return code is grpc.StatusCode.UNAVAILABLE

        await until(refused)
        await go_on(reader)
        await reader.end()
        await link.close()
