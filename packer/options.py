"""Between the command line, a YAML file and `PackConfig`: one option, spelled in three ways.

What the command line says goes before the file; messages name options as they are typed.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from padless.packer.config import PackConfig, byte_size
from padless.packer.errors import InputError, OptionError

FIELD_OF_OPTION = {
    "column": "columns",
    "template_arg": "template_args",
    "eval_source": "eval_sources",
    "weight": "weights",
    "source": "sources",
    "as_json": "json",
}
"""Parameters that a file may call by another name: the plural of a field in `PackConfig`, mostly."""


def with_options(message: str) -> str:
    """The message of an OptionError with fields spelled as options: max_length as --max-length.

    Fields of one word are words too, so they are taken for one where the message begins.
    """
    first, space, rest = message.partition(" ")
    long = [item.name for item in fields(PackConfig) if "_" in item.name]
    return option_of(first) + space + re.sub(rf"\b({'|'.join(long)})\b", lambda at: option_of(at[0]), rest)


def option_of(field: str) -> str:
    names = {plural: name for name, plural in FIELD_OF_OPTION.items() if name != "as_json"}
    return "SOURCE" if field == "sources" else f"--{names.get(field, field).replace('_', '-')}"


def from_file(path: Path | None, context: typer.Context, given: dict[str, Any]) -> dict[str, Any]:
    """Values of a YAML file for what the command line leaves open."""
    if path is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())  # a picture of several lines
        raise InputError(f"--config {path} is not valid YAML: {reason}") from error
    if not isinstance(content, dict):
        raise InputError(f"--config {path} must hold a mapping of options to values")
    explicit = {
        FIELD_OF_OPTION.get(name, name)
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        name = FIELD_OF_OPTION.get(name, name)
        if name not in given:
            raise InputError(f"--config {path}: no option {key!r}; known are {', '.join(given)}")
        if name in ("sources", "eval_sources"):
            value = (value,) if isinstance(value, str) else tuple(value or ())
        if name == "sources":
            value, of_sources = sources_of(value)
            for option, numbers in of_sources.items():
                if "sources" not in explicit and option not in explicit:
                    found[option] = {**numbers, **found.get(option, {})}
        if name in ("columns", "template_args") and not isinstance(value, dict):
            raise InputError(f"--config {path}: {key} must be a mapping of names to values")
        for option, parse in (("shard_size", byte_size), ("max_length", pack_lengths)):
            if name == option and isinstance(value, str):
                try:
                    value = parse(value)
                except InputError as error:
                    raise OptionError(f"{option} {error}") from None
        if name not in explicit:
            found[name] = value
    return found


def sources_of(given: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, dict[str, Any]]]:
    """A file's sources, and what those that are mappings say of their weight and caps."""
    paths: list[Any] = []
    found: dict[str, dict[str, Any]] = {}
    for source in given:
        if isinstance(source, dict):
            options = {"weight": "weights", "max_records": "max_records", "max_tokens": "max_tokens"}
            unknown = source.keys() - options.keys() - {"path"}
            if unknown or not isinstance(source.get("path"), str):
                what = f"has no option {min(map(str, unknown))!r}" if unknown else "needs a path"
                raise OptionError(
                    f"sources: {source!r} {what}; give path, and weight, max_records or max_tokens"
                )
            for key, option in options.items():
                if key in source:
                    found.setdefault(option, {})[source["path"]] = source[key]
            source = source["path"]
        paths.append(source)
    return tuple(paths), found


def pack_lengths(value: str | int) -> int | tuple[int, ...]:
    """`2048`, or several lengths of packs as `2048,8192`. InputError for anything else."""
    try:
        found = tuple(int(word) for word in str(value).split(","))
    except ValueError:
        raise InputError(
            f"{value!r} is no length of packs: give tokens, as 2048, or several lengths as 2048,8192"
        ) from None
    return found if len(found) > 1 else found[0]


def numbers(values: list[str] | None, option: str) -> dict[str, Any]:
    """SOURCE=NUMBER, where a source's name may have an equals sign too."""
    found: dict[str, Any] = {}
    for value in values or ():
        name, _, rest = value.rpartition("=")
        number = scalar(rest)
        if not name or isinstance(number, str | bool) or number is None:
            raise InputError(f"{option} takes SOURCE=NUMBER, got {value!r}")
        found[name] = number
    return found


def switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be true or false, got {value!r}")
    return value


def scalar(text: str) -> str | bool | int | float | None:
    """A template's variable as typed: true, false, null and numbers are what JSON says, the rest is text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if value is None or isinstance(value, bool | int | float) else text


def template_args(values: list[str] | None) -> dict[str, str | bool | int | float | None]:
    return {name: scalar(value) for name, value in pairs(values, "--template-arg", "NAME=VALUE").items()}


def pairs(values: list[str] | None, option: str, form: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for value in values or ():
        name, equals, rest = value.partition("=")
        if not name or not equals:
            raise InputError(f"{option} takes {form}, got {value!r}")
        found[name] = rest
    return found
