"""Errors that reach a user: what is wrong, what to change, and the status code that says so.

Everything raised on purpose in flyspec is one of these. `flyspec.rpc` turns them into gRPC statuses
and the CLI into one line on standard error; anything else is a bug and is logged with its trace.
"""

from __future__ import annotations

from typing import ClassVar


class FlyspecError(Exception):
    """An error with a message for the user. `status` is the name of a `grpc.StatusCode`."""

    status: ClassVar[str] = "INTERNAL"


class InvalidArgumentError(FlyspecError):
    """The request is wrong whatever the state of the system; the message names the field."""

    status = "INVALID_ARGUMENT"


class UnauthenticatedError(FlyspecError):
    """Nobody knows who asks: no API key, or one that is wrong."""

    status = "UNAUTHENTICATED"


class PermissionDeniedError(FlyspecError):
    """Who asks is known, and may not."""

    status = "PERMISSION_DENIED"


class NotFoundError(FlyspecError):
    """A thing that the request names does not exist."""

    status = "NOT_FOUND"


class UnimplementedError(FlyspecError):
    """The server has no such method."""

    status = "UNIMPLEMENTED"


class AlreadyExistsError(FlyspecError):
    """A thing that the request would make exists already, and is another."""

    status = "ALREADY_EXISTS"


class PrefixMismatchError(FlyspecError):
    """The message builds on a prefix that this session does not hold; open another with it all."""

    status = "FAILED_PRECONDITION"


class IncompatibleError(FlyspecError):
    """Two parts do not fit together, such as a drafter and a target of different tokenizers."""

    status = "FAILED_PRECONDITION"


class StateError(FlyspecError):
    """What the request names is in a state that does not allow it; the message says which."""

    status = "FAILED_PRECONDITION"


class ResourceExhaustedError(FlyspecError):
    """A limit is reached; the same request may succeed later.

    `retry_after_s`: seconds after which to try again, None if nobody knows.
    """

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(FlyspecError):
    """A service that is needed does not answer."""

    status = "UNAVAILABLE"


class ModelFailureError(UnavailableError):
    """A step of a service's model failed; another replica's may work."""


class ModelLostError(FlyspecError):
    """A service's model works no more; its process ends to be started again."""

    status = "UNAVAILABLE"


class TargetChangedError(FlyspecError):
    """The target was replaced by another model in the midst of a generation; send it again."""

    status = "ABORTED"


class ConfigError(FlyspecError):
    """The configuration cannot work: wrong path, port in use, unsupported model."""

    status = "INVALID_ARGUMENT"


class IdleTimeoutError(FlyspecError):
    """A session heard nothing from its client for too long and was closed."""

    status = "DEADLINE_EXCEEDED"


class DeadlineExceededError(FlyspecError):
    """A request took longer than its client allows, or its client longer than the server does."""

    status = "DEADLINE_EXCEEDED"
