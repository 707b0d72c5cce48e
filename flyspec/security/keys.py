"""API keys: a file of hashes with scopes and limits, and the creation of keys.

A key is 32 random bytes, so a single SHA-256 suffices; a slow hash only protects guessable secrets.
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
"""Prefix by which secret scanners recognize keys."""
KEY_BYTES = 32
MAX_KEY_CHARACTERS = 512
"""Maximum length of a key that a client sends."""
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = r"[A-Za-z0-9._@-]{1,64}"


class Scope(StrEnum):
    """Permissions of a key."""

    GENERATE = "generate"
    ADMIN = "admin"


@dataclass(frozen=True)
class ApiKey:
    """The owner of a key, with limits; None: the server's default."""

    name: str
    scopes: frozenset[Scope]
    max_concurrent: int | None = None
    max_requests_per_minute: int | None = None
    max_tokens_per_request: int | None = None
    expires: datetime.datetime | None = None

    @property
    def expired(self) -> bool:
        return self.expires is not None and self.expires <= datetime.datetime.now(datetime.UTC)


def _hash(text: str) -> str:
    if not _HASH.fullmatch(text):
        raise ValueError("must be sha256: and 64 hex digits, as printed by `flyspec keys new`")
    return text


def _with_zone(time: datetime.datetime) -> datetime.datetime:
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


_Hash = Annotated[str, AfterValidator(_hash)]
_Limit = Annotated[int, Field(ge=1, strict=True)]


class _Entry(BaseModel):
    """A `[[keys]]` entry of the file."""

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
    """The keys in a file, reloaded when it changes. Raises `ConfigError`."""

    def __init__(self, path: str) -> None:
        self._watched = Watched("the API keys", [path], lambda: read_keys(path))

    def find(self, key: str) -> ApiKey | None:
        """Return the owner of a key; None if it is unknown."""
        given = hash_of(key).encode()
        found: ApiKey | None = None
        for digest, owner in self._watched.current():  # all of them, in constant time
            if hmac.compare_digest(digest, given):
                found = owner
        return found


def read_keys(path: str) -> list[tuple[bytes, ApiKey]]:
    """Return a file's hashes and their owners. Raises `ConfigError`."""
    where = f"--api-keys-file {path}"
    try:
        document: dict[str, Any] = tomllib.loads(read_bytes(path, "--api-keys-file").decode())
        entries = _File.model_validate(document).keys
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]  # might be a key entered by mistake
        place = ".".join(str(part) for part in problem["loc"] if not _is_type(part))
        raise ConfigError(f"{where}: {place}: {problem['msg']}") from None
    found: list[tuple[bytes, ApiKey]] = []
    names: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise ConfigError(
                f"{where}: two entries are named {entry.name!r}; to rotate a key, give one entry "
                "a list of hashes"
            )
        names.add(entry.name)
        for digest in entry.hashes:
            if digest.encode() in dict(found):
                raise ConfigError(f"{where}: {entry.name!r} has a hash that is already in use")
            found.append((digest.encode(), entry.key()))
    return found


def _is_type(part: int | str) -> bool:
    """True if a part of a problem's location is a union's type rather than a field."""
    return isinstance(part, str) and ("[" in part or part == "str")


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_of(key: str) -> str:
    """Return a key's hash as written in the file."""
    return "sha256:" + hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def entry_of(key: str, owner: ApiKey) -> str:
    """Return the TOML entry for a key. Raises `ConfigError` for an invalid name."""
    if not re.fullmatch(_NAME, owner.name):
        raise ConfigError(
            f"{owner.name!r}: a name must be 1 to 64 letters, digits, dots, dashes, underscores "
            "or @"
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
