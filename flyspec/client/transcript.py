"""What a stream of events amounts to, with `Retract` applied."""

from __future__ import annotations

from dataclasses import replace

from flyspec.errors import FlyspecError
from flyspec.values.generation import Chunk, Event, Retract
from flyspec.values.tokens import Origin


class Transcript:
    """What a stream has said so far, tokens that it took back left out.

    `chunks` joined are the output at this moment.
    """

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.num_final_tokens = 0

    def add(self, event: Event) -> None:
        """Take the next event of the stream.

        Raises `FlyspecError` when it takes back more than was sent, or what was final.
        """
        match event:
            case Chunk():
                self.chunks.append(event)
                self.num_final_tokens = max(self.num_final_tokens, event.num_final_tokens)
            case Retract():
                self._retract(event)

    @property
    def text(self) -> str:
        """The text so far, what is not final included."""
        return "".join(chunk.text for chunk in self.chunks)

    def _retract(self, retract: Retract) -> None:
        tokens = sum(len(chunk.token_ids) for chunk in self.chunks)
        size = sum(len(chunk.text.encode()) for chunk in self.chunks)
        if not (
            self.num_final_tokens <= retract.output_token_index <= tokens
            and 0 <= retract.text_byte_offset <= size
        ):
            raise FlyspecError(
                f"the server took back tokens from {retract.output_token_index} on and text from "
                f"byte {retract.text_byte_offset} on; it had sent {tokens} tokens, "
                f"{self.num_final_tokens} of them final, and {size} bytes"
            )
        tokens, size = retract.output_token_index, retract.text_byte_offset
        kept = []
        for chunk in self.chunks:
            kept.append(_cut(chunk, tokens, size))
            tokens = max(0, tokens - len(chunk.token_ids))
            size = max(0, size - len(chunk.text.encode()))
        self.chunks = [chunk for chunk in kept if chunk.token_ids or chunk.text]


def _cut(chunk: Chunk, tokens: int, size: int) -> Chunk:
    """The first `tokens` tokens of a chunk and the first `size` bytes of its text.

    Text may come later than its token, so the two are cut each for itself.
    """
    text = chunk.text.encode()[:size].decode(errors="ignore")
    if tokens >= len(chunk.token_ids) and text == chunk.text:
        return chunk
    token_texts = tuple(chunk.token_texts[:tokens])
    origins = tuple(chunk.origins[:tokens])
    return replace(
        chunk,
        text=text,
        token_ids=tuple(chunk.token_ids[:tokens]),
        origins=origins,
        token_texts=token_texts if "".join(token_texts) == text else (),
        loose_gaps_nats=tuple(chunk.loose_gaps_nats[: origins.count(Origin.LOOSE)]),
        logprobs=tuple(chunk.logprobs[:tokens]),
    )
