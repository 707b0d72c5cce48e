"""The command line of load tests. Plain: no locust."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from flyspec.client import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS, Credentials, GenerateOptions
from flyspec.errors import ConfigError
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from loadtest.connection import Endpoint
from loadtest.goals import Goals, metric_of
from loadtest.prompts import FRESH, Source
from loadtest.scenarios import SCENARIOS
from loadtest.summary import Limits

SUFFIXES = {"html": (".html",), "json": (".json",), "plot": (".svg", ".png", ".pdf"),
            "records": (".jsonl", ".gz")}  # fmt: skip


def parser(prog: str = "loadtest") -> argparse.ArgumentParser:
    """All flags: those of every scenario, and each scenario's own."""
    found = argparse.ArgumentParser(
        prog=prog, description="Load tests of a running flyspec; docs/load.md has more."
    )
    scenarios = found.add_subparsers(dest="scenario", required=True, metavar="SCENARIO")
    for name, scenario in SCENARIOS.items():
        one = scenarios.add_parser(name, help=scenario.about, description=scenario.__doc__)
        one.add_argument("--address", default=DEFAULT_ADDRESS, help="generation port, host:port")
        _add_admin(one)
        one.add_argument(
            "--seconds", type=_positive, default=120.0,
            help="of load, all phases together (120); the last requests end later",
        )  # fmt: skip
        add_access(one)
        add_requests(one)
        _add_goals(one)
        _add_output(one)
        scenario.add_arguments(one.add_argument_group(f"of {name}"))  # type: ignore[arg-type]
    return found


def _add_admin(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--admin-address", default="",
        help=f"admin port (usually {DEFAULT_ADMIN_ADDRESS}); without it, what is left open at the "
        "end is not checked",
    )  # fmt: skip
    to.add_argument(
        "--watch", action="append", default=[], metavar="NAME=PID",
        help="a process on this machine whose memory is looked at",
    )  # fmt: skip
    to.add_argument("--every", type=_positive, default=1.0, help="seconds between looks (1)")


def add_access(to: argparse.ArgumentParser) -> None:
    """How the installation is reached."""
    group = to.add_argument_group("access")
    for flag, what in (
        ("--api-key", "sent with every call"),
        ("--ssl-ca-certs", "encrypt, and trust these authorities: a PEM file, or `system`"),
        ("--ssl-certfile", "this client's own certificate, PEM"),
        ("--ssl-keyfile", "its key, PEM"),
        ("--ssl-target-name", "name in the server's certificate (default: of the address)"),
    ):
        variable = "FLYSPEC_" + flag[2:].upper().replace("-", "_")
        group.add_argument(
            flag, default=os.environ.get(variable, ""), help=f"{what} (or {variable})"
        )
    group.add_argument(
        "--allow-insecure", action="store_true", help="send the key in the clear, elsewhere too"
    )
    group.add_argument("--connections", type=_natural, default=4, help="TCP connections (4)")


def add_requests(to: argparse.ArgumentParser) -> None:
    """What requests ask for."""
    group = to.add_argument_group("what is asked")
    group.add_argument(
        "--prompt-file", type=Source.parse, action="append", default=[], metavar="FILE[:WEIGHT]",
        help=f"as `flyspec generate --prompt-file` takes it; several are mixed; `{FRESH}` are "
        "fresh word problems, which is the default",
    )  # fmt: skip
    group.add_argument("--problems", type=_natural, default=2000, help="different ones (2000)")
    group.add_argument(
        "--chat", action=argparse.BooleanOptionalAction, default=None,
        help="ask an assistant, or continue (default: questions are asked, code is continued)",
    )  # fmt: skip
    group.add_argument("--rule", default="", help="acceptance rule (default: the server's)")
    group.add_argument(
        "--num-speculative-tokens", type=int, metavar="K",
        help="0 is without speculation (default: the server's)",
    )  # fmt: skip
    group.add_argument("--drafter", default="", help="by name (default: the server's)")
    group.add_argument("--max-tokens", type=_natural, default=128, help="of an output (128)")
    group.add_argument("--ignore-eos", action="store_true", help="outputs of just so many")
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--timeout", type=_positive, default=120.0, help="of a request, seconds")
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")


def _add_goals(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group(
        "goals", "METRIC:MS with METRIC ttft, tpot or e2e; the exit code is 1 if one is missed"
    )
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS",
        help="count the requests that meet these latency goals",
    )  # fmt: skip
    group.add_argument("--min-goodput", type=float, metavar="SHARE", help="of them at least")
    group.add_argument("--max-p99", nargs="+", default=[], metavar="METRIC:MS")
    group.add_argument("--max-refused", type=float, metavar="SHARE")
    group.add_argument("--max-failures", type=int, default=0, metavar="N", help="(0)")


def _add_output(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("output")
    for flag, what in (
        ("--html", "a report with plots, one file; needs matplotlib"),
        ("--json", "the same as data"),
        ("--plot", "the scenario's main plot: .svg, .png or .pdf; needs matplotlib"),
        ("--records", "every request, one JSON document a line; .gz compresses"),
    ):
        group.add_argument(flag, type=Path, metavar="FILE", help=what)


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot work, before anything runs. Raises `ConfigError`."""
    for name, suffixes in SUFFIXES.items():
        path: Path | None = getattr(args, name)
        if path is None:
            continue
        if path.suffix not in suffixes:
            raise ConfigError(f"--{name} {path}: the name must end in {' or '.join(suffixes)}")
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no directory {path.parent}")
    if args.html or args.plot:
        from flyspec.drawing import check_matplotlib

        check_matplotlib("--html or --plot")
    if SCENARIOS[args.scenario].needs_admin and not args.admin_address:
        raise ConfigError(f"{args.scenario} needs --admin-address")
    if args.min_goodput is not None and not args.goodput:
        raise ConfigError("--min-goodput needs --goodput: within which times?")
    goals_of(args), watched(args), endpoint_of(args)


def endpoint_of(args: argparse.Namespace) -> Endpoint:
    """Where the installation is. Raises `ConfigError`."""
    given = {f.name: getattr(args, f.name) for f in fields(Credentials)}
    endpoint = Endpoint(args.address, Credentials(**given))
    endpoint.credentials.security(args.address)
    return endpoint


def goals_of(args: argparse.Namespace) -> Goals:
    """The goals. Raises `ConfigError`."""
    return Goals(
        _limits("--goodput", args.goodput),
        _limits("--max-p99", args.max_p99),
        args.min_goodput,
        args.max_refused,
        args.max_failures,
    )


def generate_options(args: argparse.Namespace) -> GenerateOptions:
    """How requests ask."""
    return GenerateOptions(
        sampling=SamplingParams(temperature=args.temperature, top_p=args.top_p),
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        drafter=args.drafter,
        rule=Rule(args.rule) if args.rule else None,
        num_speculative_tokens=args.num_speculative_tokens,
        timeout_s=args.timeout,
    )


def watched(args: argparse.Namespace) -> dict[str, int]:
    """Process ids by name. Raises `ConfigError`."""
    found = {}
    for text in args.watch:
        name, _, pid = text.partition("=")
        if not name or not pid.isdecimal():
            raise ConfigError(f"--watch {text}: not NAME=PID")
        found[name] = int(pid)
    return found


def _limits(flag: str, texts: Sequence[str]) -> Limits:
    limits = {}
    for text in texts:
        name, _, ms = text.partition(":")
        try:
            limits[metric_of(name)] = float(ms)
        except (KeyError, ValueError):
            raise ConfigError(
                f"{flag} {text}: not METRIC:MS with METRIC ttft, tpot or e2e, such as ttft:200"
            ) from None
    return limits


def _natural(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0")
    return number
