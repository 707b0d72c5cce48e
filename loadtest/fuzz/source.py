"""Scripts for a server: the methods that its descriptors name, called with changed sessions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from random import Random

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from flyspec.rules.presets import RULE_PRESETS
from flyspec.v1 import admin_pb2, draft_pb2, generation_pb2, verify_pb2
from loadtest.fuzz import seeds
from loadtest.fuzz.calls import BLAMELESS, OK, REFUSED, Do, Method, Script, Step, methods_of
from loadtest.fuzz.mutate import Mutator, extended, mangled, places, readable
from loadtest.fuzz.seeds import Facts, Session, answered, of_every_server

SYSTEM = methods_of(health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
NOWHERE = SYSTEM[0]._replace(path="/flyspec.v1.Nothing/At/All")
SERVICES: dict[str, tuple[FileDescriptor, Callable[[Facts], Iterable[Session]]]] = {
    "draft": (draft_pb2.DESCRIPTOR, seeds.draft),
    "verify": (verify_pb2.DESCRIPTOR, seeds.verify),
    "generation": (generation_pb2.DESCRIPTOR, seeds.generation),
    "admin": (admin_pb2.DESCRIPTOR, seeds.admin),
}
"""Where a server's methods and valid sessions come from."""
KINDS = {
    "valid": 12, "an unknown field added": 4, "fields changed": 50, "bytes changed": 12,
    "a message dropped": 2, "a message doubled": 4, "messages reordered": 3, "cut short": 2,
    "mixed with another session": 3, "cancelled": 4, "left open": 2, "its deadline passes": 2,
}  # fmt: skip
"""How a session is changed, and how often."""
OWN_WEIGHT = 4
"""How much more often a field of the server's own methods is changed than one of gRPC's."""
MAX_TOKENS, MAX_WAIT_MS, PATIENCE_S = 50, 200, 3.0
"""What a request may cost, so that nobody waits long for one that is valid."""


class ScriptSource:
    """Makes scripts for the server of this name."""

    def __init__(self, name: str, facts: Facts) -> None:
        file, sessions = SERVICES[name]
        (service,) = file.services_by_name.values()
        known, self._own = [*sessions(facts), *of_every_server(service.full_name)], methods_of(file)
        self.sessions: dict[Method, list[Session]] = {
            method: [s for s in known if isinstance(s[0], method.request)] or [[method.request()]]
            for method in (*self._own, *SYSTEM, NOWHERE)
        }
        self._fields: dict[tuple[Method, str], list[tuple[Session, int, int]]] = defaultdict(list)
        for method, session in ((m, s) for m, found in self.sessions.items() for s in found):
            for at, message in enumerate(session):
                names = [field.full_name for _, field in places(message)]
                for place, field in enumerate(names or [""]):
                    self._fields[method, field].append((session, at, place))
        self._weights = [OWN_WEIGHT if method in self._own else 1 for method, _ in self._fields]
        numbers = (facts.vocab_size, facts.context_length, facts.max_drafts)
        self._mutator = Mutator(numbers, (*RULE_PRESETS, *facts.drafters))
        # An operator's request meets whatever state others left, and drafters that do not answer.
        self._by_state = frozenset({"UNAVAILABLE"} if name == "admin" else ())

    def script(self, rng: Random) -> Script:
        """The script that this generator leads to."""
        (field,) = rng.choices([*self._fields], self._weights)
        (kind,) = rng.choices([*KINDS], [*KINDS.values()])
        method, _ = field
        session, at, place = rng.choice(self._fields[field])
        data = [message.SerializeToString() for message in session]
        changed = at  # the first message that is not as it should be
        allowed, answers = BLAMELESS | self._by_state, 0
        end: list[Do] = []
        deadline_s = 0.2 if method.path.endswith("/Watch") else None
        match kind:
            case "valid" | "an unknown field added":
                if kind != "valid":
                    data[at] = extended(data[at], rng)
                changed, answers = len(data), sum(map(answered, session)) or 1
                if not self._by_state:  # grpc's own services do not implement everything
                    allowed = OK if method in self._own else OK | {"UNIMPLEMENTED"}
            case "fields changed":
                data[at] = self._changed(method.request, data[at], rng, place)
                if rng.random() < 0.25:
                    then = rng.randrange(len(data))
                    data[then] = self._changed(method.request, data[then], rng)
                    changed = min(at, then)
            case "bytes changed":
                other = rng.choice(self.sessions[method])[-1].SerializeToString()
                data[at] = mangled(data[at], other, rng)
            case "a message dropped":
                del data[at]
            case "a message doubled":
                data.insert(at, data[at])
            case "messages reordered":
                rng.shuffle(data)
                changed = 0
            case "cut short":
                del data[at + 1 :]
            case "mixed with another session":
                another = rng.choice(self.sessions[method])
                data[at] = another[at % len(another)].SerializeToString()
            case "its deadline passes":
                deadline_s = rng.choice((0.001, 0.01, 0.05))
            # Health and reflection keep streams open for minutes, and hold nothing for them.
            case "left open" if method in self._own:
                del data[at + 1 :]
                end = [Do.LEAVE]
            case _:
                del data[at + 1 :]
                end = [Do.CANCEL]
        # A session's messages come once and in order, the opening first.
        wrong = kind == "a message doubled" or (kind == "a message dropped" and data and not at)
        if wrong and method.streams and method in self._own:
            allowed = REFUSED
        for index, encoded in enumerate(data):
            data[index], costly = _affordable(method, encoded, rng)
            deadline_s = PATIENCE_S if costly and deadline_s is None else deadline_s
        steps = (*_steps(session, data, changed, rng), *end)
        return Script(method, kind, steps, allowed, answers, deadline_s)

    def _changed(
        self, cls: type[Message], data: bytes, rng: Random, place: int | None = None
    ) -> bytes:
        message = cls.FromString(data)
        self._mutator.change(message, rng, place)
        for _ in range(rng.choice((0, 0, 0, 1, 3))):
            self._mutator.change(message, rng)
        return message.SerializeToString()


def _affordable(method: Method, data: bytes, rng: Random) -> tuple[bytes, bool]:
    """A message that ends no run and takes little time; whether it may take long nevertheless."""
    match message := readable(method.request, data):
        case generation_pb2.GenerateRequest():
            if message.HasField("max_tokens") and message.max_tokens <= MAX_TOKENS:
                return data, False
            if rng.random() < 0.1:
                return data, True
            message.max_tokens = 3
        case admin_pb2.RegisterDrafterRequest():  # its address may lead nowhere
            return data, True
        case admin_pb2.DrainDrafterRequest() if message.wait_ms > MAX_WAIT_MS:
            message.wait_ms = MAX_WAIT_MS
        case admin_pb2.DrainRequest():
            message.resume = True
        case _:
            return data, False
    return message.SerializeToString(), False


def _steps(session: Session, data: list[bytes], changed: int, rng: Random) -> list[Step]:
    """Send these messages; perhaps wait for answers to those before the first `changed` one.

    To wait for an answer to another might take for ever.
    """
    steps: list[Step] = []
    paced, pauses = rng.random() < 0.6, rng.random() < 0.5
    for index, encoded in enumerate(data):
        steps.append(encoded)
        if paced and index < changed and answered(session[index]):
            steps.append(Do.READ)
        elif pauses and index == changed:
            steps.append(Do.PAUSE)
    return steps
