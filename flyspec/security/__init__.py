"""Certificates, API keys, and what a port must have before it listens. docs/security.md says how.

`watched` reads files again when they change; `certificates` and `credentials` make gRPC's
credentials of PEM files; `listening` has the secure defaults; `keys` the file of API keys.

A port that does not speak gRPC, such as the one for metrics, takes the same files: those of a
`PortSecurity`, which is checked first, with the authorities if it `wants_certificates`.
`prometheus_client.start_http_server` takes them as `certfile`, `keyfile` and `client_cafile`.
"""

from flyspec.security.certificates import SYSTEM, Certificates, TlsFiles, watch_certificates
from flyspec.security.credentials import ChannelSecurity, server_credentials
from flyspec.security.keys import ApiKey, ApiKeys, Scope
from flyspec.security.listening import PortSecurity, is_loopback

__all__ = [
    "SYSTEM",
    "ApiKey",
    "ApiKeys",
    "Certificates",
    "ChannelSecurity",
    "PortSecurity",
    "Scope",
    "TlsFiles",
    "is_loopback",
    "server_credentials",
    "watch_certificates",
]
