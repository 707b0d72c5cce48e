"""Shared by all gRPC servers and channels of flyspec: limits, errors, health, draining.

A service adds its servicer to a `GrpcServer`; the servicer's methods are decorated with `handler`,
which maps `FlyspecError` to a gRPC status.
"""

from flyspec.rpc.channel import CHANNEL_OPTIONS as CHANNEL_OPTIONS
from flyspec.rpc.channel import Link as Link
from flyspec.rpc.channel import connect as connect
from flyspec.rpc.channel import connect_blocking as connect_blocking
from flyspec.rpc.gate import CertificateNames as CertificateNames
from flyspec.rpc.gate import Check as Check
from flyspec.rpc.gate import checks_of as checks_of
from flyspec.rpc.gate import names_of as names_of
from flyspec.rpc.server import SERVER_OPTIONS as SERVER_OPTIONS
from flyspec.rpc.server import GrpcServer as GrpcServer
from flyspec.rpc.sizes import Lengths as Lengths
from flyspec.rpc.sizes import check_lengths as check_lengths
from flyspec.rpc.sizes import check_lists as check_lists
from flyspec.rpc.sizes import check_request_lengths as check_request_lengths
from flyspec.rpc.sizes import max_request_bytes as max_request_bytes
from flyspec.rpc.sizes import max_streams as max_streams
from flyspec.rpc.statuses import BUG as BUG
from flyspec.rpc.statuses import WRITE_FAILED as WRITE_FAILED
from flyspec.rpc.statuses import error_of as error_of
from flyspec.rpc.statuses import error_of_status as error_of_status
from flyspec.rpc.statuses import handler as handler
from flyspec.rpc.statuses import was_said as was_said
from flyspec.rpc.streams import read as read
from flyspec.rpc.streams import read_ahead as read_ahead
from flyspec.rpc.streams import receive as receive
from flyspec.rpc.streams import unbroken as unbroken
from flyspec.rpc.streams import unhandled as unhandled
from flyspec.rpc.streams import write as write
