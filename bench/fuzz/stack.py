"""The orchestrator under attack, with both services behind it; the canary is a generation."""

from __future__ import annotations

from collections.abc import Callable

from bench.fuzz.admin import AdminSource
from bench.fuzz.facts import Facts, ScriptSource
from bench.fuzz.generation import GenerationSource
from bench.fuzz.services import COUNT, MAX_SESSIONS, PROMPTS, WrongAnswerError
from flyspec.cli.service import Child
from flyspec.cli.stack import Stack, StackOptions
from flyspec.client import AdminClient, Chunk, Client, GenerateOptions
from flyspec.rules import Rule
from flyspec.values.admin import ProcessInfo
from loadtest.admin import left_open


class StackTarget:
    """The whole stack; `admin` says at which of the orchestrator's ports."""

    def __init__(self, admin: bool) -> None:
        self._at_admin = admin
        self.services: list[Child] = []
        self._stack: Stack | None = None

    async def start(self, on_log: Callable[[str], None]) -> None:
        """Start it, and `attach`."""
        options = StackOptions(
            device="cpu", dtype="float32", draft_dtype="float32", threads=1, draft_threads=1,
            max_sessions=MAX_SESSIONS, log_level="warning",
        )  # fmt: skip
        self._stack = stack = Stack(options, on_log=on_log)
        await stack.__aenter__()
        self.services = list(stack.services.values())
        await self.attach(stack.address, stack.admin_address, stack.draft_address)

    async def attach(self, address: str, admin_address: str, draft_address: str) -> None:
        """Generate what the canary must get."""
        self._client, self._admin = Client(address), AdminClient(admin_address)
        self.address = admin_address if self._at_admin else address
        texts = []
        for prompt in PROMPTS:
            self._prompt = prompt
            self._expected = await self._generate()
            texts.append(tuple(self._expected))
        model = (await self._client.list_models()).target
        drafters = tuple(d.name for d in await self._admin.list_drafters())
        self.facts = Facts(model.vocab_size, model.context_length, 64, 64, tuple(texts), drafters)
        self.source: ScriptSource = (
            AdminSource(self.facts, draft_address)
            if self._at_admin
            else GenerationSource(self.facts)
        )

    async def stop(self) -> None:
        """End all of it."""
        await self._client.close()
        await self._admin.close()
        if self._stack is not None:
            await self._stack.stop()

    async def check(self) -> None:
        """A generation."""
        if (got := await self._generate()) != self._expected:
            raise WrongAnswerError(f"generated {got} instead of {self._expected}")

    async def state(self) -> tuple[dict[str, int], list[ProcessInfo]]:
        """Generations, sessions with both services, and the services' processes."""
        return left_open(await self._admin.status()), []

    def renew(self) -> None:
        """Nothing is kept open."""

    async def leave(self) -> None:
        """Nothing is kept open."""

    async def _generate(self) -> list[int]:
        options = GenerateOptions(rule=Rule("exact"), max_tokens=COUNT, seed=1, ignore_eos=True)
        return [
            token
            async for event in self._client.generate(self._prompt, options)
            if isinstance(event, Chunk)
            for token in event.token_ids
        ]
