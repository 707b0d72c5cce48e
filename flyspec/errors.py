"""Errors for users: each message says what is wrong and what to change.

Everything raised on purpose in flyspec is one of these. `flyspec.rpc` maps them to gRPC statuses
and the CLI prints one line; any other exception is a bug and is logged with its traceback.
"""

from __future__ import annotations

from typing import ClassVar


class FlyspecError(Exception):
    """An error with a message for the user. `status` is the name of a `grpc.StatusCode`."""

    status: ClassVar[str] = "INTERNAL"


class InvalidArgumentError(FlyspecError):
    """The request is invalid regardless of the system's state; the message names the field."""

    status = "INVALID_ARGUMENT"


class ContextLengthError(InvalidArgumentError):
    """The prompt leaves no room in the model's context."""


class UnauthenticatedError(FlyspecError):
    """Not authenticated: no API key, or a wrong one."""

    status = "UNAUTHENTICATED"


class PermissionDeniedError(FlyspecError):
    """Authenticated but not permitted."""

    status = "PERMISSION_DENIED"


class NotFoundError(FlyspecError):
    """Something the request names does not exist."""

    status = "NOT_FOUND"


class UnimplementedError(FlyspecError):
    """The server has no such method."""

    status = "UNIMPLEMENTED"


class AlreadyExistsError(FlyspecError):
    """Something else by that name already exists."""

    status = "ALREADY_EXISTS"


class PrefixMismatchError(FlyspecError):
    """The session does not hold the message's prefix; open another with the whole sequence."""

    status = "FAILED_PRECONDITION"


class IncompatibleError(FlyspecError):
    """Two parts do not fit together, such as a drafter and target with different tokenizers."""

    status = "FAILED_PRECONDITION"


class StateError(FlyspecError):
    """The request's subject is in the wrong state for it; the message says which."""

    status = "FAILED_PRECONDITION"


class ResourceExhaustedError(FlyspecError):
    """A limit is reached; the same request may succeed after `retry_after_s` (None: unknown)."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(FlyspecError):
    """A required service does not answer."""

    status = "UNAVAILABLE"


class ModelFailureError(UnavailableError):
    """A step of a service's model failed; another replica's may work."""


class ModelLostError(FlyspecError):
    """A service's model is broken; its process exits to be restarted."""

    status = "UNAVAILABLE"


class TargetChangedError(FlyspecError):
    """The target was replaced by another model during the generation; send the request again."""

    status = "ABORTED"


class ConfigError(FlyspecError):
    """The configuration cannot work: wrong path, port in use, unsupported model."""

    status = "INVALID_ARGUMENT"


class DeadlineExceededError(FlyspecError):
    """The request exceeded the client's deadline, or the client a timeout of the server."""

    status = "DEADLINE_EXCEEDED"


class IdleTimeoutError(DeadlineExceededError):
    """A session was closed because its client was silent for too long."""
