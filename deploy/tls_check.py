"""A stack of containers with mutual TLS: who gets in, and who does not."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from deploy.containers import Containers
from deploy.findings import Log
from deploy.stack_check import (
    ADDRESS,
    ADMIN,
    OPTIONS,
    PORTS,
    PROMPTS,
    check_inside,
    wait_until_ready,
)
from flyspec.client import AdminClient, Client, Credentials
from flyspec.config import ADMIN_PORT
from flyspec.errors import FlyspecError, PermissionDeniedError, UnavailableError

SCRIPT = Path(__file__).resolve().parent / "demo_certificates.sh"


def make_certificates(containers: Containers, folder: Path, *names: str) -> None:
    """An authority of its own in `folder`, and its certificates of these names."""
    containers.run([str(SCRIPT), str(folder), *names])
    for path in [folder, *folder.rglob("*")]:  # containers run as nobody that this machine knows
        os.chown(path, 10001, 10001)


def mount_directories(manifest: str, folder: Path) -> str:
    """The same manifest with directories of `folder` in place of the Secrets `<service>-tls`.

    podman 4.3.1 mounts Secrets as volumes, but their values as they are, in base64.
    """
    documents = [document for document in yaml.safe_load_all(manifest) if document]
    for document in documents:
        if document["kind"] == "Deployment":
            for volume in document["spec"]["template"]["spec"]["volumes"]:
                if secret := volume.pop("secret", None):
                    service = secret["secretName"].removesuffix("-tls")
                    volume["hostPath"] = {"path": str(folder / service), "type": "Directory"}
    changed: str = yaml.safe_dump_all(documents)
    return changed


class TlsCheck:
    """The checks of a running stack whose certificates are of `ours`; `others` has an authority
    that it does not know.
    """

    def __init__(self, containers: Containers, log: Log, ours: Path, others: Path) -> None:
        self._containers, self._log = containers, log
        self._ours, self._others = ours, others

    def _credentials(self, folder: Path, name: str) -> Credentials:
        """A certificate, and our authority to check the server with."""
        own = folder / name
        return Credentials(
            ssl_ca_certs=str(self._ours / "client" / "ca.crt"),
            ssl_certfile=str(own / "tls.crt"),
            ssl_keyfile=str(own / "tls.key"),
        )

    async def run(self) -> None:
        """Everything."""
        client = self._credentials(self._ours, "client")
        operator = self._credentials(self._ours, "operator")
        await wait_until_ready(client, operator)
        await check_inside(self._containers, self._log)
        async with Client(ADDRESS, credentials=client) as user:
            generation = await user.complete(PROMPTS[0], OPTIONS)
        self._log.check("TLS: a client with a certificate generates",
                        len(generation.token_ids) == OPTIONS.max_tokens)  # fmt: skip
        for name, port in (
            ("generation", PORTS["orchestrator"]), ("admin", ADMIN_PORT),
            ("draft", PORTS["draft"]), ("verify", PORTS["verify"]),
        ):  # fmt: skip
            await self._refuses(name, f"127.0.0.1:{port}")
        async with AdminClient(ADMIN, client) as admin:
            try:
                await admin.status(10)
                refused = ""
            except FlyspecError as error:
                refused = type(error).__name__
        self._log.check("TLS: a client's certificate does not open the admin port",
                        refused == PermissionDeniedError.__name__, refused)  # fmt: skip

    async def _refuses(self, port: str, address: str) -> None:
        """In the clear, without a certificate, and with another authority's."""
        found = []
        for given in (
            Credentials(),
            Credentials(ssl_ca_certs=str(self._ours / "client" / "ca.crt")),
            self._credentials(self._others, "operator"),
        ):
            async with Client(address, credentials=given) as client:
                try:
                    found.append(await client.check_health())
                except FlyspecError as error:
                    found.append(type(error).__name__)
        self._log.check(f"TLS: the {port} port refuses the clear, no certificate and another "
                        "authority's", found == [UnavailableError.__name__] * 3,
                        ", ".join(found))  # fmt: skip
