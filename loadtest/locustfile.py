"""The same users under locust's own command line and web interface: a closed loop.

    locust -f loadtest/locustfile.py --host 127.0.0.1:50050 --rule fly
    locust -f loadtest/locustfile.py --protocol http --host 127.0.0.1:8000

The flags of requests are those of `python -m loadtest`, keys and certificates come from the
environment; there are no scenarios, goals or reports. Also for several processes or machines
(`--processes`, `--master`).
"""

import loadtest.patched  # noqa: F401  before anything that gevent has to patch

# isort: split
import argparse
from typing import Any, get_args

from locust import events

from flyspec.client import Credentials
from flyspec.flags import flags_of
from loadtest.load import Closed, LoadPhase
from loadtest.options import LoadOptions, Requests
from loadtest.run import describe
from loadtest.users import GenerateUser

__all__ = ["GenerateUser"]


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_flags(parser: Any) -> None:
    """Add the flags of requests; `--host` is the address."""
    for name, (kind, flag) in flags_of(Requests).items():
        default = getattr(Requests(), name)
        given: dict[str, Any] = {"default": default, "dest": name, "help": flag.help}
        kinds = (kind, *get_args(kind))
        if bool in kinds:
            given["action"] = argparse.BooleanOptionalAction
        elif isinstance(default, tuple):
            given["nargs"] = "+"
        else:
            given["type"] = flag.read or next((n for n in (int, float) if n in kinds), str)
        parser.add_argument(flag.typed(name), **given)


class Unrecorded(list[Any]):
    """Keeps nothing, since locust has its own statistics and no end."""

    def append(self, record: Any) -> None: ...


@events.init.add_listener  # type: ignore[untyped-decorator]
def begin(environment: Any, **_: Any) -> None:
    """Give the users what they share; one phase is on without end."""
    args = environment.parsed_options
    requests = Requests(**{name: getattr(args, name) for name in flags_of(Requests)})
    load = LoadOptions(
        address=environment.host or "",
        credentials=Credentials.from_environment(),
        requests=requests,
    )
    control = load.control()
    control.records = Unrecorded()
    options = requests.options()
    control.open_phase(LoadPhase(describe(options), Closed(args.num_users or 1), 0.0, options))
    environment.flyspec_control = control
