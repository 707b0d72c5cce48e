"""What a service tells of itself while it runs: logs, metrics, traces.

`logs` and `request_ids` say what happened and for whom; `metrics` and `port` are for Prometheus,
`traces` for OpenTelemetry, which is imported only when spans have somewhere to go; `interceptor`
counts RPCs and takes over request ids; `service` puts it together for one service.
"""

from flyspec.telemetry.logs import configure_logging, fields
from flyspec.telemetry.request_ids import (
    new_request_id,
    request_id,
    request_id_of,
    set_request_id,
)
from flyspec.telemetry.service import Telemetry

__all__ = [
    "Telemetry",
    "configure_logging",
    "fields",
    "new_request_id",
    "request_id",
    "request_id_of",
    "set_request_id",
]
