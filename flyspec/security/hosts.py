"""By which names requests reach a port: the `Host` of HTTP.

A page of any site can have a name of its own resolve to this machine, and so read a port here as if
it were its own (DNS rebinding). A browser sends that name; an IP address cannot be such a name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

ALL = "*"
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d*)?")
_LOOPBACK = ("localhost", "*.localhost")


def is_served(host: str, names: Collection[str]) -> bool:
    """True if a `Host` is an IP address, a name of this machine, or one of `names`.

    `*.example.com` in `names` is every name below example.com, `*` every name.
    """
    match = _HOST.fullmatch(host.lower())
    if match is None:
        return False
    name = match[1].removesuffix(".")
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        known = [known.lower() for known in (*_LOOPBACK, *names)]
        return name in known or name.endswith(tuple(k[1:] for k in known if k.startswith(ALL)))
    return True
