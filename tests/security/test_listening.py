"""Secure defaults: what may listen where."""

from __future__ import annotations

import pytest

from flyspec.config import DraftSettings, OrchestratorSettings, VerifySettings
from flyspec.errors import ConfigError
from flyspec.security import PortSecurity, TlsFiles, is_loopback
from orchestrator.fleet.fleet import Fleet
from orchestrator.upstreams.connector import GrpcConnector
from tests.security.authority import files, flags


@pytest.mark.parametrize(
    ("host", "ours"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("", False), ("10.0.0.1", False), ("draft", False)],
)  # fmt: skip
def test_what_is_of_this_machine_alone(host, ours):
    assert is_loopback(host) is ours


def test_in_the_clear_only_on_loopback_unless_told_to():
    PortSecurity("127.0.0.1", TlsFiles()).check()
    PortSecurity("0.0.0.0", TlsFiles(), allow_insecure=True).check()
    with pytest.raises(ConfigError, match=r"--host 0.0.0.0: .*unencrypted.*--allow-insecure"):
        PortSecurity("0.0.0.0", TlsFiles()).check()
    with pytest.raises(ConfigError, match=r"--admin-host ::: .*unencrypted"):
        PortSecurity("::", TlsFiles(), prefix="admin-").check()


def test_encrypted_but_open_to_everybody_must_be_meant(ours):
    server = files(ours.server(), None)
    PortSecurity("127.0.0.1", server).check()
    PortSecurity("0.0.0.0", server, "none").check()
    PortSecurity("0.0.0.0", server, keys=True).check()
    PortSecurity("0.0.0.0", files(ours.server(), ours)).check()
    with pytest.raises(ConfigError, match=r"anyone who can reach it.*--ssl-client-auth none"):
        PortSecurity("0.0.0.0", server).check()


def test_certificates_of_clients_need_an_authority(ours):
    with pytest.raises(ConfigError, match="--ssl-client-auth required: needs TLS"):
        PortSecurity("127.0.0.1", TlsFiles(), "required").check()
    with pytest.raises(ConfigError, match="--ssl-client-auth required: give the CAs"):
        PortSecurity("127.0.0.1", files(ours.server(), None), "required").credentials()
    with pytest.raises(ConfigError, match="--ssl-ca-certs is given without --ssl-certfile"):
        PortSecurity("127.0.0.1", files(None, ours)).credentials()
    with pytest.raises(ConfigError, match="--ssl-client-names: needs client certificates"):
        PortSecurity("127.0.0.1", files(ours.server(), None), names=("a",)).check()


def _settings(kind, *given, **more):
    names = {
        f.removeprefix("--").replace("-", "_"): v
        for f, v in zip(given[::2], given[1::2], strict=True)
    }
    return kind(**names, **more)


def test_the_admin_port_asks_for_certificates_or_else_keys(ours):
    tls = flags(ours.server(), ours)
    both = _settings(OrchestratorSettings, *tls)
    assert both.port_security.wants_certificates
    assert both.admin_security.wants_certificates
    assert not both.admin_security.keys
    keyed = _settings(OrchestratorSettings, *tls, api_keys_file="k", ssl_client_auth="none")
    assert not keyed.port_security.wants_certificates
    assert keyed.port_security.keys
    assert keyed.admin_security.wants_certificates
    assert not keyed.admin_security.keys
    open_ = _settings(OrchestratorSettings, *tls, api_keys_file="k", admin_ssl_client_auth="none")
    assert open_.port_security.wants_certificates
    assert open_.admin_security.keys


def test_every_service_has_the_settings(ours, monkeypatch):
    pair = ours.server()
    for kind, prefix, more in (
        (DraftSettings, "DRAFT", {}),
        (VerifySettings, "VERIFY", {"model": "m"}),
        (OrchestratorSettings, "ORCHESTRATOR", {}),
    ):
        monkeypatch.setenv(f"FLYSPEC_{prefix}_SSL_CERTFILE", pair.certfile)
        monkeypatch.setenv(f"FLYSPEC_{prefix}_SSL_KEYFILE", pair.keyfile)
        monkeypatch.setenv(f"FLYSPEC_{prefix}_SSL_CA_CERTS", ours.file)
        monkeypatch.setenv(f"FLYSPEC_{prefix}_SSL_CLIENT_NAMES", "orchestrator, other")
        security = kind(host="0.0.0.0", **more).port_security
        assert security.credentials() is not None
        assert security.wants_certificates
        assert security.names == ("orchestrator", "other")


def _fleet(settings):
    return Fleet(settings, GrpcConnector(settings))


async def test_services_on_other_machines_are_not_spoken_to_in_the_clear(ours):
    remote = {"verify_address": "verify:50052"}
    with pytest.raises(ConfigError, match="--verify-address: traffic to verify would be"):
        _fleet(OrchestratorSettings(**remote))
    with pytest.raises(ConfigError, match="--draft-address: traffic to draft would be"):
        _fleet(OrchestratorSettings(draft_address="dns:///draft:50051"))
    _fleet(OrchestratorSettings(allow_insecure=True, **remote))
    _fleet(_settings(OrchestratorSettings, *flags(ours.server(), ours), **remote))
