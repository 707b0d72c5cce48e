"""Settings of the three services: one definition for flags, environment and defaults.

Every field is a flag of the service (`python -m draft_service --max-sessions 8`) and an environment
variable (`FLYSPEC_DRAFT_MAX_SESSIONS=8`). Flags win over the environment.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from flyspec.errors import ConfigError
from flyspec.flags import ClientAuth, Dtype, LogLevel
from flyspec.security import ChannelSecurity, PortSecurity, TlsFiles
from flyspec.speculation_length import AUTO, SpeculationLength

GENERATION_PORT = 50050
DRAFT_PORT = 50051
VERIFY_PORT = 50052
ADMIN_PORT = 50053


WAITING_SHARE = 0.25
"""Generations, or sessions, that may wait, as a share of those that may run, unless `--max-waiting`
says.

Under overload every slot is taken and who is let in has waited behind a full queue. With all slots
busy a generation takes up to 1.5 times as long as at 80 % of the sustainable rate, since more share
a step; a queue of a quarter adds a quarter of the mean time that slots are held. Together that
keeps p99 within twice that at 80 %, with something to spare for what refusing costs. A longer queue
serves nobody sooner: it moves the refusal from now to later and adds its length to every answer.
`python -m bench.overload` measures it.
"""


STEP_TOKEN_S = 0.02
"""A step may take so much longer than `--step-timeout-s` for each of its tokens: pieces of long
prompts do, on slow processors."""


class ServerSettings(BaseSettings):
    """What every server is told."""

    model_config = SettingsConfigDict(
        cli_kebab_case=True, cli_implicit_flags=True, cli_avoid_json=True, extra="forbid"
    )

    host: str = Field("127.0.0.1", description="address to listen on")
    log_level: LogLevel = Field("info", description="log level")
    log_format: Literal["text", "json"] = Field(
        "text", description="log lines for people, or one JSON object each"
    )
    metrics_port: int | None = Field(
        None,
        ge=-1,
        le=65535,
        description="port of Prometheus metrics, /metrics; 0 picks one, -1: none; not given: 9464 "
        "(orchestrator), 9465 (draft), 9466 (verify), or 0 if --port is 0",
    )
    otlp_traces_endpoint: str = Field(
        "", description="OpenTelemetry collector to send traces to, such as http://host:4317 (gRPC)"
    )
    traces_file: str = Field(
        "", description="file that spans are appended to, one JSON object each"
    )
    traces_sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of the requests that are traced; one that brings a trace follows it",
    )
    ssl_certfile: str = Field(
        "",
        description="PEM file of this process's certificate and its chain: for its ports, and for "
        "the services that it calls",
    )
    ssl_keyfile: str = Field("", description="PEM file of that certificate's key, no password")
    ssl_ca_certs: str = Field(
        "", description="PEM file of the authorities that peers' certificates must chain to"
    )
    ssl_client_auth: ClientAuth | None = Field(
        None,
        description="whether clients must present a certificate; not given: required if there is "
        "--ssl-ca-certs",
    )
    ssl_client_names: str = Field(
        "",
        description="names, with commas between, of which a client's certificate must have one; "
        "empty: any certificate of the authorities will do",
    )
    allow_insecure: bool = Field(
        False,
        description="listen in the clear, or without knowing clients, on an address that is not "
        "loopback; otherwise that is refused",
    )
    drain_grace_s: float = Field(
        10.0, ge=0, description="seconds that running calls get on SIGTERM"
    )
    ready_fd: int | None = Field(
        None, description="file descriptor to write one JSON line to once listening and warm"
    )

    @property
    def tls_files(self) -> TlsFiles:
        """Where the certificates are."""
        return TlsFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)

    @property
    def port_security(self) -> PortSecurity:
        """What the port, the generation port of an orchestrator, asks of who connects."""
        return PortSecurity(
            self.host,
            self.tls_files,
            self.ssl_client_auth,
            names=_names(self.ssl_client_names),
            allow_insecure=self.allow_insecure,
        )


def model_source(name: str) -> str:
    """Where transformers loads the model of `--model NAME` from: a directory or a hub id.

    Raises `ConfigError` for a directory without a model. Asks neither torch nor the hub, so that a
    service can say so before it imports what takes seconds.
    """
    if not (name.startswith((".", "/", "~")) or Path(name).exists()):
        return name
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--model {name}: no config.json there; give a directory in Hugging Face format "
            "(config.json, *.safetensors, tokenizer.json) or a hub id"
        )
    return str(folder)


def served_name(name: str) -> str:
    """What clients call the model of `--model NAME`: its directory's name, or the hub id."""
    source = model_source(name)
    return source if source == name and not Path(name).exists() else Path(source).resolve().name


class ModelServerSettings(ServerSettings):
    """What a server with a model is told."""

    served_model_name: str = Field(
        "", description="what clients call the model; empty: its directory's name, or the hub id"
    )
    device: str = Field("auto", description="cpu, cuda, cuda:N, or auto: cuda if there is one")
    dtype: Dtype = Field(
        "auto",
        description="auto: the checkpoint's on a GPU, and on a CPU if that is bfloat16 and the "
        "native step serves the model; else float32 on a CPU without bf16 matrices",
    )
    threads: int = Field(
        0,
        ge=0,
        description="CPU threads of the model; 0: the native step takes every core that nothing "
        "else wants, and torch decides for itself, within a container's CPU limit",
    )
    max_sessions: int = Field(32, ge=1, le=4096, description="maximum concurrent sessions")
    kv_cache_memory_bytes: int = Field(
        0,
        ge=0,
        description="bytes of KV cache on each device; fewer sessions if they do not fit; 0: what "
        "--gpu-memory-utilization leaves on a GPU, room for --max-sessions on a CPU",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of a GPU's memory for weights, activations and KV cache of this "
        "process; fewer sessions if they do not fit; --kv-cache-memory-bytes goes before it",
    )
    max_model_len: int = Field(
        0, ge=0, description="longest sequence in tokens; 0 takes the model's own limit"
    )
    max_speculative_tokens: int = Field(64, ge=1, le=1024, description="most drafts a round")
    max_num_batched_tokens: int = Field(
        2048, ge=128, description="most tokens a step, over all sessions"
    )
    prefill_chunk: int = Field(
        512, ge=16, description="most tokens of long prompts a step; bounds what they cost others"
    )
    step_timeout_s: float = Field(
        30.0,
        gt=0,
        description=f"seconds, and {1e3 * STEP_TOKEN_S:g} ms for each of its tokens, that a step "
        "of the model may take; then it hangs, and the service ends to be started again; a rank "
        "of a tensor-parallel target that finishes none for so many seconds counts as lost",
    )
    idle_timeout_s: float = Field(
        300.0, gt=0, description="seconds without a message after which a session is closed"
    )


class DraftSettings(ModelServerSettings):
    """The draft service's settings."""

    model_config = SettingsConfigDict(env_prefix="FLYSPEC_DRAFT_")

    port: int = Field(DRAFT_PORT, ge=0, le=65535, description="port to listen on; 0 picks one")
    model: str = Field(
        "", description="draft model, a directory or hub id; empty: prompt lookup only, no torch"
    )
    drafter: Literal["", "model", "prompt_lookup", "multi_level"] = Field(
        "", description="default drafter: model, prompt_lookup or multi_level; empty: model if any"
    )
    chunk_tokens: int = Field(16, ge=1, le=1024, description="proposed tokens a streamed message")


class VerifySettings(ModelServerSettings):
    """The verify service's settings."""

    model_config = SettingsConfigDict(env_prefix="FLYSPEC_VERIFY_")

    port: int = Field(VERIFY_PORT, ge=0, le=65535, description="port to listen on; 0 picks one")
    model: str = Field(..., min_length=1, description="target model, a directory or hub id")
    max_plain_tokens: int = Field(64, ge=1, le=4096, description="most undrafted tokens a round")
    max_queue: int = Field(256, ge=1, description="rounds that may wait for the model")
    max_waiting: int | None = Field(
        None,
        ge=0,
        description="sessions of all orchestrators that may wait for a slot; not given: a quarter "
        "as many as there are slots",
    )
    batch_invariant: bool | None = Field(
        None,
        description="make logits bit-for-bit independent of what else is in a step; not given: in "
        "bfloat16 on CPUs where that costs little",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="processes on this host that share the model, a GPU or CPU threads each",
    )
    heartbeat_timeout_s: float = Field(
        4.0, ge=1, description="seconds of silence after which a rank counts as lost"
    )


class OrchestratorSettings(ServerSettings):
    """The orchestrator's settings."""

    model_config = SettingsConfigDict(env_prefix="FLYSPEC_ORCHESTRATOR_")

    port: int = Field(GENERATION_PORT, ge=0, le=65535, description="generation port; 0 picks one")
    admin_port: int = Field(ADMIN_PORT, ge=0, le=65535, description="admin port; 0 picks one")
    admin_host: str = Field("", description="address of the admin port; empty: as --host")
    admin_ssl_client_auth: ClientAuth | None = Field(
        None, description="--ssl-client-auth of the admin port, with the same default"
    )
    admin_ssl_client_names: str = Field(
        "", description="--ssl-client-names of the admin port: the operators"
    )
    api_keys_file: str = Field(
        "",
        description="TOML file of API keys (`flyspec keys new`): calls to the generation port then "
        "need one, and calls to the admin port unless that wants certificates",
    )
    upstream_tls: bool | None = Field(
        None,
        description="speak TLS to the services; not given: if there is --ssl-ca-certs",
    )
    ssl_target_name: str = Field(
        "",
        description="name that the services' certificates must have; empty: that of their address",
    )
    verify_address: str = Field(
        f"127.0.0.1:{VERIFY_PORT}",
        description="verify service: host:port, replicas with commas between; dns:///host:port is "
        "every address of the name",
    )
    draft_address: str = Field(
        f"127.0.0.1:{DRAFT_PORT}",
        description="draft service, as --verify-address; empty: prompt lookup here",
    )
    drafters: str = Field(
        "",
        description="further drafters that requests can name: NAME=ADDRESS, several with spaces "
        "between; an address is as that of --draft-address",
    )
    max_concurrent: int = Field(
        0, ge=0, description="generations that run at once; 0: as many as both services hold"
    )
    max_waiting: int | None = Field(
        None,
        ge=0,
        description="generations that may wait to be admitted; not given: a quarter as many as run",
    )
    max_queue_wait_s: float = Field(
        30.0,
        ge=0,
        description="seconds; who would have to wait longer is refused at once; 0: no bound",
    )
    max_outstanding_tokens: int = Field(
        0,
        ge=0,
        description="tokens that running generations may still have to read and write, all "
        "together; 0: no bound",
    )
    max_concurrent_per_client: int = Field(
        0, ge=0, description="requests of one client at once; 0: no bound"
    )
    max_requests_per_minute_per_client: int = Field(
        0, ge=0, description="requests of one client a minute; 0: no bound"
    )
    write_timeout_s: float = Field(
        60.0,
        gt=0,
        description="seconds after which a generation ends whose client does not read its stream",
    )
    rule: str = Field(
        "fly", description="default acceptance rule: a preset, or one of the rules file"
    )
    rules_file: str = Field(
        "", description="TOML file of named rules and of limits on what requests may ask for"
    )
    num_speculative_tokens: SpeculationLength = Field(
        AUTO, description="default K: a number, or auto: as many as pay, round by round"
    )
    round_timeout_s: float = Field(60.0, gt=0, description="seconds to wait for a verdict")
    draft_timeout_s: float = Field(
        5.0,
        gt=0,
        description="seconds to wait for a proposal before another drafter is asked; a "
        "millisecond more for each token that the drafter must read first",
    )
    probe_interval_s: float = Field(
        1.0, gt=0, description="seconds between two looks at each service"
    )
    probe_timeout_s: float = Field(
        1.5,
        gt=0,
        description="seconds to wait for its answer; after two without one it counts as hung and "
        "its generations go elsewhere",
    )
    exact_twin_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="share of the texts of lossy rules that are decoded once more exactly, by "
        "slots that nobody needs, and compared; 0: none",
    )
    allow_mixed_numerics: bool = Field(
        False,
        description="also use verify services with the target's weights that compute otherwise "
        "(data type, engine, processor, ranks): exact text is then that of the service that "
        "decoded it, and can change where a generation moves to another",
    )
    reopen_timeout_s: float = Field(
        1800.0,
        ge=0,
        description="seconds that a generation without a deadline waits for a lost verify service "
        "to come back; one with a deadline waits until then",
    )

    @property
    def port_security(self) -> PortSecurity:
        """What the generation port asks of who connects."""
        return replace(super().port_security, keys=bool(self.api_keys_file))

    @property
    def admin_security(self) -> PortSecurity:
        """What the admin port asks: a certificate, or else an API key if there are any."""
        security = PortSecurity(
            self.admin_host or self.host,
            self.tls_files,
            self.admin_ssl_client_auth,
            names=_names(self.admin_ssl_client_names),
            allow_insecure=self.allow_insecure,
            prefix="admin-",
        )
        return replace(security, keys=bool(self.api_keys_file) and not security.wants_certificates)

    def upstream_security(self) -> ChannelSecurity | None:
        """How the services are spoken to; None is in the clear. Raises `ConfigError`."""
        tls = bool(self.ssl_ca_certs) if self.upstream_tls is None else self.upstream_tls
        return ChannelSecurity(self.tls_files, self.ssl_target_name) if tls else None


def _names(setting: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in setting.split(","))))


S = TypeVar("S", bound=ServerSettings)


def from_command_line(settings: type[S], prog: str, argv: Sequence[str] | None = None) -> S:
    """Read settings from flags and environment; bad ones end the process with a message, code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return CliApp.run(settings, cli_args=arguments, cli_settings_source=None)
    except ValidationError as error:
        for problem in error.errors():
            flag = "--" + ".".join(str(p) for p in problem["loc"]).replace("_", "-")
            print(f"{prog}: error: {flag}: {problem['msg']}", file=sys.stderr)
        raise SystemExit(2) from None
