"""What a service tells of itself while it runs: logs, metrics, traces.

`logs` and `request_ids` say what happened and for whom; `metrics` and `port` are for Prometheus,
`traces` for OpenTelemetry, which is imported only when spans have somewhere to go; `interceptor`
counts RPCs and takes over request ids; `service` puts it together for one service.
"""

from flyspec.telemetry.logs import configure_logging as configure_logging
from flyspec.telemetry.logs import fields as fields
from flyspec.telemetry.request_ids import new_request_id as new_request_id
from flyspec.telemetry.request_ids import request_id as request_id
from flyspec.telemetry.request_ids import request_id_of as request_id_of
from flyspec.telemetry.request_ids import set_request_id as set_request_id
from flyspec.telemetry.service import Telemetry as Telemetry
