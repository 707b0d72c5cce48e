"""Certificates, API keys and the security of listening ports; see docs/security.md."""

from flyspec.security.certificates import SYSTEM as SYSTEM
from flyspec.security.certificates import Certificates as Certificates
from flyspec.security.certificates import ChannelSecurity as ChannelSecurity
from flyspec.security.certificates import TlsFiles as TlsFiles
from flyspec.security.certificates import server_credentials as server_credentials
from flyspec.security.certificates import watch_certificates as watch_certificates
from flyspec.security.keys import ApiKey as ApiKey
from flyspec.security.keys import ApiKeys as ApiKeys
from flyspec.security.keys import Scope as Scope
from flyspec.security.listening import PortSecurity as PortSecurity
from flyspec.security.listening import is_loopback as is_loopback
from flyspec.security.listening import watch_server_context as watch_server_context
