"""Certificates, API keys, and what a port must have before it listens. docs/security.md says how.

`watched` reads files again when they change; `certificates` and `credentials` make gRPC's
credentials of PEM files; `listening` has the secure defaults; `keys` the file of API keys.

A port that does not speak gRPC, such as the one for metrics, takes the same files: those of a
`PortSecurity`, which is checked first, with the authorities if it `wants_certificates`.
`prometheus_client.start_http_server` takes them as `certfile`, `keyfile` and `client_cafile`.
"""

from flyspec.security.certificates import SYSTEM as SYSTEM
from flyspec.security.certificates import Certificates as Certificates
from flyspec.security.certificates import TlsFiles as TlsFiles
from flyspec.security.certificates import watch_certificates as watch_certificates
from flyspec.security.credentials import ChannelSecurity as ChannelSecurity
from flyspec.security.credentials import server_credentials as server_credentials
from flyspec.security.keys import ApiKey as ApiKey
from flyspec.security.keys import ApiKeys as ApiKeys
from flyspec.security.keys import Scope as Scope
from flyspec.security.listening import PortSecurity as PortSecurity
from flyspec.security.listening import is_loopback as is_loopback
