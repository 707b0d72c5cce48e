"""Checks the commands of a shell block without running them: programs, flags, paths, bodies.

A flag is looked up in the program that takes it, so one that was renamed fails here.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import typer.main

from flyspec.cli.program import single
from flyspec.config import DraftSettings, OrchestratorSettings, VerifySettings
from flyspec.settings_sources import from_command_line
from orchestrator.front.http.app import openapi_schema
from tests.docs.blocks import ROOT

SERVICES = {
    "draft_service": DraftSettings,
    "orchestrator": OrchestratorSettings,
    "verify_service": VerifySettings,
}
OPERATORS = {"|", "||", "&&", ";", "&", "(", ")"}
REDIRECTIONS = {">", ">>", "<", ">&", "2>", "&>"}
KEYWORDS = {"for", "do", "done", "in", "{", "}", "then", "fi"}
CHECKED_OUT = {"bench", "deploy", "docker-compose.yml", "examples", "k8s", "loadtest", "tests"}
"""What arguments that are paths begin with."""
OTHERS = {"apt-get", "chown", "cd", "echo", "cat", "export", "jq", "lm-eval", "npm", "python",
          "source", ".", "ssh", "mkdir", "ls", "cp", "head", "kubectl", "locust",
          "pytest"}  # fmt: skip


def check_shell(text: str) -> None:
    """Fail on bad syntax, and on any command that the program it names would refuse."""
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert not done.returncode, done.stderr
    defined = set(re.findall(r"^(\w+)\(\) *\{", text, re.MULTILINE))
    for words in commands(text):
        words = words[len(variables(words)) :]
        if words and words[0] not in defined | KEYWORDS:
            check_command(words)


def commands(text: str) -> Iterator[list[str]]:
    """Yield each simple command as words, without redirections."""
    logical = ""
    for line in text.replace("\\\n", " ").splitlines():
        if not logical and re.match(r"\w+\(\) *\{|\s*(for|done)\b", line):
            continue
        logical += line + "\n"
        try:
            found = list(_tokens(logical))
        except ValueError:  # a quotation that goes on
            continue
        logical, words = "", []
        tokens = iter(found)
        for token in tokens:
            if token in OPERATORS:
                yield words
                words = []
            elif token in REDIRECTIONS:
                next(tokens, None)
            else:
                words.append(token)
        yield words


def _tokens(line: str) -> Iterator[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.wordchars += "%@+,:{}[]$^!"
    lexer.whitespace_split = True
    return lexer


def variables(words: Sequence[str]) -> list[str]:
    """Return the assignments that a command begins with. Fails for an unknown FLYSPEC_ name."""
    found = []
    for word in words[1:] if words[:1] == ["export"] else words:
        if not re.match(r"[A-Z_]+=", word):
            break
        name = word.split("=")[0]
        assert not name.startswith("FLYSPEC_") or name in known_variables(), f"unknown: {name}"
        found.append(word)
    return ["export", *found] if words[:1] == ["export"] else found


@cache
def known_variables() -> set[str]:
    """Settings of the services, and the other variables that files of the project name."""
    names = {
        f"{settings.model_config['env_prefix']}{field}".upper()
        for settings in SERVICES.values()
        for field in settings.model_fields
    }
    grep = ["git", "grep", "-ohE", r"\bFLYSPEC_[A-Z_]+", "--", "*.py", "*.yml", "Makefile",
            ".env", ":!tests"]  # fmt: skip
    done = subprocess.run(grep, cwd=ROOT, text=True, capture_output=True, check=True)
    credentials = {"API_KEY", "SSL_CA_CERTS", "SSL_CERTFILE", "SSL_KEYFILE", "SSL_TARGET_NAME"}
    return names | set(done.stdout.split()) | {f"FLYSPEC_{name}" for name in credentials}


def check_command(words: Sequence[str]) -> None:
    program, arguments = words[0], list(words[1:])
    name = Path(program).name
    for argument in arguments:
        if argument.split("/")[0] in CHECKED_OUT:
            assert (ROOT / argument.partition("::")[0]).exists(), f"no {argument}"
    if name == "flyspec":
        from flyspec.cli.main import app

        check_flags(typer.main.get_command(app), arguments, "flyspec")
    elif name == "python" and arguments[:1] == ["-m"]:
        check_module(arguments[1], arguments[2:])
    elif name == "torchrun":
        check_module(arguments[arguments.index("-m") + 1], arguments[arguments.index("-m") + 2 :])
    elif program == ".":
        return
    elif "/" in program:
        assert (ROOT / program).is_file(), f"no file {program}"
    elif checker := CHECKERS.get(name):
        checker(arguments)
    else:
        assert name in OTHERS, f"unknown program {name!r}: teach tests/docs/commands.py to check it"


def check_module(module: str, arguments: list[str]) -> None:
    """Check `python -m MODULE ARGUMENTS`."""
    if module in SERVICES:
        from_command_line(SERVICES[module], module, arguments)  # exits with 2 if it refuses them
    elif module == "pip":
        check_pip(arguments)
    elif module in ("pytest", "venv"):
        return
    elif module.startswith("loadtest") and "locust" not in sys.modules:
        _elsewhere(module, arguments)
    else:
        spec = find_spec(module)
        if spec and spec.submodule_search_locations:
            module = f"{module}.__main__"
            spec = find_spec(module)
        assert spec, f"no module {module}"
        assert spec.origin
        source = Path(spec.origin).read_text()
        if found := re.search(r"\bsingle\((\w+)\)", source):
            app = single(getattr(import_module(module), found[1]))
        elif re.search(r"^app = ", source, re.MULTILINE):
            app = import_module(module).app
        else:
            return  # a program without flags
        check_flags(typer.main.get_command(app), arguments, module)


@cache
def _worker() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.docs.commands"], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _elsewhere(*command: object) -> None:
    """Check a command of the load tests in another process: locust replaces sockets and threads."""
    worker = _worker()
    assert worker.stdin
    assert worker.stdout
    print(json.dumps(command), file=worker.stdin, flush=True)
    answer = json.loads(worker.stdout.readline())
    assert not answer, answer


def _answer() -> None:
    import locust  # noqa: F401

    for line in sys.stdin:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                check_module(*json.loads(line))
            print(json.dumps(""), flush=True)
        except (Exception, SystemExit) as error:
            print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)


def check_flags(command: Any, arguments: list[str], name: str) -> None:
    """Have a command parse its arguments. Raises its usage error."""
    with contextlib.suppress(typer.Exit):
        context = command.make_context(name, list(arguments))
        if hasattr(command, "resolve_command"):
            rest = [*context._protected_args, *context.args]
            if rest:
                name, found, rest = command.resolve_command(context, rest)
                check_flags(found, rest, name)


def check_make(arguments: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    variables = set(re.findall(r"\b([A-Z_]+) \?=", (ROOT / "Makefile").read_text()))
    for argument in arguments:
        name, given, _ = argument.partition("=")
        known = variables | {"ARGS"} if given else targets
        assert name in known or name.startswith("gpu-limit-"), f"make {argument}: unknown"


def check_pip(arguments: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {*known["optional-dependencies"], "all"}
    for argument in arguments:
        if found := re.match(r"(?:flyspec|\.)\[(.+)\]", argument):
            assert {*found[1].split(",")} <= extras, f"unknown extra: {argument}"


def check_docker(arguments: list[str]) -> None:
    stages = re.findall(r"^FROM .* AS (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for flag, value in pairwise(arguments):
        assert flag != "--target" or value in stages, f"no stage {value}"


def check_curl(arguments: list[str]) -> None:
    """Check the path and the body against the schema of the HTTP API."""
    (url,) = [word for word in arguments if word.startswith("http")]
    path = urlsplit(url).path
    assert path in ("", "/", "/metrics", "/openapi.json") or operations(path), path
    for flag, value in pairwise(arguments):
        if flag in ("-d", "--data", "--json"):
            check_body(path, json.loads(value))


def check_body(path: str, body: Any) -> None:
    """Validate the body of a POST. Raises `jsonschema.ValidationError`."""
    content = operations(path)["post"]["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.validate(body, {**content, "components": openapi()["components"]})


openapi = cache(openapi_schema)


def operations(path: str) -> dict[str, Any]:
    """Return what the schema says of a path, by method; nothing if it has no such path."""
    for template, known in openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path):
            return dict(known)
    return {}


CHECKERS: dict[str, Callable[[list[str]], None]] = {
    "curl": check_curl,
    "docker": check_docker,
    "make": check_make,
    "pip": check_pip,
}


if __name__ == "__main__":
    _answer()
