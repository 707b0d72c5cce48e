"""flyspec: speculative decoding as a service. Shared library, client and command line."""

import os

# gRPC's core writes its own lines to standard error (a port in use, a lost peer); we say it better.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
