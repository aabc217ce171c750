"""Load a config from a recipe, a TOML file and the command line; save and document it as TOML.

An unknown or mistyped key is an error with the file, the line and the closest valid key.
"""

import ast
import dataclasses
import functools
import inspect
import json
import re
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from freescale.config.recipes import RECIPES
from freescale.config.schema import RunConfig
from freescale.errors import ConfigError, UsageError, reason, suggest

T = TypeVar("T")
_COMMENT_COLUMNS = 100


def resolve(source: str, overrides: Sequence[str] = (), *, prog: str = "freescale") -> RunConfig:
    """Load a recipe or a TOML file and apply command-line overrides."""
    run = RECIPES.get(source)
    if run is None:
        if not source.endswith(".toml"):
            remedy = f"{suggest(source, RECIPES)}; or give the path of a .toml file"
            raise ConfigError(f"no recipe is called '{source}'", remedy=remedy)
        run = load(source)
    return override(run, overrides, prog=prog)


def override(run: RunConfig, overrides: Sequence[str], *, prog: str = "freescale") -> RunConfig:
    """Apply command-line flags such as `--data.global-batch 64`."""
    if not overrides:
        return run
    import tyro  # slow to import, and only needed here

    return tyro.cli(RunConfig, default=run, args=list(overrides), prog=prog)


def load(path: str | Path) -> RunConfig:
    """Read a TOML file. Missing fields keep their defaults."""
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        what = f"the config cannot be read: {error.strerror or error}"
        remedy = f"give a readable .toml file, or one of the recipes: {', '.join(sorted(RECIPES))}"
        raise ConfigError(what, where=str(path), remedy=remedy) from error
    except UnicodeDecodeError as error:
        what = f"the config is not UTF-8 text (byte {error.start})"
        raise ConfigError(what, where=str(path), remedy="save it as UTF-8") from error
    return parse(text, where=str(path))


def load_run(run: Path) -> RunConfig:
    """Load the config of a training run from its folder."""
    if not (run / "config.toml").exists():
        raise UsageError("there is no run in this folder", where=str(run), remedy="give the --out folder of a training")
    return load(run / "config.toml")


def parse(text: str, *, where: str = "<text>") -> RunConfig:
    """Parse TOML text. `where`: its name in error messages."""
    try:
        return _TomlReader(text, where).read(RunConfig, tomllib.loads(text), ())
    except (ValueError, OverflowError, RecursionError) as error:  # also for numbers with thousands of digits
        raise ConfigError(f"not valid TOML: {reason(error)}", where=where, remedy="fix the syntax") from error


def save(run: RunConfig, path: str | Path) -> None:
    """Write the fully resolved config, which alone reproduces the run."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(to_toml(run), encoding="utf-8")


def to_toml(run: RunConfig, *, explain: bool = False) -> str:
    """Serialize every field, so that later changes of defaults have no effect.

    `explain`: write the documentation of each field as a comment above it.
    """
    return "\n".join(_sections(run, (), explain=explain)).lstrip("\n") + "\n"


def _sections(node: Any, path: tuple[str, ...], *, explain: bool) -> list[str]:
    fields = [(f.name, getattr(node, f.name)) for f in dataclasses.fields(node)]
    notes = field_comments(node) if explain else {}
    title = notes.get("", [])
    lines = ["", *title, f"[{'.'.join(path)}]"] if path else [*title, *([""] if explain else [])]
    for name, value in fields:
        if not _is_section(value):
            lines += [*notes.get(name, []), f"{name} = {toml_value(value)}"]
    for name, value in fields:
        for inner, section in value.items() if isinstance(value, dict) else [("", value)]:
            if dataclasses.is_dataclass(section):
                lines += _sections(section, (*path, name, inner) if inner else (*path, name), explain=explain)
    return lines


def _is_section(value: object) -> bool:
    """Whether a field is a TOML table, or a group of named ones."""
    return isinstance(value, dict) or dataclasses.is_dataclass(value)


def toml_value(value: object) -> str:
    """Format a value as TOML."""
    if isinstance(value, (bool, str)):  # as in JSON, except for one character that TOML forbids
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)


class _TomlReader:
    """Converts a TOML tree to dataclasses and finds the line of each key for errors."""

    def __init__(self, text: str, where: str) -> None:
        self._lines = text.splitlines()
        self._where = where

    def read(self, schema: type[T], tree: Mapping[str, object], path: tuple[str, ...]) -> T:
        hints = get_type_hints(schema)
        for key in tree:
            if key not in hints:
                raise self._error(f"unknown key '{'.'.join((*path, key))}'", (*path, key), suggest(key, hints))
        values = {key: self._value(hints[key], value, (*path, key)) for key, value in tree.items()}
        try:
            return schema(**values)
        except ConfigError as error:
            if not error.where:
                error.where = f"{self._where}, line {self._line(_keys(error.key))}"
            raise

    def _value(self, kind: Any, value: object, path: tuple[str, ...]) -> object:
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, dict):
                raise self._mistyped(path, value, "a table")
            return self.read(kind, value, path)  # type: ignore[arg-type]
        if get_origin(kind) is dict:
            if not isinstance(value, dict):
                raise self._mistyped(path, value, "tables")
            return {name: self._value(get_args(kind)[1], part, (*path, name)) for name, part in value.items()}
        if get_origin(kind) is Union:  # a type, or one of a few words
            plain, words = get_args(kind)
            return self._value(words if isinstance(value, str) else plain, value, path)
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                what = f"{'.'.join(path)} = {value!r} is not one of its values"
                raise self._error(what, path, suggest(str(value), get_args(kind)))
            return value
        if get_origin(kind) is tuple:
            if not isinstance(value, list):
                raise self._mistyped(path, value, "a list")
            return tuple(self._value(get_args(kind)[0], item, path) for item in value)
        if type(value) in (int, float) and not abs(value) < 2**63:  # type: ignore[arg-type]
            raise self._error(f"{'.'.join(path)} is not a number below 2^63", path, "write a smaller number")
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            expected = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
            raise self._mistyped(path, value, expected[kind])
        return value

    def _mistyped(self, path: tuple[str, ...], value: object, expected: str) -> ConfigError:
        return self._error(f"{'.'.join(path)} = {value!r} has the wrong type", path, f"write {expected}")

    def _error(self, what: str, path: tuple[str, ...], remedy: str) -> ConfigError:
        return ConfigError(what, where=f"{self._where}, line {self._line(path)}", remedy=remedy)

    def _line(self, path: tuple[str, ...]) -> int:
        """Line of a key. tomllib reports no positions, so this follows table headers and assignments."""
        table: tuple[str, ...] = ()
        best, depth = 1, 0
        for number, line in enumerate(self._lines, start=1):
            if header := re.match(r"\s*\[\[?([^\]]+)\]", line):
                table = here = _keys(header.group(1))
            elif assignment := re.match(r"""\s*((?:[\w-]++|"[^"]*+"|'[^']*+'|\s*+\.\s*+)++)\s*=""", line):
                here = (*table, *_keys(assignment.group(1)))
            else:
                continue
            if path[: len(here)] == here and len(here) > depth:  # the deepest match
                best, depth = number, len(here)
        return best


def _keys(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


@functools.cache
def field_docs(schema: type) -> dict[str, str]:
    """Docstring of every field of a dataclass, with its allowed values if it is a Literal."""
    (tree,) = ast.parse(inspect.getsource(schema)).body
    assert isinstance(tree, ast.ClassDef)
    hints, docs = get_type_hints(schema), {}
    for line, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            doc = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            text = " ".join(str(doc).split())
            docs[line.target.id] = text + _choices(hints[line.target.id], text)
    return docs


def type_name(kind: Any) -> str:
    """Name of a schema type in TOML terms."""
    if get_origin(kind) is tuple:
        return f"list of {type_name(get_args(kind)[0])}s"
    if get_origin(kind) is Union:
        return " or ".join(map(type_name, get_args(kind)))
    if get_origin(kind) is Literal:
        return "string"
    return {int: "integer", float: "float", str: "string", bool: "boolean"}[kind]


def field_comments(node: Any) -> dict[str, list[str]]:
    """Comment lines for each field of a section, and for the section itself under ""."""
    texts = {"": inspect.cleandoc(type(node).__doc__ or ""), **field_docs(type(node))}
    return {name: [f"# {line}" for line in textwrap.wrap(text, _COMMENT_COLUMNS - 2)] for name, text in texts.items()}


def sections(schema: type, path: tuple[str, ...] = ()) -> list[tuple[str, type]]:
    """All sections of a config with their TOML table names, in order; the root has an empty name."""
    result = [(".".join(path), schema)]
    for field in dataclasses.fields(schema):
        kind, inner = get_type_hints(schema)[field.name], (*path, field.name)
        if get_origin(kind) is dict:
            kind, inner = get_args(kind)[1], (*inner, "NAME")
        if dataclasses.is_dataclass(kind):
            result += sections(kind, inner)  # type: ignore[arg-type]
    return result


def _choices(kind: Any, doc: str) -> str:
    """Allowed values of a Literal field, unless the docstring already explains each."""
    values = get_args(kind) if get_origin(kind) is Literal else ()
    if all(f"{value}:" in doc for value in values):
        return ""
    return " One of: {}.".format(", ".join(f'"{value}"' for value in values))
