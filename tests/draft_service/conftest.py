"""A tiny random draft model on disk, runners over it, and draft services on free ports."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flyspec.config import DraftSettings
from flyspec.engine.loading import load_model
from tests.draft_service.draft_harness import (
    CONTEXT_LENGTH,
    VOCAB_SIZE,
    CountingRunner,
    start_service,
)

TEXT = "the cat sat on the mat and the dog sat on the log while the cat saw the dog run. " * 4


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A random Llama in Hugging Face format, with a byte-level BPE tokenizer."""
    directory = tmp_path_factory.mktemp("draft-model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<eos>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(
        directory
    )
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.25,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def loaded(model_dir):
    return load_model(model_dir, "cpu", "float64")


@pytest.fixture(scope="session")
def served(model_dir):
    """A model for runners, which replace its attention; `loaded` is what they are compared with."""
    return load_model(model_dir, "cpu", "float64")


@pytest.fixture
def runner(served):
    return CountingRunner(served, num_slots=4)


@pytest.fixture(scope="session")
def service_with(model_dir):
    """Starts a service with the tiny model in float64; arguments are settings."""

    def start(**settings):
        values = {"model": model_dir, "dtype": "float64", "device": "cpu", "threads": 1, "port": 0}
        return start_service(DraftSettings(**{**values, **settings}))

    return start


@pytest.fixture(scope="session")
async def service(service_with):
    """A service shared by tests that leave no session behind."""
    async with service_with() as running:
        yield running


@pytest.fixture(scope="session")
def prompt(loaded):
    """Token ids of a text that repeats itself."""
    return Tokenizer.from_buffer(loaded.tokenizer.tokenizer_json).encode(TEXT[:110]).ids
