"""Settings of the three services, each defined once for flag, environment variable and default.

Every field is a flag of the service (`python -m draft_service --max-sessions 8`) and an environment
variable (`FLYSPEC_DRAFT_MAX_SESSIONS=8`). Flags take precedence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from flyspec.drafter_names import KINDS_LISTED, DrafterKind
from flyspec.flags import (
    AttentionBackendName,
    ClientAuth,
    Dtype,
    EngineName,
    FlashAttention,
    LogLevel,
)
from flyspec.rules.presets import DEFAULT_RULE
from flyspec.security import ChannelSecurity, PortSecurity, TlsFiles
from flyspec.speculation_length import (
    AUTO,
    MOST,
    SpeculationLength,
    read_default_length,
)

GENERATION_PORT = 50050
DRAFT_PORT = 50051
VERIFY_PORT = 50052
ADMIN_PORT = 50053
HTTP_PORT = 8000
NO_PORT = -1
"""Instead of a port: do not listen."""


WAITING_SHARE = 0.25
"""Default of `--max-waiting`, as a share of the generations (or sessions) that may run.

Under overload every slot is taken, and each admitted request has waited in a full queue. With all
slots busy a generation takes up to 1.5 times as long as at 80 % of the sustainable rate, since more
sequences share a step; a queue of a quarter adds a quarter of the mean time a slot is held.
Together that keeps p99 within twice its value at 80 %, with some margin for the cost of refusals.
A longer queue serves nobody sooner: it only delays refusals and adds its length to every response.
`python -m loadtest.bundled overload` measures it.
"""


TOKENIZER_TIMEOUT_S = 120.0
"""Default of `--tokenizer-timeout-s`. It takes seconds for a large vocabulary, and several times as
long on a busy machine."""

STEP_TOKEN_S = 0.02
"""Seconds added to `--step-timeout-s` per token of a step: chunks of long prompts are slow on slow
processors."""


class ServerSettings(BaseSettings):
    """Settings common to all servers."""

    model_config = SettingsConfigDict(
        cli_kebab_case=True, cli_implicit_flags=True, cli_avoid_json=True, extra="forbid"
    )

    host: str = Field("127.0.0.1", description="address to listen on")
    log_level: LogLevel = Field("info", description="log level")
    log_format: Literal["text", "json"] = Field(
        "text", description="format of log lines: plain text, or one JSON object each"
    )
    metrics_port: int | None = Field(
        None,
        ge=NO_PORT,
        le=65535,
        description="port of the Prometheus metrics, path /metrics (0: pick a free one, -1: none); "
        "unset: 9464 (orchestrator), 9465 (draft) or 9466 (verify), or 0 if --port is 0",
    )
    otlp_traces_endpoint: str = Field(
        "", description="OpenTelemetry collector for traces (gRPC), such as http://host:4317"
    )
    traces_file: str = Field("", description="file to append spans to, one JSON object per line")
    traces_sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="fraction of requests to trace; a request with a trace context keeps its "
        "sampling decision",
    )
    ssl_certfile: str = Field(
        "",
        description="PEM file with this process's certificate chain, for its ports and its calls "
        "to other services",
    )
    ssl_keyfile: str = Field(
        "", description="PEM file with the certificate's private key, without a password"
    )
    ssl_ca_certs: str = Field(
        "", description="PEM file with the CAs to trust in peers' certificates"
    )
    ssl_client_auth: ClientAuth | None = Field(
        None,
        description="whether clients must present a certificate; unset: required if "
        "--ssl-ca-certs is given",
    )
    ssl_client_names: str = Field(
        "",
        description="comma-separated names; a client's certificate must have one of them (empty: "
        "any certificate from the CAs)",
    )
    allow_insecure: bool = Field(
        False,
        description="allow listening beyond loopback without TLS or without client "
        "authentication (refused otherwise)",
    )
    drain_grace_s: float = Field(
        10.0, ge=0, description="seconds that running calls get to finish on SIGTERM"
    )
    ready_fd: int | None = Field(
        None,
        description="file descriptor to write JSON lines to: stages of the start, then the ports "
        "once listening and warmed up",
    )

    @property
    def tls_files(self) -> TlsFiles:
        return TlsFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)

    @property
    def port_security(self) -> PortSecurity:
        """Requirements of the port (the orchestrator's generation port) for its clients."""
        return PortSecurity(
            self.host,
            self.tls_files,
            self.ssl_client_auth,
            names=_names(self.ssl_client_names),
            allow_insecure=self.allow_insecure,
        )


def _check_block_size(value: int | None) -> int | None:
    if value not in (None, 0, 16, 32, 64, 128, 256):
        raise ValueError("must be 0, 16, 32, 64, 128 or 256")
    return value


class ModelServerSettings(ServerSettings):
    """Settings common to servers with a model."""

    served_model_name: str = Field(
        "", description="model name for clients (empty: the model's directory name or hub id)"
    )
    engine: EngineName = Field(
        "auto",
        description="engine that runs the model: llama-cpp (GGUF files; the extra llama-cpp), "
        "or auto: llama-cpp for a GGUF file, else the native step or transformers' modules",
    )
    n_gpu_layers: int | None = Field(
        None,
        ge=-1,
        description="layers of a GGUF model that llama.cpp keeps on GPUs, if it was built for "
        "them (-1: all); unset: all, or none with --device cpu",
    )
    flash_attn: FlashAttention = Field(
        "auto",
        description="flash attention of llama.cpp for GGUF models: on, off, or auto: on with GPUs, "
        "off on a CPU, where it is faster only while contexts are shorter than about 128 tokens",
    )
    device: str = Field(
        "auto", description="device of the model: cpu, cuda, cuda:N, or auto: cuda if available"
    )
    dtype: Dtype = Field(
        "auto",
        description="data type of the weights; auto: the checkpoint's on a GPU; on a CPU bfloat16 "
        "if the checkpoint has it and it is fast there, else float32",
    )
    threads: int = Field(
        0,
        ge=0,
        description="CPU threads of the model; 0: every available core with the native step, "
        "one per 4 MB of weights with llama.cpp, else torch's default within the container's CPU "
        "limit",
    )
    max_sessions: int = Field(32, ge=1, le=4096, description="maximum concurrent sessions")
    kv_cache_memory_bytes: int = Field(
        0,
        ge=0,
        description="bytes of KV cache per device; fewer sessions if not all fit; 0: on a GPU what "
        "--gpu-memory-utilization leaves, on a CPU room for --max-sessions",
    )
    block_size: Annotated[int | None, AfterValidator(_check_block_size)] = Field(
        None,
        ge=0,
        description="tokens per block of the KV cache, a power of two from 16 to 256, so that "
        "sessions take memory for what they hold; 0: a slot of the whole context for each; unset: "
        "32 on a GPU, 0 on a CPU",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="fraction of GPU memory for this process's weights, activations and KV cache; "
        "fewer sessions if not all fit; --kv-cache-memory-bytes takes precedence",
    )
    max_model_len: int = Field(
        0, ge=0, description="maximum sequence length in tokens (0: the model's own limit)"
    )
    max_speculative_tokens: int = Field(
        64, ge=1, le=MOST, description="maximum drafted tokens per round"
    )
    attention_backend: AttentionBackendName = Field(
        "auto",
        description="attention over KV cache blocks: flashinfer, flex (torch's FlexAttention), "
        "sdpa (copies keys; slow), or auto: on a GPU flashinfer if it is installed, else flex",
    )
    enforce_eager: bool = Field(
        False, description="compile nothing for a GPU, and capture no steps as graphs"
    )
    max_num_batched_tokens: int = Field(
        2048, ge=128, description="maximum tokens per step, over all sessions"
    )
    prefill_chunk: int = Field(
        512,
        ge=16,
        description="maximum tokens of long prompts per step; limits how much they delay other "
        "requests",
    )
    step_timeout_s: float = Field(
        30.0,
        gt=0,
        description=f"seconds that a model step may take, plus {1e3 * STEP_TOKEN_S:g} ms per "
        "token; after that it counts as hung and the service exits to be restarted; a rank of a "
        "tensor-parallel target that finishes no step for this many seconds counts as lost",
    )
    idle_timeout_s: float = Field(
        300.0, gt=0, description="close a session after this many seconds without a message"
    )


class DraftSettings(ModelServerSettings):
    """Settings of the draft service: flags, or FLYSPEC_DRAFT_<NAME> in the environment."""

    model_config = SettingsConfigDict(env_prefix="FLYSPEC_DRAFT_")

    port: int = Field(
        DRAFT_PORT, ge=0, le=65535, description="port to listen on (0: pick a free one)"
    )
    model: str = Field(
        "",
        description="draft model: a directory, a GGUF file, or on a hub REPO or REPO:FILE.gguf "
        "(empty: prompt lookup only, no torch)",
    )
    drafter: Literal["", DrafterKind] = Field(
        "",
        description=f"default drafter: {KINDS_LISTED} (empty: model if there is one, else "
        "prompt_lookup)",
    )
    datastore: str = Field(
        "",
        description="datastore for the rest drafter: a directory that `flyspec datastore build` "
        "made with the target's tokenizer (empty: none, and no such drafter)",
    )
    chunk_tokens: int = Field(16, ge=1, le=1024, description="proposed tokens per streamed message")


class VerifySettings(ModelServerSettings):
    """Settings of the verify service: flags, or FLYSPEC_VERIFY_<NAME> in the environment."""

    model_config = SettingsConfigDict(env_prefix="FLYSPEC_VERIFY_")

    port: int = Field(
        VERIFY_PORT, ge=0, le=65535, description="port to listen on (0: pick a free one)"
    )
    model: str = Field(
        ...,
        min_length=1,
        description="target model: a directory, a GGUF file, or on a hub REPO or REPO:FILE.gguf",
    )
    autojudge_file: str = Field(
        "",
        description="judge of the rule autojudge, a file that `flyspec autojudge train` made for "
        "this target (empty: none, and the rule is refused)",
    )
    heads: str = Field(
        "",
        description="draft heads beside the target, which requests name as drafters: "
        "space-separated NAME=PATH, the directories of eagle3, medusa or mtp heads for this "
        "target, or draft models as GGUF files",
    )
    max_plain_tokens: int = Field(
        64, ge=1, le=4096, description="maximum tokens per round of plain decoding"
    )
    max_queue: int = Field(256, ge=1, description="maximum rounds waiting for the model")
    max_waiting: int | None = Field(
        None,
        ge=0,
        description="maximum sessions waiting for a slot, over all orchestrators; unset: a "
        "quarter of the slots",
    )
    batch_invariant: bool | None = Field(
        None,
        description="make logits bitwise independent of what else is in a step; unset: only in "
        "bfloat16 on CPUs where it costs little",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="processes on this host that share the model, each with its own GPU or CPU "
        "threads",
    )
    heartbeat_timeout_s: float = Field(
        4.0, ge=1, description="seconds of silence after which a rank counts as lost"
    )


_DefaultLength = Annotated[SpeculationLength, BeforeValidator(read_default_length)]


class OrchestratorSettings(ServerSettings):
    """Settings of the orchestrator: flags, or FLYSPEC_ORCHESTRATOR_<NAME> in the environment."""

    model_config = SettingsConfigDict(env_prefix="FLYSPEC_ORCHESTRATOR_")

    port: int = Field(
        GENERATION_PORT, ge=0, le=65535, description="generation port (0: pick a free one)"
    )
    http_port: int | None = Field(
        None,
        ge=NO_PORT,
        le=65535,
        description="port of the OpenAI-compatible HTTP API (0: pick a free one, -1: none); "
        "needs the extra http; unset: 8000 if that is installed, or 0 if --port is 0",
    )
    http_allowed_origins: str = Field(
        "",
        description="comma-separated origins whose pages may call the HTTP API from a browser, "
        "such as https://chat.example.com; * for all (empty: none)",
    )
    allowed_hosts: str = Field(
        "",
        description="comma-separated names by which clients may call an HTTP API that needs "
        "neither API keys nor client certificates, such as llm.example.com or *.example.com; * for "
        "all (IP addresses and localhost need no entry)",
    )
    admin_port: int = Field(
        ADMIN_PORT, ge=0, le=65535, description="admin port (0: pick a free one)"
    )
    admin_host: str = Field(
        "", description="address the admin port listens on (empty: same as --host)"
    )
    admin_ssl_client_auth: ClientAuth | None = Field(
        None, description="--ssl-client-auth for the admin port; same default"
    )
    admin_ssl_client_names: str = Field(
        "", description="--ssl-client-names for the admin port: the operators"
    )
    api_keys_file: str = Field(
        "",
        description="TOML file of API keys (see `flyspec keys new`); calls to the generation port "
        "then need one, and calls to the admin port too unless it requires certificates",
    )
    upstream_tls: bool | None = Field(
        None,
        description="use TLS to the draft and verify services; unset: if --ssl-ca-certs is given",
    )
    ssl_target_name: str = Field(
        "",
        description="name that the services' certificates must have (empty: their address's)",
    )
    verify_address: str = Field(
        f"127.0.0.1:{VERIFY_PORT}",
        description="verify service: host:port, comma-separated for replicas; dns:///host:port "
        "stands for every address of the name",
    )
    draft_address: str = Field(
        f"127.0.0.1:{DRAFT_PORT}",
        description="draft service, written like --verify-address (empty: no draft service, the "
        "orchestrator drafts by prompt lookup)",
    )
    draft_sharing: Literal["none", "key"] = Field(
        "none",
        description="whose finished outputs a drafter may copy and learn from, besides the "
        "request's own: none, or key (requests with the same API key); exact texts do not depend "
        "on it, but their speed tells of the others",
    )
    staging: Literal["auto", "on", "off"] = Field(
        "auto",
        description="whether drafters go on while a round is verified and the target is sent the "
        "next round for its likeliest verdicts: where measured rounds are faster for it (auto), "
        "always, or never",
    )
    draft_trees: Literal["off", "on"] = Field(
        "off",
        description="whether drafters that make trees are asked for them, second choices included, "
        "where the target takes trees: as many drafts as K, of which one path is judged",
    )
    drafters: str = Field(
        "",
        description="more drafters that requests can name: space-separated NAME=ADDRESS, with "
        "addresses like --draft-address",
    )
    max_concurrent: int = Field(
        0, ge=0, description="maximum concurrent generations (0: as many as both services can hold)"
    )
    max_waiting: int | None = Field(
        None,
        ge=0,
        description="maximum generations waiting to be admitted; unset: a quarter of those that "
        "can run",
    )
    max_queue_wait_s: float = Field(
        30.0,
        ge=0,
        description="maximum expected wait in seconds; requests that would wait longer are refused "
        "at once (0: no limit)",
    )
    max_outstanding_tokens: int = Field(
        0,
        ge=0,
        description="maximum tokens that all running generations together may still have to read "
        "and write (0: no limit)",
    )
    max_concurrent_per_client: int = Field(
        0, ge=0, description="maximum concurrent requests per client (0: no limit)"
    )
    max_requests_per_minute_per_client: int = Field(
        0, ge=0, description="maximum requests per minute per client (0: no limit)"
    )
    write_timeout_s: float = Field(
        60.0,
        gt=0,
        description="end a generation if its client does not read the stream for this many seconds",
    )
    rule: str = Field(
        DEFAULT_RULE, description="default acceptance rule: a preset, or one from the rules file"
    )
    rules_file: str = Field("", description="TOML file with named rules and limits on requests")
    allow_special_tokens: bool = Field(
        False,
        description="encode the text of special tokens in a chat's messages, tools and documents "
        "as those tokens; otherwise it stays text",
    )
    num_speculative_tokens: _DefaultLength = Field(
        AUTO,
        description="default K (maximum drafted tokens per round), or auto to adapt K each round",
    )
    round_timeout_s: float = Field(60.0, gt=0, description="seconds to wait for a verdict")
    draft_timeout_s: float = Field(
        5.0,
        gt=0,
        description="seconds to wait for a proposal before using another drafter, plus 1 ms per "
        "token that the drafter must read first",
    )
    tokenizer_timeout_s: float = Field(
        TOKENIZER_TIMEOUT_S,
        gt=0,
        description="seconds that a draft service with another tokenizer may take to prepare the "
        "target's for translation, when it is registered or restarted",
    )
    probe_interval_s: float = Field(1.0, gt=0, description="seconds between probes of each service")
    probe_timeout_s: float = Field(
        1.5,
        gt=0,
        description="seconds to wait for a probe's answer; after two timeouts in a row the service "
        "counts as hung and its generations move elsewhere",
    )
    exact_twin_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="fraction of outputs of lossy rules to decode again exactly in idle slots and "
        "compare (0: none)",
    )
    allow_mixed_numerics: bool = Field(
        False,
        description="also use verify services that have the target's weights but compute "
        "differently (data type, engine, processor, ranks); exact output then depends on the "
        "service that decodes it, and can change where a generation moves to another",
    )
    reopen_timeout_s: float = Field(
        1800.0,
        ge=0,
        description="seconds to wait for a lost verify service to come back; a generation with a "
        "deadline waits until its deadline instead",
    )

    @property
    def port_security(self) -> PortSecurity:
        return replace(super().port_security, keys=bool(self.api_keys_file))

    @property
    def admin_security(self) -> PortSecurity:
        """Requirements of the admin port: a certificate, or else an API key if there are any."""
        security = PortSecurity(
            self.admin_host or self.host,
            self.tls_files,
            self.admin_ssl_client_auth,
            names=_names(self.admin_ssl_client_names),
            allow_insecure=self.allow_insecure,
            prefix="admin-",
        )
        return replace(security, keys=bool(self.api_keys_file) and not security.wants_certificates)

    @property
    def origins(self) -> tuple[str, ...]:
        return _names(self.http_allowed_origins)

    @property
    def hosts(self) -> tuple[str, ...]:
        return _names(self.allowed_hosts)

    def upstream_security(self) -> ChannelSecurity | None:
        """Return the TLS of connections to the services, or None. Raises `ConfigError`."""
        tls = bool(self.ssl_ca_certs) if self.upstream_tls is None else self.upstream_tls
        return ChannelSecurity(self.tls_files, self.ssl_target_name) if tls else None


def _names(setting: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in setting.split(","))))
