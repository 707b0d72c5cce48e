"""Who calls, who may run, who must wait, and who is told to come back later; no gRPC."""
