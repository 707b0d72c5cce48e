"""The target and the draft model: engines, tokenizers, chat template, heads, and their fit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flyspec.chat_template import DEFAULT, ChatTemplates
from flyspec.config import DraftSettings, ModelServerSettings, VerifySettings
from flyspec.doctor.findings import Diagnosis, Mark
from flyspec.drafter_names import head_directories
from flyspec.engine.bundle import load_bundle
from flyspec.engine.checkpoint import Checkpoint
from flyspec.engine.devices import NamedDevice
from flyspec.engine.native.family import library_for
from flyspec.errors import ConfigError, InvalidArgumentError
from flyspec.model_files import CONFIG, check_model_files, finder, gguf_path, size_problem
from flyspec.planning.devices import READING, DeviceGroup
from flyspec.planning.shapes import make_shape
from flyspec.planning.speed import ACCEPTANCE, CONTEXT, Placed, SpeedPlan
from flyspec.preflight.cuda import check_device
from flyspec.preflight.gguf import serves_gguf
from flyspec.values.admin import TokenizerBundle
from flyspec.values.chat import Chat

PAIR = "pair"
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@dataclass
class Examined:
    """A model as far as its files show: `findings`, what would be loaded, and its tokenizer."""

    role: str
    settings: ModelServerSettings
    name: str
    device: NamedDevice | None = None
    checkpoint: Checkpoint | None = None
    bundle: TokenizerBundle | None = None
    findings: list[Diagnosis] = field(default_factory=list)

    @property
    def section(self) -> str:
        return f"{self.role} model {self.name}"


def target(settings: VerifySettings) -> Examined:
    """Examine the target."""
    found = Examined("target", settings, settings.model)
    found.findings += _model(found, settings.tensor_parallel_size)
    if found.bundle is not None:
        found.findings.append(_chat_template(found.section, found.bundle))
    for name, directory in head_directories(settings.heads).items():
        found.findings.append(_head(found.section, name, Path(directory).expanduser()))
    return found


def _head(section: str, name: str, folder: Path) -> Diagnosis:
    """Return whether a head's files are there; only loading it shows whether it fits the target."""
    missing = "" if (folder / CONFIG).is_file() else f"; it has no {CONFIG}"
    text = f"{folder}{missing or ', tried when the service starts'}"
    return Diagnosis(section, f"head {name}", Mark.ERROR if missing else Mark.OK, text)


def draft(settings: DraftSettings) -> Examined:
    """Examine the draft model, if there is one."""
    found = Examined("draft", settings, settings.model)
    if settings.model:
        found.findings += _model(found, 1)
    else:
        text = "none: drafts come from prompt lookup, which pays off where texts repeat"
        found.findings.append(Diagnosis("draft model", "model", Mark.OK, text))
    return found


def _model(found: Examined, ranks: int) -> Iterator[Diagnosis]:
    section, settings = found.section, found.settings
    assert isinstance(settings, DraftSettings | VerifySettings)
    try:
        if serves_gguf(settings):
            yield from _gguf(found)
            return
        found.device = check_device(settings.device)
        yield Diagnosis(section, "device", Mark.OK, f"{found.device} (--device {settings.device})")
        raw = check_model_files(found.name)
        if raw is None:
            text = "not on this machine yet; it is downloaded at the start, and examined then"
            yield Diagnosis(section, "files", Mark.WARNING, text)
            return
        found.checkpoint = checkpoint = _checkpoint(found, ranks)
    except ConfigError as error:
        yield Diagnosis(section, "model", Mark.ERROR, str(error))
        return
    config = checkpoint.config
    yield Diagnosis(section, "model", Mark.OK, _described(checkpoint))
    yield from _quantized(section, config)
    yield _engine(section, checkpoint, settings)
    try:
        found.bundle = load_bundle(found.name, config)
    except ConfigError as error:
        yield Diagnosis(section, "tokenizer", Mark.ERROR, str(error))
        return
    from tokenizers import Tokenizer

    size = Tokenizer.from_buffer(found.bundle.tokenizer_json).get_vocab_size(True)
    fingerprint = found.bundle.fingerprint
    text = f"{size:,} tokens, fingerprint {fingerprint}"
    yield Diagnosis(section, "tokenizer", Mark.OK, text, {"fingerprint": fingerprint})


def _gguf(found: Examined) -> Iterator[Diagnosis]:
    """Metadata of a GGUF file; llama.cpp reads the rest at the start."""
    from flyspec.engine.llama_cpp.gguf_file import GgufFile

    file = GgufFile(gguf_path(found.name))
    text = (
        f"GGUF, {file.architecture}, {file.own('block_count')} layers, {file.tensor_types}, "
        f"context of {int(file.own('context_length', 0)):,} tokens"
    )
    yield Diagnosis(found.section, "model", Mark.OK, text)
    text = "llama.cpp, whose products work here; it looks at memory and tokenizer when it loads"
    yield Diagnosis(found.section, "engine", Mark.OK, text)


def _checkpoint(found: Examined, ranks: int) -> Checkpoint:
    from flyspec.engine.configuration import own_context_length, plan_checkpoint, read_config

    _, config = read_config(found.name)
    length = found.settings.max_model_len
    if found.role == "draft":
        length = min(length, own_context_length(config))  # it drafts nothing beyond
    assert found.device is not None
    return plan_checkpoint(
        found.name, config, found.device, found.settings.dtype, finder(found.name), length, ranks
    )


def _described(checkpoint: Checkpoint) -> str:
    config = checkpoint.config.get_text_config()
    kind = checkpoint.config.model_type
    return (
        f"{kind}, {config.num_hidden_layers} layers, {checkpoint.dtype}, context of "
        f"{checkpoint.context_length:,} tokens"
    )


def _engine(section: str, checkpoint: Checkpoint, settings: ModelServerSettings) -> Diagnosis:
    device, dtype = str(checkpoint.device), str(checkpoint.dtype)
    if checkpoint.tensor_parallel_size > 1:
        text = f"transformers' modules in {checkpoint.tensor_parallel_size} processes"
        return Diagnosis(section, "engine", Mark.OK, text)
    library = library_for("it", checkpoint.config, device, dtype, settings.block_size)
    if isinstance(library, str):
        slow = device.startswith("cpu") and library.startswith("no native step")
        text = f"transformers' modules: {library.removeprefix('it ')}"
        return Diagnosis(section, "engine", Mark.WARNING if slow else Mark.OK, text)
    text = f"native step for {library.name}, compared with transformers' modules at start"
    return Diagnosis(section, "engine", Mark.OK, text)


def _quantized(section: str, config: Any) -> Iterator[Diagnosis]:
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return
    given = quantization if isinstance(quantization, dict) else vars(quantization)
    method = str(getattr(given.get("quant_method"), "value", given.get("quant_method")))
    missing = missing_packages(given, method)
    if missing is None:
        text = f"{method}: unknown to this transformers; update it or use another checkpoint"
        yield Diagnosis(section, "quantization", Mark.ERROR, text)
    elif missing:
        text = f"{method} needs packages that are missing: pip install {' '.join(missing)}"
        yield Diagnosis(section, "quantization", Mark.ERROR, text)
    else:
        yield Diagnosis(section, "quantization", Mark.OK, f"{method}; its packages are installed")


def missing_packages(quantization: dict[str, Any], method: str) -> list[str] | None:
    """Return the packages that transformers' quantizer asks for and are not installed.

    None for an unknown method. A quantizer's module names them by the functions it imports to ask,
    such as `is_bitsandbytes_available`.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    if method == "bitsandbytes":
        method += "_8bit" if quantization.get("load_in_8bit") else "_4bit"
    quantizer = AUTO_QUANTIZER_MAPPING.get(method)
    if quantizer is None:
        return None
    asked = vars(sys.modules[quantizer.__module__])
    names = [n[3:-10] for n in asked if n.startswith("is_") and n.endswith("_available")]
    packages = [n for n in names if n != "torch" and not n.startswith("torch_")]
    return [name.replace("_", "-") for name in packages if not _installed(name)]


def _installed(name: str) -> bool:
    if find_spec(name) is not None:
        return True
    package, _, module = name.partition("_")
    within = bool(module) and find_spec(package) is not None
    return within and find_spec(f"{package}.{module}") is not None


def _chat_template(section: str, bundle: TokenizerBundle) -> Diagnosis:
    templates = dict(bundle.named_chat_templates)
    if bundle.chat_template:
        templates[DEFAULT] = bundle.chat_template
    if not templates:
        text = (
            "none: chats are refused, texts are served; add a chat_template.jinja to the model's "
            "directory"
        )
        return Diagnosis(section, "chat template", Mark.WARNING, text)
    render = ChatTemplates(templates, dict(bundle.special_tokens)).render
    chat = Chat.of_user("Hello")
    try:
        plain = render(chat)
    except InvalidArgumentError as error:
        text = f"cannot render a chat: {error}; chats are refused; replace the template"
        return Diagnosis(section, "chat template", Mark.WARNING, text)
    try:
        tools = render(Chat(chat.messages, tools=(_TOOL,))) != plain
    except InvalidArgumentError:
        tools = False
    knows = "and tools" if tools else "but ignores tools: requests with tools will not call them"
    return Diagnosis(section, "chat template", Mark.OK, f"renders chats, {knows}", {"tools": tools})


def _gain(*pair: Checkpoint) -> Diagnosis:
    """Return what drafting gains on one device, where reading weights takes all the time."""
    target, draft = (
        Placed(
            make_shape(model.config, model.dtype, model.weights),
            DeviceGroup("", READING, model.tensor_parallel_size),
        )
        for model in pair
    )
    plan = SpeedPlan(target, draft, ACCEPTANCE, min(CONTEXT, pair[0].context_length))
    mark = Mark.OK if plan.pays else Mark.WARNING
    facts = {"best_k": plan.best.k, "gain": plan.best.gain}
    return Diagnosis(PAIR, "speed", mark, f"by calculation, {plan.verdict}", facts)


def pair(target: Examined, draft: Examined) -> Iterator[Diagnosis]:
    """Examine two models, as far as both could be read."""
    if target.bundle is not None and draft.bundle is not None:
        same = target.bundle.fingerprint == draft.bundle.fingerprint
        text = "tokenizers are equal: drafts are used as they are"
        if not same:
            text = (
                "tokenizers differ: drafts are translated through text, which costs some time and "
                "acceptance (docs/translation.md); a draft model with the target's tokenizer "
                "needs none"
            )
        mark = Mark.OK if same else Mark.WARNING
        yield Diagnosis(PAIR, "tokenizers", mark, text, {"translated": not same})
    if target.checkpoint is None or draft.checkpoint is None:
        return
    if target.device == draft.device:
        yield _gain(target.checkpoint, draft.checkpoint)
    own, needed = draft.checkpoint.context_length, target.checkpoint.context_length
    text = f"draft model {own:,} tokens, target {needed:,}"
    if own < needed:
        text += (
            f"; beyond {own:,} tokens this drafter proposes nothing, and prompt lookup drafts; "
            "use a draft model with a longer context if texts get longer"
        )
    yield Diagnosis(PAIR, "contexts", Mark.WARNING if own < needed else Mark.OK, text)
    sizes = target.checkpoint.loaded_bytes(), draft.checkpoint.loaded_bytes()
    if problem := size_problem(*sizes):
        yield Diagnosis(PAIR, "sizes", Mark.WARNING, problem)
