"""Makes the standard library and gRPC cooperate with gevent. Import it before anything else."""

import locust  # noqa: F401  patches the standard library
from gevent import get_hub
from grpc.experimental import gevent as grpc_gevent

grpc_gevent.init_gevent()

# A thread of gRPC waits in gevent's pool for every channel that has calls under way.
get_hub().threadpool.maxsize = 64
