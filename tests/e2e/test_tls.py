"""Who gets in where every port asks for a certificate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flyspec.client import AdminClient, AsyncClient, Credentials
from flyspec.errors import PermissionDeniedError, UnavailableError
from tests.e2e.installation import PORTS
from tests.security.authority import Authority


@pytest.fixture
def certificates(stack):
    """What the installation's operator has; skips the test if there is no TLS."""
    if not stack.operator.ssl_certfile:
        pytest.skip("--certificates is not given")
    return stack.operator


@pytest.mark.parametrize("port", PORTS)
async def test_ports_refuse_no_tls_no_certificate_and_other_authorities(
    stack, certificates, port, tmp_path
):
    address = getattr(stack, port)
    if not address:
        pytest.skip(f"--{port.replace('_', '-')} is not given")
    other = Authority(tmp_path, "others").pair("operator")
    for given in (
        Credentials(),
        Credentials(ssl_ca_certs=certificates.ssl_ca_certs),
        replace(certificates, ssl_certfile=other.certfile, ssl_keyfile=other.keyfile),
    ):
        async with AsyncClient(address, credentials=given, max_retries=0) as client:
            with pytest.raises(UnavailableError):
                await client.check_health()


async def test_a_clients_certificate_does_not_open_the_admin_port(stack, certificates):
    async with stack.admin() as admin:
        assert (await admin.status()).ready
    async with AdminClient(stack.admin_address, stack.credentials) as admin:
        with pytest.raises(PermissionDeniedError):
            await admin.status()
