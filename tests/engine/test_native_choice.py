"""The implementation that serves a model, and why: the self-test and what it rejects."""

import logging
import shutil
from dataclasses import replace

import pytest
import torch

from flyspec.bundled import MODELS
from flyspec.config import DraftSettings, ModelServerSettings
from flyspec.engine import devices
from flyspec.engine.devices import choose_dtype
from flyspec.engine.loading import load_model
from flyspec.engine.model import Step
from flyspec.engine.native import choice, family, library, trial
from flyspec.engine.native.choice import choose_model
from flyspec.engine.native.model import NativeModel
from flyspec.engine.native.trial import TrialOutcome
from flyspec.engine.runner import ModelRunner
from flyspec.remembered import recall, remember
from tests.engine.native_steps import SETS, compiled, needs_step, small_model
from tests.engine.random_models import loaded_model, make_model


@pytest.fixture
def found(monkeypatch):
    """A compiled step, wherever flyspec was installed."""
    monkeypatch.setattr(family, "find", lambda: compiled(SETS[0]))
    return


def chosen(model, caplog, **settings):
    """Return what serves a module, and the log line that says so."""
    caplog.set_level(logging.INFO)
    model = choose_model(loaded_model(model), DraftSettings(max_sessions=4, **settings))
    (line,) = (m for m in caplog.messages if m.startswith(("native step", "transformers'")))
    return model, line


def test_where_there_is_a_compiler_the_step_was_compiled_with_the_installation():
    if not SETS or shutil.which("g++") is None:
        pytest.skip("no g++, or no AVX2")
    library.find.cache_clear()
    assert isinstance(library.find(), library.Library), "run `pip install -e .` (make test does)"


@needs_step
@pytest.mark.parametrize("shape", ["llama", "qwen2", "qwen3", "mistral"])
def test_models_of_the_family_in_bfloat16_are_served_natively(shape, found, caplog):
    # Of this seed's tokens few are near-ties, which another processor may decide otherwise.
    model, line = chosen(small_model(shape, seed=5), caplog)
    assert isinstance(model, NativeModel)
    assert line.startswith(f"native step: {compiled(SETS[0]).name}, ")
    assert model.cache.num_free == 4
    assert model.cache.held(0) == []
    model.warm_up()


@needs_step
@pytest.mark.parametrize("name", ["target", "draft", "draft-bytes"])
def test_the_bundled_models_pass_their_trial_over_many_rows(name, found):
    loaded = load_model(str(MODELS / name), "cpu", "auto")
    assert loaded.info.dtype == "bfloat16"
    model = NativeModel(loaded, 2, compiled(SETS[0]))
    outcome = trial.try_out(model, loaded)
    assert outcome.refusal() is None
    assert outcome.rows >= 512
    assert outcome.difference < 0.8 * outcome.own_difference
    # The module is as it was, to serve if need be.
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}


@needs_step
@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("llama", {"dtype": torch.float32}, "in float32, and the native step supports only"),
        ("gemma2", {}, "no native step for gemma2 models"),
        ("llama", {"hidden_act": "gelu", "head_dim": 16}, "its activation is gelu"),
        ("llama", {"head_dim": 24}, "its head size 24 is not a multiple of 16"),
        (
            "llama",
            {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0,
                                                 "rope_theta": 1e4}},
            "its rotary embedding is of type dynamic",
        ),
    ],
)  # fmt: skip
def test_others_are_served_by_transformers(kind, changes, reason, found, caplog):
    module = make_model(kind, **{"dtype": torch.bfloat16, **changes})
    model, line = chosen(module, caplog)
    assert isinstance(model, ModelRunner)
    assert line.startswith("transformers' modules: ")
    assert reason in line


@needs_step
def test_blocks_are_for_transformers(found, caplog):
    model, line = chosen(small_model("llama"), caplog, block_size=32)
    assert isinstance(model, ModelRunner)
    assert line == "transformers' modules: --block-size 32: the native step supports only 0"


@needs_step
def test_weights_that_the_family_has_not_are_noticed(found, caplog):
    module = small_model("llama")
    module.model.layers[1].self_attn.sink = torch.nn.Parameter(torch.zeros(4))
    _, line = chosen(module, caplog)
    assert "it has unexpected weights: model.layers.1.self_attn.sink" in line


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [("off", "FLYSPEC_NATIVE=off"), ("sse", "not one of"), ("avx2", "not compiled")],
)
def test_without_a_library_transformers_serve(wanted, reason, monkeypatch, tmp_path, caplog):
    flags = library.INSTRUCTION_SETS["avx2"]
    monkeypatch.setattr(library, "processor_flags", lambda: flags)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    monkeypatch.setenv(library.ENVIRONMENT, wanted)
    library.find.cache_clear()
    try:
        model, line = chosen(small_model("llama"), caplog)
    finally:
        library.find.cache_clear()
    assert isinstance(model, ModelRunner)
    assert reason in line
    model.warm_up()
    model.forward([Step(0, 0, [1, 2, 3])])


def test_the_best_instruction_set_of_the_processor_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    for name, needed in library.INSTRUCTION_SETS.items():
        (tmp_path / f"step_{name}.cpython-311-x86_64-linux-gnu.so").write_text("no library")
        monkeypatch.setattr(library, "processor_flags", lambda needed=needed: needed)
        library.find.cache_clear()
        assert f"step_{name}" in str(library.find()) or name != "avx2"
    monkeypatch.setattr(library, "processor_flags", lambda: frozenset({"sse2"}))
    library.find.cache_clear()
    assert library.find() == "this processor lacks AVX2"
    library.find.cache_clear()


@needs_step
def test_a_step_that_computes_something_else_is_refused(found, caplog, monkeypatch):
    pack = choice.NativeModel.__init__

    def wrong(self, loaded, *arguments):
        pack(self, loaded, *arguments)
        with torch.no_grad():
            loaded.model.model.layers[0].mlp.up_proj.weight[3] *= 1.5

    monkeypatch.setattr(choice.NativeModel, "__init__", wrong)
    model, line = chosen(small_model("llama"), caplog)
    assert isinstance(model, ModelRunner)
    assert "the native step failed its trial: its logits differ from float32 by" in line


@needs_step
def test_a_step_whose_rows_depend_on_each_other_is_refused(found, caplog, monkeypatch):
    forward = choice.NativeModel.forward

    def dependent(self, steps):
        rows = forward(self, steps)
        return [r._replace(logits=r.logits + 1e-6 * (len(steps) > 1)) for r in rows]

    monkeypatch.setattr(choice.NativeModel, "forward", dependent)
    _, line = chosen(small_model("llama"), caplog)
    assert "its logits depend on what else is in the step" in line


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (TrialOutcome(1000, 0.01, 0.01, 10, 0, 900, 0, True), None),
        (TrialOutcome(1000, 0.01, 0.01, 15, 15, 900, 0, True), None),
        (TrialOutcome(30, 0.01, 0.01, 1, 0, 30, 0, True), None),
        (TrialOutcome(1000, 0.0111, 0.01, 0, 0, 900, 0, True), "differ from float32 by 0.011"),
        (TrialOutcome(1000, float("nan"), 0.01, 0, 0, 900, 0, True), "differ"),
        (TrialOutcome(1000, 0.01, 0.01, 11, 5, 900, 0, True), "11 of 1000 sample tokens"),
        (TrialOutcome(1000, 0.01, 0.01, 1, 0, 900, 1, True), "1 of 900 sample tokens"),
        (TrialOutcome(1000, 0.01, 0.01, 0, 0, 900, 0, False), "depend on what else"),
    ],
)
def test_what_a_trial_refuses(outcome, reason):
    assert reason is None or reason in str(outcome.refusal())
    assert (outcome.refusal() is None) == (reason is None)


def test_the_dtype_is_a_function_of_checkpoint_and_machine(monkeypatch):
    monkeypatch.setattr(devices, "processor_flags", lambda: frozenset({"avx512_bf16"}))
    narrow = make_model("llama", dtype=torch.bfloat16).config
    narrow.dtype = torch.bfloat16
    assert choose_dtype("auto", "cpu", narrow, False) == "float32"
    assert choose_dtype("auto", "cpu", narrow, True) == "bfloat16"
    monkeypatch.setattr(devices, "processor_flags", frozenset)
    narrow.hidden_size = 1024
    assert choose_dtype("auto", "cpu", narrow, False) == "float32"
    assert choose_dtype("auto", "cpu", narrow, True) == "bfloat16"
    assert choose_dtype("float32", "cpu", narrow, True) == "float32"
    narrow.dtype = torch.float16
    assert choose_dtype("auto", "cpu", narrow, True) == "float32"


@needs_step
def test_the_module_is_not_kept(found):
    import gc
    import weakref

    loaded = loaded_model(small_model("llama"))
    model = choose_model(loaded, ModelServerSettings(max_sessions=2))
    module = weakref.ref(loaded.model)
    del loaded
    gc.collect()
    assert module() is None
    model.forward([Step(0, 0, [1, 2, 3])])


@needs_step
def test_a_trial_is_not_repeated_for_a_model_that_computes_the_same(found, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded = load_model(str(MODELS / "draft"), "cpu", "auto")
    trials = []
    monkeypatch.setattr(choice, "try_out", lambda *of: trials.append(of) or trial.try_out(*of))
    settings = DraftSettings(max_sessions=2)
    assert isinstance(choose_model(loaded, settings), NativeModel)
    assert len(trials) == 1
    model = choose_model(loaded, settings)
    assert isinstance(model, NativeModel)
    assert len(trials) == 1
    assert model.cache.num_free == 2
    # Other bits, whatever the reason, are tried out.
    with torch.no_grad():
        loaded.model.model.norm.weight[0] *= 2
    choose_model(loaded, settings)
    assert len(trials) == 2
    # So is a model whose files are not known.
    unknown = replace(loaded, info=replace(loaded.info, weights_fingerprint=""))
    choose_model(unknown, settings)
    assert len(trials) == 3


def test_what_cannot_be_kept_or_read_is_forgotten(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remember("kind", {"a": 1}, "key", 1)
    assert recall("kind", "key", 1) == {"a": 1}
    assert recall("kind", "key", 2) is None
    (file,) = (tmp_path / "flyspec" / "kind").iterdir()
    file.write_text("{")
    assert recall("kind", "key", 1) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    remember("kind", {"a": 1}, "key", 1)
    assert recall("kind", "key", 1) is None
