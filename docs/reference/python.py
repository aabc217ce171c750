"""Writes the public names down: `python docs/reference/python.py` makes the page beside it. Reads the source only."""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import freescale

_HEAD = """# Python

`import freescale as fs` gives every name that begins with `fs.` here; it loads when it is first used. What a custom
model needs is imported by its full name.
"""
_SECTIONS = {
    "Balance": ["integrations.ddp.BalancedLoader", "balance.cost.Cost", "balance.assign.assign"],
    "Embeddings": [
        "integrations.pipeline.Pipeline",
        "integrations.torchrec.PrioritizedEmbeddingSharder",
        "integrations.torchrec.TransportEmbeddingSharder",
    ],
    "Step profile": ["bubbles.step_profiler.StepProfiler"],
    "Data": ["data.loader.Loader", "data.batch.Batch", "data.batch.Events"],
    "A custom model": [f"models.protocol.{name}" for name in ("Model", "Inputs", "Rows")] + ["train.build.build"],
}
_CONFIGS = [name for name in freescale.__all__ if name.endswith("Config")]
_SHORT = {name: f"fs.{name}" for name in freescale.__all__} | {"assign": "fs.balance.assign"}
_COLUMNS = 116


def page() -> str:
    """Every public name with its signature and docstring, and its methods with the first paragraph of theirs."""
    shown = {name.rpartition(".")[2] for names in _SECTIONS.values() for name in names}
    if missing := set(freescale.__all__) - shown - set(_CONFIGS):
        raise SystemExit(f"public names that are in no section of docs/reference/python.py: {sorted(missing)}")
    parts = [_HEAD]
    for heading, names in _SECTIONS.items():
        parts += [f"## {heading}\n", *map(_described, names)]
    configs = ", ".join(f"`fs.{name}`" for name in _CONFIGS)
    parts.append(
        f"## Config\n\n{textwrap.fill(configs, _COLUMNS)}:\ndataclasses with the fields of [the config](config.md).\n"
    )
    return "\n".join(parts)


def _described(path: str) -> str:
    module, _, name = path.rpartition(".")
    source = Path(freescale.__file__).parent / f"{module.replace('.', '/')}.py"
    (node,) = [one for one in ast.parse(source.read_text(encoding="utf-8")).body if getattr(one, "name", "") == name]
    assert isinstance(node, (ast.ClassDef, ast.FunctionDef))
    spelt = _SHORT.get(name, f"freescale.{path}")
    call = _of_class(node, spelt) if isinstance(node, ast.ClassDef) else _call(spelt, node)
    lines = [f"### {name}\n", f"```text\n{call}\n```\n", *_prose(ast.get_docstring(node) or "")]
    members = list(_members(node)) if isinstance(node, ast.ClassDef) else []
    return "\n".join([*lines, *members, *([""] if members else [])])


def _of_class(node: ast.ClassDef, spelt: str) -> str:
    """A class as it is constructed; a dataclass by its fields."""
    inits = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    if inits:
        return f"class {_call(spelt, inits[0])}"
    fields = [ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign)]
    return f"class {_fitted(spelt, fields, '')}" if fields else f"class {spelt}"


def _members(node: ast.ClassDef) -> Iterator[str]:
    """Public methods and properties. Those with a private parameter are called by the class itself."""
    for one in node.body:
        if not isinstance(one, ast.FunctionDef) or (one.name.startswith("_") and one.name != "__call__"):
            continue
        if any(argument.arg.startswith("_") for argument in one.args.args):
            continue
        is_property = any(isinstance(by, ast.Name) and by.id.endswith("property") for by in one.decorator_list)
        said = (ast.get_docstring(one) or "").partition("\n\n")[0].replace("\n", " ")
        yield f"- `{one.name if is_property else _call(one.name, one, columns=10_000)}`: {said}"


def _call(spelt: str, function: ast.FunctionDef, columns: int = _COLUMNS) -> str:
    """A call with types and defaults as the source has them."""
    arguments = function.args
    plain = [one for one in arguments.args if one.arg not in ("self", "cls")]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    words = [_argument(one, default) for one, default in zip(plain, defaults, strict=True)]
    words += ["*"] if arguments.kwonlyargs else []
    words += [_argument(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    returns = (
        "" if function.returns is None or function.name == "__init__" else ast.unparse(function.returns).strip("'")
    )
    return _fitted(spelt, words, f" -> {returns}" if returns and returns != "None" else "", columns)


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(one.annotation)}" if one.annotation else ""
    return one.arg + kind + (f" = {ast.unparse(default)}" if default is not None else "")


def _fitted(spelt: str, arguments: list[str], after: str, columns: int = _COLUMNS) -> str:
    """In one line if that fits, else a line per argument."""
    line = f"{spelt}({', '.join(arguments)}){after}"
    inside = textwrap.indent(",\n".join(arguments), "    ")
    return line if len(line) <= columns else f"{spelt}(\n{inside},\n){after}"


def _prose(text: str) -> Iterator[str]:
    """The paragraphs of a docstring. What follows a colon is code."""
    before = ""
    for paragraph in text.split("\n\n"):
        yield f"```text\n{paragraph}\n```\n" if before.endswith(":") else f"{paragraph}\n"
        before = paragraph


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page(), encoding="utf-8")
