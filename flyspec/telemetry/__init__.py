"""Logs, Prometheus metrics and OpenTelemetry traces of a service.

`service` combines the other modules for one service. OpenTelemetry is imported only if traces are
exported.
"""

from flyspec.telemetry.logs import configure_logging as configure_logging
from flyspec.telemetry.logs import fields as fields
from flyspec.telemetry.request_ids import new_request_id as new_request_id
from flyspec.telemetry.request_ids import request_id as request_id
from flyspec.telemetry.request_ids import request_id_of as request_id_of
from flyspec.telemetry.request_ids import set_client as set_client
from flyspec.telemetry.request_ids import set_request_id as set_request_id
from flyspec.telemetry.service import Telemetry as Telemetry
