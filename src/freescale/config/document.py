"""What the fields of a config mean, in words: from the docstrings of the schema, which are their only source."""

import ast
import dataclasses
import inspect
import textwrap
from typing import Any, Literal, get_args, get_origin, get_type_hints

_COLUMNS = 100


def meanings(schema: type) -> dict[str, str]:
    """The docstring of every field of a dataclass, by name, and the values that it can have, if they are few."""
    (tree,) = ast.parse(inspect.getsource(schema)).body
    assert isinstance(tree, ast.ClassDef)
    hints, found = get_type_hints(schema), {}
    for line, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            said = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            text = " ".join(str(said).split())
            found[line.target.id] = text + _choices(hints[line.target.id], text)
    return found


def type_name(kind: Any) -> str:
    """A type of the schema as TOML calls it."""
    if get_origin(kind) is tuple:
        return f"list of {type_name(get_args(kind)[0])}s"
    if get_origin(kind) is Literal:
        return "string"
    return {int: "integer", float: "float", str: "string", bool: "boolean"}[kind]


def comments(node: Any) -> dict[str, list[str]]:
    """Lines of comment above each field of a part of a config, and under "" those above the part itself."""
    said = {"": inspect.cleandoc(type(node).__doc__ or ""), **meanings(type(node))}
    return {name: [f"# {line}" for line in textwrap.wrap(text, _COLUMNS - 2)] for name, text in said.items()}


def sections(schema: type, path: tuple[str, ...] = ()) -> list[tuple[str, type]]:
    """Every part of a config with the name of its table, in order; that of the config itself is empty."""
    found = [(".".join(path), schema)]
    for field in dataclasses.fields(schema):
        kind = get_type_hints(schema)[field.name]
        if dataclasses.is_dataclass(kind):
            found += sections(kind, (*path, field.name))  # type: ignore[arg-type]
    return found


def _choices(kind: Any, said: str) -> str:
    """The values of a field that has few, unless the text goes through them already."""
    values = get_args(kind) if get_origin(kind) is Literal else ()
    if all(f"{value}:" in said for value in values):
        return ""
    return " One of: {}.".format(", ".join(f'"{value}"' for value in values))
