"""The metrics port: where it listens, TLS, and bad requests."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import threading
import urllib.error
import urllib.request
from contextlib import closing

import pytest

from flyspec.config import DraftSettings, OrchestratorSettings
from flyspec.errors import ConfigError
from flyspec.security import PortSecurity, TlsFiles
from flyspec.telemetry import Telemetry
from flyspec.telemetry.metrics import new_registry
from flyspec.telemetry.port import MetricsPort
from tests.observability.scraping import parse, scrape
from tests.security.authority import Authority

LOOPBACK = PortSecurity("127.0.0.1", TlsFiles())


@pytest.fixture
def port():
    opened = MetricsPort(LOOPBACK, 0, new_registry("test"))
    yield opened
    opened.close()


def test_metrics_are_at_their_path_alone(port):
    found = scrape(port.port)
    assert found.total("flyspec_build_info", service="test") == 1
    assert "process_resident_memory_bytes" in found.names
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{port.port}/", timeout=5)
    assert caught.value.code == 404


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_on_loopback_no_page_reads_metrics_under_a_name_of_its_own(host):
    security = PortSecurity(host, TlsFiles(), allow_insecure=True)
    opened = MetricsPort(security, 0, new_registry("test"))
    codes = []
    for name in ("localhost", "10.0.0.1:9464", "prometheus.example"):
        connection = http.client.HTTPConnection("127.0.0.1", opened.port, timeout=30)
        connection.request("GET", "/metrics", headers={"host": name})
        codes.append(connection.getresponse().status)
        connection.close()
    opened.close()
    assert codes == [200, 200, 200 if host == "0.0.0.0" else 403]


def test_a_port_in_use_is_said(port):
    with pytest.raises(ConfigError, match=r"--metrics-port .*choose another port"):
        MetricsPort(LOOPBACK, port.port, new_registry("test"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (DraftSettings(port=0), "some"),
        (DraftSettings(port=0, metrics_port=-1), None),
        (OrchestratorSettings(port=0, metrics_port=0), "some"),
    ],
)
def test_which_port(settings, expected):
    with closing(Telemetry("draft", settings)) as telemetry:
        port = telemetry.listen()
        assert port is None if expected is None else 1024 <= port <= 65535


def test_a_default_port_in_use_stops_nobody(monkeypatch, port):
    """Two stacks on one machine without configured metrics ports."""
    from flyspec.telemetry import service

    monkeypatch.setitem(service.DEFAULT_PORTS, "draft", port.port)
    with closing(Telemetry("draft", DraftSettings(port=50051))) as telemetry:
        assert telemetry.listen() not in (None, port.port)


def serial_of(port: int, context: ssl.SSLContext) -> str:
    """The serial number of the certificate that a port shows."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        return connection.getpeercert()["serialNumber"]


def fetch(port: int, context: ssl.SSLContext):
    url = f"https://localhost:{port}/metrics"
    with urllib.request.urlopen(url, timeout=5, context=context) as response:
        return parse(response.read().decode())


def test_over_tls_with_certificates_that_are_read_again(tmp_path):
    authority = Authority(tmp_path)
    server, client = authority.server(), authority.pair("prometheus")
    files = TlsFiles(server.certfile, server.keyfile, authority.file)
    opened = MetricsPort(PortSecurity("127.0.0.1", files), 0, new_registry("test"))
    refused = (ssl.SSLError, urllib.error.URLError, ConnectionError)
    try:
        context = ssl.create_default_context(cafile=authority.file)
        with pytest.raises(refused):
            fetch(opened.port, context)
        context.load_cert_chain(client.certfile, client.keyfile)
        assert fetch(opened.port, context).names
        silent = [socket.create_connection(("127.0.0.1", opened.port)) for _ in range(5)]
        assert fetch(opened.port, context).names
        for connection in silent:
            connection.close()
        with pytest.raises(refused):
            urllib.request.urlopen(f"http://127.0.0.1:{opened.port}/metrics", timeout=5)
        before = serial_of(opened.port, context)
        authority.server()  # the same files, another certificate
        assert serial_of(opened.port, context) != before
        assert fetch(opened.port, context).names
    finally:
        opened.close()


def test_certificates_that_cannot_be_used_are_said(tmp_path):
    files = TlsFiles(str(tmp_path / "no.crt"), str(tmp_path / "no.key"))
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        MetricsPort(PortSecurity("127.0.0.1", files), 0, new_registry("test"))


async def test_a_loop_that_does_not_come_round_fails_the_scrape(monkeypatch):
    from flyspec.telemetry import metrics

    telemetry = Telemetry("draft", DraftSettings(port=0))
    telemetry.collect(lambda: [metrics.gauge("flyspec_test", "A test.", 1)])
    port = telemetry.listen()
    try:
        found = await asyncio.to_thread(scrape, port)
        assert found.total("flyspec_test") == 1
        monkeypatch.setattr(metrics, "SCRAPE_WAIT_S", 0.2)
        result = {}

        def ask():
            try:
                result["found"] = scrape(port)
            except Exception as error:
                result["error"] = error

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(30)  # this blocks the loop
        assert isinstance(result.get("error"), urllib.error.HTTPError | OSError)
    finally:
        telemetry.close()
