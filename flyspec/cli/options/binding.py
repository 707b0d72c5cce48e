"""Binds flags declared as `Flag`, alone or as fields of a dataclass, to a typer command.

The flags of an acceptance rule come from the table of its parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer

from flyspec.cli.options.completion import COMPLETERS
from flyspec.credentials import Credentials
from flyspec.flags import UINT32, Flag, flags_of
from flyspec.rules import PARAMETERS, Parameter, Rule, member_name
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.requests import SERVERS

_RULE = "Rule parameters (an error if the rule does not have them)"


def _flag(parameter: Parameter) -> tuple[Any, Flag]:
    """Return the type of a parameter's flag, and the flag."""
    defaults: dict[str, list[str]] = {}
    for name, preset in RULE_PRESETS.items():
        if parameter.name in preset.defaults:
            value = preset.defaults[parameter.name]
            shown = parameter.unset if value is None else parameter.show(value)
            defaults.setdefault(shown, []).append(name)
    default = "; ".join(f"{shown} for {', '.join(names)}" for shown, names in defaults.items())
    ranges = "; ".join(dict.fromkeys(map(str, parameter.ranges.values())))
    facts = ", ".join(filter(None, (parameter.symbol, ranges)))
    members = tuple(map(member_name, parameter.members or ()))
    kind: Any = Literal[members] if members else parameter.kind
    return kind | None, Flag(
        f"{parameter.help[0].upper()}{parameter.help[1:]}{facts and f' ({facts})'}.",
        next((range_ for range_ in parameter.ranges.values() if range_.integers), None),
        default=default,
        group=_RULE,
        read=parameter.read if members else None,
    )


RULE_FLAGS: Mapping[str, tuple[Any, Flag]] = {
    "name": (str, Flag(
        f"Acceptance rule: {', '.join(RULE_PRESETS)}; or one from the server's rules file.",
        default=SERVERS, group="Speculation", name="--rule",
    )),
    "guarded_token_ids": (tuple[int, ...], Flag(
        "Never accept this token loosely, nor another token in its place; repeatable.",
        UINT32, group=_RULE, name="--guarded-token-id", metavar="ID",
    )),
    **{name: _flag(parameter) for name, parameter in PARAMETERS.items()},
}  # fmt: skip


class _Field(NamedTuple):
    """A flag with its command parameter and the type of its value."""

    parameter: str
    kind: Any
    flag: Flag

    @property
    def several(self) -> bool:
        return get_origin(self.kind) in (Sequence, tuple) and not self.flag.listed

    def option(self, default: Any) -> inspect.Parameter:
        flag, kind = self.flag, self.kind
        if self.several:
            kind, default = list[str if flag.read else get_args(kind)[0]] | None, None  # type: ignore[misc]
        elif flag.read:
            kind, default = str | None, None if default is None else _as_typed(default)
        typed = flag.typed(self.parameter)
        if kind == bool | None:
            typed += "/--no-" + typed.removeprefix("--")
        option = typer.Option(
            typed, help=flag.help, min=flag.least, metavar=flag.metavar, envvar=flag.env,
            show_default=True if flag.default is None else flag.default, rich_help_panel=flag.group,
            autocompletion=COMPLETERS.get(typed),
        )  # fmt: skip
        keyword, annotation = inspect.Parameter.KEYWORD_ONLY, Annotated[kind, option]
        return inspect.Parameter(self.parameter, keyword, default=default, annotation=annotation)

    def value(self, given: Any) -> Any:
        if self.several:
            given = tuple(given or ())
        if self.flag.read is None or given is None:
            return given
        try:
            return self.flag.read(given)
        except ValueError as error:
            raise typer.BadParameter(f"{self.flag.typed(self.parameter)} {error}") from None


def _as_typed(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def fields_of(owner: Any) -> dict[str, _Field]:
    """Return the flags of a dataclass by field, or of a command by parameter."""
    flags = RULE_FLAGS if owner is Rule else flags_of(owner)
    return {
        name: _Field(flag.name.removeprefix("--").replace("-", "_") or name, kind, flag)
        for name, (kind, flag) in flags.items()
    }


def _nested(defaults: Any) -> list[tuple[str, Any]]:
    """Fields that hold dataclasses of flags."""
    own = fields_of(type(defaults))
    return [
        (name, value)
        for name in (field.name for field in dataclasses.fields(defaults))
        if name not in own and dataclasses.is_dataclass(value := getattr(defaults, name))
    ]


def _options(defaults: Any) -> Iterator[inspect.Parameter]:
    for _, nested in _nested(defaults):
        yield from _options(nested)
    for name, field in fields_of(type(defaults)).items():
        yield field.option(getattr(defaults, name))


def take(defaults: Any, given: dict[str, Any]) -> Any:
    """Return `defaults` with the given values, which are removed from `given`."""
    values = {name: take(nested, given) for name, nested in _nested(defaults)}
    for name, field in fields_of(type(defaults)).items():
        values[name] = field.value(given.pop(field.parameter))
    taken = dataclasses.replace(defaults, **values)
    return taken.on_command_line() if isinstance(taken, Credentials) else taken


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's dataclass parameters by one flag per declared field.

    The flags' defaults come from the parameter's default, or the dataclass without arguments.
    """
    groups: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    single = fields_of(command)
    for name, hint in get_type_hints(command, include_extras=True).items():
        if name == "return":
            continue
        parameter = inspect.signature(command).parameters[name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            groups[name] = hint() if parameter.default is parameter.empty else parameter.default
            options += _options(groups[name])
        elif name in single:
            options.append(single[name].option(parameter.default))
        else:
            options.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hint))

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        values = {name: take(defaults, given) for name, defaults in groups.items()}
        values |= {name: field.value(given.pop(field.parameter)) for name, field in single.items()}
        command(**values, **given)

    wrapper.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {option.name: option.annotation for option in options}
    del wrapper.__wrapped__
    return wrapper
