"""The same users under locust's own command line and web interface: a closed loop.

    locust -f loadtest/locustfile.py --host 127.0.0.1:50050 --rule fly
    locust -f loadtest/locustfile.py --protocol http --host 127.0.0.1:8000

The flags of connections and requests are those of `python -m loadtest`; there are no scenarios,
goals or reports. Also for several processes or machines (`--processes`, `--master`).
"""

import loadtest.patched  # noqa: F401  before anything that gevent has to patch

# isort: split
import argparse
from typing import Any, Literal, get_args, get_origin

from locust import events

from flyspec.client import Credentials
from flyspec.flags import flags_of
from loadtest.control import Control
from loadtest.options import ConnectionFlags, Requests
from loadtest.prompts import FRESH, Source, prompt_mix
from loadtest.scenarios.base import describe
from loadtest.users.loops import ClosedLoopUser
from loadtest.users.protocols import TRANSPORTS
from loadtest.work import Closed, LoadPhase, Variant

__all__ = ["ClosedLoopUser"]


def add(parser: Any, defaults: Any) -> None:
    for name, (kind, flag) in flags_of(type(defaults)).items():
        default = getattr(defaults, name)
        given: dict[str, Any] = {"default": default, "dest": name, "help": flag.help}
        if bool in (kind, *get_args(kind)):
            given["action"] = argparse.BooleanOptionalAction
        elif isinstance(default, tuple):
            given |= {"action": "append", "default": None, "metavar": flag.metavar}
        elif get_origin(kind) is Literal:
            given["choices"] = get_args(kind)
        else:
            number = next((n for n in (int, float) if n in (kind, *get_args(kind))), str)
            given |= {"type": flag.read or number, "metavar": flag.metavar}
        parser.add_argument(flag.typed(name), **given)


def taken(args: Any, defaults: Any) -> Any:
    found = {}
    for name, (_, flag) in flags_of(type(defaults)).items():
        found[name] = getattr(args, name)
        if isinstance(getattr(defaults, name), tuple):
            found[name] = flag.read(found[name] or ()) if flag.read else tuple(found[name] or ())
    return type(defaults)(**found)


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_flags(parser: Any) -> None:
    """Flags of connections and requests; `--host` is the address."""
    add(parser.add_argument_group("connection"), ConnectionFlags())
    add(parser.add_argument_group("access"), Credentials.from_environment())
    add(parser.add_argument_group("requests"), Requests())


@events.init.add_listener  # type: ignore[untyped-decorator]
def begin(environment: Any, **_: Any) -> None:
    """Give the users what they share; one phase is on without end."""
    args = environment.parsed_options
    requests = taken(args, Requests())
    link = taken(args, ConnectionFlags())
    endpoints = link.endpoints(environment.host or "", taken(args, Credentials()))
    control = Control(
        TRANSPORTS[link.protocol](endpoints, link.connections),
        prompt_mix(
            requests.prompt_file or [Source(FRESH)], requests.problems, requests.chat, requests.seed
        ),
        requests.seed,
        keep_records=False,
    )
    asked = requests.options()
    users = Closed(args.num_users or 1)
    control.open_phase(LoadPhase("locust", users, 0.0, (Variant(describe(asked), asked),)))
    environment.flyspec_control = control
