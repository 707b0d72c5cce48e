"""gRPC servicers for clients and operators, and access control."""
