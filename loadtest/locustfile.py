"""The same users under locust's own command line and web page: a closed loop, until stopped.

    locust -f loadtest/locustfile.py --host 127.0.0.1:50050 --rule fly

All that `python -m loadtest` knows of servers and requests is a flag here, too; scenarios, goals
and the report are not. Also for several processes or machines (`--processes`, `--master`).
"""

import loadtest.patched  # noqa: F401  before anything that gevent has to patch

# isort: split
from typing import Any

from locust import events

from flyspec.client import DEFAULT_ADDRESS
from loadtest import options
from loadtest.control import Control
from loadtest.prompts import FRESH, Source, prompt_mix
from loadtest.scenarios.base import describe
from loadtest.users.grpc import GrpcTransport
from loadtest.users.loops import ClosedLoopUser
from loadtest.work import Closed, Phase, Variant

__all__ = ["ClosedLoopUser"]


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_flags(parser: Any) -> None:
    """Flags of servers and requests; `--host` is the address."""
    options.add_access(parser)
    options.add_requests(parser)


@events.init.add_listener  # type: ignore[untyped-decorator]
def begin(environment: Any, **_: Any) -> None:
    """Give the users what they share; one phase is on without end."""
    args = environment.parsed_options
    args.address = environment.host or DEFAULT_ADDRESS
    control = Control(
        GrpcTransport(options.endpoint_of(args), args.connections),
        prompt_mix(args.prompt_file or [Source(FRESH)], args.problems, args.chat, args.seed),
        args.seed,
        keep_records=False,
    )
    asked = options.generate_options(args)
    users = Closed(args.num_users or 1)
    control.open_phase(Phase("locust", users, 0.0, (Variant(describe(asked), asked),)))
    environment.flyspec_control = control
