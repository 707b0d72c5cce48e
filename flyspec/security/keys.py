"""API keys: a file of their hashes, what each may do, and making new ones.

A key is 32 random bytes, so one round of SHA-256 keeps it: there is nothing to guess that a slow
hash would protect.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
import secrets
import tomllib
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from flyspec.errors import ConfigError
from flyspec.security.watched_files import Watched, read_bytes

KEY_PREFIX = "fsk_"
"""Begins every key, so that scanners for secrets know one."""
KEY_BYTES = 32
MAX_KEY_CHARACTERS = 512
"""Of what a client may send as its key."""
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = r"[A-Za-z0-9._@-]{1,64}"


class Scope(StrEnum):
    """What a key lets its holder do."""

    GENERATE = "generate"
    ADMIN = "admin"


@dataclass(frozen=True)
class ApiKey:
    """A client as its key shows it, with its own limits; None leaves a limit to the settings."""

    name: str
    scopes: frozenset[Scope]
    max_concurrent: int | None = None
    max_requests_per_minute: int | None = None
    max_tokens_per_request: int | None = None
    expires: datetime.datetime | None = None

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        return self.expires is not None and self.expires <= datetime.datetime.now(datetime.UTC)


def _hash(text: str) -> str:
    if not _HASH.fullmatch(text):
        raise ValueError("is not sha256: and 64 hexadecimal digits, as `flyspec keys new` prints")
    return text


def _with_zone(time: datetime.datetime) -> datetime.datetime:
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


_Hash = Annotated[str, AfterValidator(_hash)]
_Limit = Annotated[int, Field(ge=1, strict=True)]


class _Entry(BaseModel):
    """A `[[keys]]` of the file."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=f"^{_NAME}$")
    hash: _Hash | Annotated[list[_Hash], Field(min_length=1)]
    scopes: Annotated[list[Literal["generate", "admin"]], Field(min_length=1)]
    max_concurrent: _Limit | None = None
    max_requests_per_minute: _Limit | None = None
    max_tokens_per_request: _Limit | None = None
    expires: Annotated[datetime.datetime, AfterValidator(_with_zone)] | None = None

    @property
    def hashes(self) -> list[str]:
        return [self.hash] if isinstance(self.hash, str) else self.hash

    def key(self) -> ApiKey:
        fields = self.model_dump(exclude={"hash", "scopes"})
        return ApiKey(scopes=frozenset(map(Scope, self.scopes)), **fields)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[_Entry] = []


class ApiKeys:
    """The keys of a file, as it is now. Raises `ConfigError` for one that cannot be read."""

    def __init__(self, path: str) -> None:
        self._watched = Watched("the API keys", [path], lambda: read_keys(path))

    def find(self, key: str) -> ApiKey | None:
        """Whose key this is; None if it is nobody's."""
        given = hash_of(key).encode()
        found: ApiKey | None = None
        for digest, owner in self._watched.current():  # all of them: it always takes as long
            if hmac.compare_digest(digest, given):
                found = owner
        return found


def read_keys(path: str) -> list[tuple[bytes, ApiKey]]:
    """The hashes in a file, and whose they are. Raises `ConfigError`."""
    where = f"--api-keys-file {path}"
    try:
        document: dict[str, Any] = tomllib.loads(read_bytes(path, "--api-keys-file").decode())
        entries = _File.model_validate(document).keys
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: is no TOML: {error}") from None
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]  # a key put in by mistake is not shown
        place = ".".join(str(part) for part in problem["loc"] if not _is_type(part))
        raise ConfigError(f"{where}: {place}: {problem['msg']}") from None
    found: list[tuple[bytes, ApiKey]] = []
    names: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise ConfigError(
                f"{where}: two entries are named {entry.name!r}; to change a key without a pause, "
                "give one entry a list of hashes"
            )
        names.add(entry.name)
        for digest in entry.hashes:
            if digest.encode() in dict(found):
                raise ConfigError(f"{where}: {entry.name!r} has a hash that is there already")
            found.append((digest.encode(), entry.key()))
    return found


def _is_type(part: int | str) -> bool:
    """Whether a part of where a problem is names one of several types, and no field."""
    return isinstance(part, str) and ("[" in part or part == "str")


def new_key() -> str:
    """A key that nobody has."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_of(key: str) -> str:
    """What the file holds of a key."""
    return "sha256:" + hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def entry_of(key: str, owner: ApiKey) -> str:
    """The TOML that makes a key known."""
    if not re.fullmatch(_NAME, owner.name):
        raise ConfigError(
            f"{owner.name!r}: a name is 1 to 64 letters, digits, dots, dashes, underscores and @"
        )
    scopes = ", ".join(f'"{scope}"' for scope in sorted(owner.scopes))
    lines = [
        "[[keys]]",
        f'name = "{owner.name}"',
        f'hash = "{hash_of(key)}"',
        f"scopes = [{scopes}]",
    ]
    for limit in ("max_concurrent", "max_requests_per_minute", "max_tokens_per_request"):
        if (value := getattr(owner, limit)) is not None:
            lines.append(f"{limit} = {value}")
    if owner.expires is not None:
        lines.append(f"expires = {owner.expires.isoformat(timespec='seconds')}")
    return "\n".join(lines) + "\n"
