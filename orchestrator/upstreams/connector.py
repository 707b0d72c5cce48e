"""Creates gRPC connections to the services, with certificates and timeouts from the settings."""

from __future__ import annotations

from flyspec import rpc
from flyspec.config import OrchestratorSettings
from orchestrator.upstreams.draft import GrpcDraftUpstream
from orchestrator.upstreams.proposal_checks import LIMITS
from orchestrator.upstreams.verify import GrpcVerifyUpstream


class GrpcConnector:
    """Creates connections to services according to the settings. Raises `ConfigError`."""

    def __init__(self, settings: OrchestratorSettings) -> None:
        self._settings = settings
        self._security = settings.upstream_security()
        self.secure = self._security is not None

    def to_draft(self, address: str, server_name: str) -> GrpcDraftUpstream:
        limit = LIMITS.message_bytes
        link = rpc.Link(address, self._security, server_name, max_receive_bytes=limit)
        upstream = GrpcDraftUpstream(address, self._settings.draft_timeout_s, link)
        upstream.tokenizer_timeout_s = self._settings.tokenizer_timeout_s
        return upstream

    def to_verify(self, address: str, server_name: str) -> GrpcVerifyUpstream:
        link = rpc.Link(address, self._security, server_name)
        return GrpcVerifyUpstream(address, self._settings.round_timeout_s, link)
