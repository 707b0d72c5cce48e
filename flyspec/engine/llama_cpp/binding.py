"""llama.cpp through the C API that llama-cpp-python binds: a model, its vocabulary, a context.

Sequences are numbered from 0; each has a part of the KV cache of its own (`kv_unified` off), so
that a step reads no others' keys. The calls and their meaning: llama.h.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flyspec.errors import ConfigError
from flyspec.spelling import install_command

log = logging.getLogger(__name__)

_Floats = np.ndarray[Any, np.dtype[np.float32]]

_CACHE_MULTIPLE = 256
ALL_LAYERS = -1
_MICRO_BATCH = 512
_SCORES_BYTES = 256 << 20
_LEAST_MICRO_BATCH = 64
"""Fewer tokens at once would make prompts slow."""
_WARNING = 3  # GGML_LOG_LEVEL_WARN
_CONTINUED = 5


def cache_length(length: int) -> int:
    """Return the tokens for which llama.cpp makes room, to hold a sequence of so many."""
    return -(-length // _CACHE_MULTIPLE) * _CACHE_MULTIPLE


def library() -> Any:
    """Return llama-cpp-python's low-level binding. Raises `ConfigError` if it is missing."""
    try:
        import llama_cpp.llama_cpp as found
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"GGUF files need llama.cpp ({error}); {install_command('llama-cpp')}"
        ) from None
    found.llama_log_set(_callback(found), None)
    return found


def _log_line(level: int, text: bytes, _: Any) -> None:
    """Log llama.cpp's warnings and errors, at debug level: what matters is raised or logged."""
    if _WARNING <= level < _CONTINUED:
        log.debug("%s", text.decode(errors="replace").rstrip())


_callbacks: list[Any] = []  # llama.cpp keeps only the address


def _callback(found: Any) -> Any:
    if not _callbacks:
        _callbacks.append(found.llama_log_callback(_log_line))
    return _callbacks[0]


def version() -> str:
    """Return llama.cpp's version, with that of the binding, which has one for each build."""
    import llama_cpp

    return f"llama.cpp {library().llama_version().decode()} ({llama_cpp.__version__})"


def features() -> str:
    """Return what the installed llama.cpp uses of this machine, such as "AVX512_BF16"."""
    said: str = library().llama_print_system_info().decode().removeprefix("CPU : ")
    return " ".join(part.split("=")[0].strip() for part in said.split("|") if "= 1" in part)


class GgufVocabulary:
    """The vocabulary of a loaded model: special tokens, and llama.cpp's own tokenizer."""

    def __init__(self, model: GgufModel) -> None:
        self._model = model  # llama.cpp frees both together
        lib, handle = model.lib, model.lib.llama_model_get_vocab(model.handle)
        self._lib, self._handle = lib, handle
        self.size = int(lib.llama_vocab_n_tokens(handle))
        self.bos, self.eos, self.pad = (
            None if (found := int(ask(handle))) < 0 else found
            for ask in (lib.llama_vocab_bos, lib.llama_vocab_eos, lib.llama_vocab_pad)
        )
        self.adds_bos = bool(lib.llama_vocab_get_add_bos(handle))
        self.adds_eos = bool(lib.llama_vocab_get_add_eos(handle))

    def ends(self, token_id: int) -> bool:
        """True if a token ends a text or a turn (`llama_vocab_is_eog`)."""
        return bool(self._lib.llama_vocab_is_eog(self._handle, token_id))

    def encode(self, text: str) -> list[int]:
        """Encode a text as llama.cpp does, special tokens included."""
        data = text.encode()
        room = len(data) + 8
        tokens = (ctypes.c_int32 * room)()
        count = self._lib.llama_tokenize(self._handle, data, len(data), tokens, room, True, True)
        return list(tokens[:count])


class GgufModel:
    """The weights of a GGUF file. Raises `ConfigError` for one that cannot be served.

    `gpu_layers` go to the GPUs that llama.cpp was built for, from the last one on; `ALL_LAYERS`.
    """

    def __init__(self, path: Path, gpu_layers: int) -> None:
        self.lib = lib = library()
        lib.llama_backend_init()
        parameters = lib.llama_model_default_params()
        parameters.n_gpu_layers = gpu_layers
        self.handle = lib.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.handle:
            raise ConfigError(
                f"--model {path}: llama.cpp cannot load it (its own messages: --log-level debug); "
                "a newer llama-cpp-python may know its architecture"
            )
        self._end = weakref.finalize(self, lib.llama_model_free, self.handle)
        if reason := self._unserved():
            self._end()
            raise ConfigError(f"--model {path}: cannot be served: {reason}")
        self.vocabulary = GgufVocabulary(self)
        self.context_length = int(lib.llama_model_n_ctx_train(self.handle))
        self.num_parameters = int(lib.llama_model_n_params(self.handle))
        self.num_bytes = int(lib.llama_model_size(self.handle))
        self.num_heads = int(lib.llama_model_n_head(self.handle))
        self.file_type = _name(lib.llama_ftype_name(lib.llama_model_ftype(self.handle)))

    def _unserved(self) -> str:
        lib, handle = self.lib, self.handle
        if lib.llama_model_is_recurrent(handle) or lib.llama_model_is_hybrid(handle):
            return "it has recurrent state, which cannot be rolled back"
        if lib.llama_model_is_diffusion(handle):
            return "it generates by diffusion, not from left to right"
        if lib.llama_model_has_encoder(handle) or not lib.llama_model_has_decoder(handle):
            return "it has an encoder, and only decoders are served"
        return ""


def _name(text: bytes | None) -> str:
    return (text or b"unknown").decode().replace("(guessed)", "").strip()


class ContextPlan(NamedTuple):
    """A context's size: sequences, tokens of each, tokens of a call; threads, cache, attention.

    `float32`: keys and values in float32, and attention computed plainly, else in float16.
    `micro_batch`: most tokens that llama.cpp computes at once; larger steps are several.
    `plain_attention`: products and a softmax instead of llama.cpp's flash attention.
    `on_gpu`: layers, and so their keys and values, are on GPUs.
    """

    num_sequences: int
    length: int
    batch_tokens: int
    threads: int
    float32: bool
    micro_batch: int = _MICRO_BATCH
    plain_attention: bool = False
    on_gpu: bool = False


def plain_attention_tokens(model: GgufModel, length: int) -> int:
    """Return how many tokens can be attended to plainly at once on a CPU; 0 if too few to pay.

    There llama.cpp's flash attention handles row by row, head by head and key by key (`ggml-cpu`,
    ops.cpp), so that a round's rows cost 2 to 10 times what they do as matrix products. These need
    memory for the scores of all heads, though: tokens x heads x keys, in float32.
    """
    row = 4 * model.num_heads * cache_length(length)
    affordable = min(_MICRO_BATCH, _SCORES_BYTES // row)
    return affordable if affordable >= _LEAST_MICRO_BATCH else 0


class Context:
    """A KV cache with sequences, and the calls that extend and shorten them."""

    def __init__(self, model: GgufModel, plan: ContextPlan) -> None:
        self._lib, self._model, self.plan = model.lib, model, plan
        lib, capacity = model.lib, plan.batch_tokens
        parameters = lib.llama_context_default_params()
        parameters.n_seq_max = plan.num_sequences
        parameters.n_ctx = plan.num_sequences * cache_length(plan.length)
        parameters.n_batch = capacity
        parameters.n_ubatch = min(capacity, plan.micro_batch)
        parameters.n_threads = parameters.n_threads_batch = plan.threads
        parameters.kv_unified = False
        parameters.swa_full = True  # a sliding window forgets what a rollback needs
        parameters.no_perf = True
        if plan.float32:
            parameters.type_k = parameters.type_v = lib.GGML_TYPE_F32
        if plan.float32 or plan.plain_attention:
            parameters.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.handle = lib.llama_init_from_model(model.handle, parameters)
        if not self.handle:
            raise MemoryError("llama.cpp cannot allocate the KV cache")
        weakref.finalize(self, lib.llama_free, self.handle)
        self._memory = lib.llama_get_memory(self.handle)
        self._vocab_size = model.vocabulary.size
        self._logits_at = 0
        self._logits = np.empty((0, self._vocab_size), np.float32)
        self._batch(capacity)

    def _batch(self, capacity: int) -> None:
        """Make a batch whose arrays are filled from here."""
        self._tokens, self._positions, self._sequences = (
            np.zeros(capacity, np.int32) for _ in range(3)
        )
        self._wanted = np.zeros(capacity, np.int8)
        ones = np.ones(capacity, np.int32)
        # llama.h wants a pointer to each token's sequence ids, of which it has one.
        pointers = self._sequences.ctypes.data + 4 * np.arange(capacity, dtype=np.uint64)
        self._kept = (ones, pointers)
        batch = self._lib.llama_batch()
        for field, array in (
            ("token", self._tokens), ("pos", self._positions), ("n_seq_id", ones),
            ("seq_id", pointers), ("logits", self._wanted),
        ):  # fmt: skip
            kind = dict(batch._fields_)[field]
            setattr(batch, field, ctypes.cast(array.ctypes.data, kind))
        self._llama_batch = batch

    def keep(self, sequence: int, length: int) -> None:
        """Drop what a sequence holds beyond its first `length` tokens."""
        if not self._lib.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise RuntimeError("llama.cpp cannot shorten this model's sequences")

    def copy(self, source: int, target: int, length: int) -> None:
        """Make `target` begin with the first `length` tokens of `source`, and hold nothing else.

        On CPUs by way of a saved state, which has the tokens that `source` holds;
        `llama_memory_seq_cp` copies all that it has room for, without leaving a GPU.
        """
        lib, handle = self._lib, self.handle
        if not self.plan.on_gpu:
            size = lib.llama_state_seq_get_size(handle, source)
            room = np.empty(size, np.uint8)
            state = ctypes.cast(room.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
            lib.llama_state_seq_get_data(handle, state, size, source)
            self.keep(target, 0)
            if lib.llama_state_seq_set_data(handle, state, size, target) != size:
                raise RuntimeError("llama.cpp cannot copy a sequence")
        else:
            lib.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        self.keep(target, length)

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int],
        wanted: Sequence[int],
    ) -> _Floats:  # fmt: skip
        """Append tokens to their sequences; return the rows of logits wanted [rows, vocab].

        `wanted` are increasing indexes of tokens; tokens of a sequence are together, sequences in
        order. The rows are valid until the next call.
        """
        size = self.plan.batch_tokens
        if len(tokens) <= size:
            return self._decode(tokens, positions, sequences, wanted)
        rows = []
        for at in range(0, len(tokens), size):
            part = slice(at, at + size)
            own = [i - at for i in wanted if at <= i < at + size]
            found = self._decode(tokens[part], positions[part], sequences[part], own)
            rows.append(found.copy())
        return np.concatenate(rows)

    def _decode(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int],
        wanted: Sequence[int],
    ) -> _Floats:  # fmt: skip
        count, batch = len(tokens), self._llama_batch
        self._tokens[:count], self._positions[:count] = tokens, positions
        self._sequences[:count] = sequences
        self._wanted[:count] = 0
        self._wanted[wanted] = 1
        batch.n_tokens = count
        code = self._lib.llama_decode(self.handle, batch)
        if code:
            raise RuntimeError(f"llama.cpp could not run a step (llama_decode returned {code})")
        return self._rows(len(wanted))

    def _rows(self, count: int) -> _Floats:
        """Return the first rows of logits where llama.cpp has them, which seldom changes."""
        if not count:
            return np.empty((0, self._vocab_size), np.float32)
        address = ctypes.addressof(self._lib.llama_get_logits(self.handle).contents)
        if address != self._logits_at or count > len(self._logits):
            size = 4 * count * self._vocab_size
            floats = memoryview((ctypes.c_byte * size).from_address(address))
            self._logits = np.frombuffer(floats, np.float32).reshape(count, self._vocab_size)
            self._logits_at = address
        return self._logits[:count]
