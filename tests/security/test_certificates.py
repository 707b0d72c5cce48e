"""Certificate files: errors are reported at once, and changes are used once complete."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from flyspec.config import DraftSettings
from flyspec.errors import ConfigError
from flyspec.security import TlsFiles, watch_certificates
from flyspec.security.certificates import read_certificates
from flyspec.telemetry import Telemetry
from tests.security.authority import DAY, files


def test_what_is_given_is_read(ours):
    pair = ours.server()
    read = read_certificates(files(pair, ours))
    assert read.chain == Path(pair.certfile).read_bytes()
    assert read.key == Path(pair.keyfile).read_bytes()
    assert read.authorities == Path(ours.file).read_bytes()
    assert read_certificates(files(None, ours)).chain is None


def test_what_cannot_be_used_is_told_with_its_flag(ours, others, tmp_path):
    pair, other = ours.server(), others.server("other")
    text = tmp_path / "text"
    text.write_text("none")
    expired = ours.server("expired", end=-DAY / 24)
    early = ours.pair("early", begin=DAY, end=3 * DAY)
    for given, message in {
        TlsFiles(pair.certfile): "--ssl-certfile is given without --ssl-keyfile",
        TlsFiles("", pair.keyfile): "--ssl-keyfile is given without --ssl-certfile",
        TlsFiles(pair.certfile, str(tmp_path / "no")): "--ssl-keyfile .*no: No such file",
        TlsFiles(str(text), pair.keyfile): "--ssl-certfile .*text: contains no PEM certificate",
        TlsFiles(pair.certfile, str(text)): "--ssl-keyfile .*text: not a PEM private key",
        TlsFiles(pair.certfile, other.keyfile): "does not match the key",
        TlsFiles(pair.certfile, pair.keyfile, str(text)): "--ssl-ca-certs .*text: contains no PEM",
        files(expired, None): "expired at .*; renew it",
        files(early, None): "not valid before .*; is the clock right",
    }.items():
        with pytest.raises(ConfigError, match=message):
            read_certificates(given)


def test_files_that_change_are_read_again_once_they_fit(ours):
    pair = ours.server()
    watched = watch_certificates(files(pair, ours))
    first = watched.current()
    assert watched.current() is first
    renewed = ours.server("renewed")
    shutil.copyfile(renewed.certfile, pair.certfile)
    assert watched.current() is first  # the key is still another's
    shutil.copyfile(renewed.keyfile, pair.keyfile)
    second = watched.current()
    assert second.chain == Path(renewed.certfile).read_bytes()
    assert watched.current() is second
    os.unlink(pair.keyfile)
    assert watched.current() is second


def test_a_link_that_is_swapped_as_kubernetes_does_is_noticed(ours, tmp_path):
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        pair = ours.server(version)
        shutil.copyfile(pair.certfile, tmp_path / version / "tls.crt")
        shutil.copyfile(pair.keyfile, tmp_path / version / "tls.key")
    data = tmp_path / "data"
    data.symlink_to("one")
    watched = watch_certificates(TlsFiles(str(data / "tls.crt"), str(data / "tls.key")))
    first = watched.current()
    (tmp_path / "new").symlink_to("two")
    os.replace(tmp_path / "new", data)
    assert watched.current() is not first
    assert watched.current().chain == (tmp_path / "two" / "tls.crt").read_bytes()


def test_when_a_certificate_expires_is_a_metric(ours):
    pair = ours.server(end=DAY)
    settings = DraftSettings(ssl_certfile=pair.certfile, ssl_keyfile=pair.keyfile)
    registry = Telemetry("draft", settings).registry
    expiry = "flyspec_certificate_expiry_timestamp_seconds"
    assert registry.get_sample_value(expiry) == pytest.approx(time.time() + 86_400, abs=60)
    renewed = ours.server("renewed", end=3 * DAY)
    shutil.copyfile(renewed.certfile, pair.certfile)
    shutil.copyfile(renewed.keyfile, pair.keyfile)
    assert registry.get_sample_value(expiry) == pytest.approx(time.time() + 3 * 86_400, abs=60)
    assert Telemetry("draft", DraftSettings()).registry.get_sample_value(expiry) is None
