"""The command line of load tests. Plain: no locust."""

from __future__ import annotations

import argparse
from collections.abc import Container, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

from flyspec.client import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS, Credentials, GenerateOptions
from flyspec.errors import ConfigError
from flyspec.flags import flags_of
from flyspec.rules import Rule
from flyspec.values.tokens import SamplingParams
from loadtest.connection import Endpoint
from loadtest.goals import Goals, metric_of
from loadtest.prompts import FRESH, Source
from loadtest.scenarios import SCENARIOS
from loadtest.summary import Limits

REQUEST = GenerateOptions(max_tokens=128)
OF_REQUEST = ("num_speculative_tokens", "drafter", "max_tokens", "ignore_eos")
OF_SAMPLING = ("temperature", "top_p")
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


def add_flags(
    to: argparse._ArgumentGroup, defaults: object, names: Container[str] | None = None
) -> None:
    """The fields of `defaults` that are declared as flags, or those of these names."""
    for name, (kind, flag) in flags_of(type(defaults)).items():
        default, typed = getattr(defaults, name), flag.typed(name)
        if names is not None and name not in names:
            continue
        if kind is bool:
            to.add_argument(typed, action="store_true", help=flag.help)
        else:
            (number,) = {int, float, str} & {kind, *get_args(kind)}
            shown = f"or {flag.env}" if flag.env else flag.default or default
            read = flag.read or (_natural if flag.least == 1 else number)
            to.add_argument(typed, type=read, default=default, help=f"{flag.help} ({shown})")


def add_access(to: argparse.ArgumentParser) -> None:
    """How the installation is reached."""
    group = to.add_argument_group("access")
    add_flags(group, Credentials.from_environment())
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
    add_flags(group, REQUEST, OF_REQUEST)
    add_flags(group, REQUEST.sampling, OF_SAMPLING)
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
    return replace(
        REQUEST,
        sampling=SamplingParams(**{name: getattr(args, name) for name in OF_SAMPLING}),
        rule=Rule(args.rule) if args.rule else None,
        timeout_s=args.timeout,
        **{name: getattr(args, name) for name in OF_REQUEST},
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
