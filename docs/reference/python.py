"""Generate python.md from the source of the public API: `python docs/reference/python.py`."""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import freescale

_HEAD = """# Python

`import freescale as fs` provides every name that begins with `fs.` here, loaded on first use. Import other names
by their full path. `Ints` is a numpy array of int64; `LengthsOf` is a function from a batch to the lengths of its
samples: `Callable[[Any], Tensor | Ints | Sequence[int]]`. `Compute` is `"jagged"` or `"padded"`
([which one](../balance.md#jagged-or-padded-compute)).
"""
_SECTIONS = {
    "Balance": ["integrations.ddp.BalancedLoader", "balance.cost.Cost", "balance.assign.assign"],
    "Converters": [
        "integrations.batches.events_from_nested",
        "integrations.batches.nested_from_events",
        "integrations.torchrec.events_from_keyed_jagged",
        "integrations.torchrec.keyed_jagged_from_events",
    ],
    "Embeddings": [
        "integrations.pipeline.PrioritizedPipeline",
        "integrations.torchrec.PrioritizedEmbeddingSharder",
        "integrations.torchrec.TransportEmbeddingSharder",
        "integrations.zero_collision.ZeroCollisionTable",
    ],
    "Step profile": ["bubbles.step_profiler.StepProfiler", "bubbles.recorder.record_comm_hook"],
    "Data": ["data.loader.Loader", "data.batch.Batch", "data.batch.Events"],
    "A custom model": [f"models.protocol.{name}" for name in ("Model", "Inputs", "Rows")] + ["train.build.build"],
    "Building blocks of models": [
        "models.feature_embedding.FeatureEmbedding",
        "models.feature_embedding.TableIds",
        "models.tokens.TokenMap",
        "models.encoders.build_encoder",
        "models.heads.build_heads",
        "models.heads.multi_task_loss",
    ],
}
_CONFIGS = [name for name in freescale.__all__ if name.endswith("Config")]
_SHORT = {name: f"fs.{name}" for name in freescale.__all__} | {"assign": "fs.balance.assign"}
_SHORT |= {name: f"freescale.integrations.ddp.{name}" for name in ("events_from_nested", "nested_from_events")}
_SHORT |= {
    name: f"fs.models.{name}"
    for name in ("FeatureEmbedding", "TableIds", "TokenMap", "build_encoder", "build_heads", "multi_task_loss")
}
_COLUMNS = 116
_SPECIAL = ("__call__", "__len__")


def page() -> str:
    """Every public name with its signature and docstring, and its methods with their first paragraph."""
    shown = {name.rpartition(".")[2] for names in _SECTIONS.values() for name in names}
    if missing := set(freescale.__all__) - shown - set(_CONFIGS) - {"balance", "errors", "models"}:
        raise SystemExit(f"public names missing from docs/reference/python.py: {sorted(missing)}")
    parts = [_HEAD]
    for heading, names in _SECTIONS.items():
        parts += [f"## {heading}\n", *map(_describe, names)]
    configs = ", ".join(f"`fs.{name}`" for name in _CONFIGS)
    parts.append(
        f"## Config\n\n{textwrap.fill(configs, _COLUMNS)}:\ndataclasses with the fields of [the config](config.md).\n"
    )
    return "\n".join(parts)


def _describe(path: str) -> str:
    module, _, name = path.rpartition(".")
    source = Path(freescale.__file__).parent / f"{module.replace('.', '/')}.py"
    (node,) = [item for item in ast.parse(source.read_text(encoding="utf-8")).body if getattr(item, "name", "") == name]
    assert isinstance(node, (ast.ClassDef, ast.FunctionDef))
    spelt = _SHORT.get(name, f"freescale.{path}")
    call = _class_call(node, spelt) if isinstance(node, ast.ClassDef) else _call(spelt, node)
    lines = [f"### {name}\n", f"```text\n{call}\n```\n", *_prose(ast.get_docstring(node) or "")]
    members = list(_members(node)) if isinstance(node, ast.ClassDef) else []
    return "\n".join([*lines, *members, *([""] if members else [])])


def _class_call(node: ast.ClassDef, spelt: str) -> str:
    """Constructor call of a class; for a dataclass, with its fields."""
    inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    if inits:
        return f"class {_call(spelt, inits[0])}"
    fields = [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign)]
    return f"class {_fitted(spelt, fields, '')}" if fields else f"class {spelt}"


def _members(node: ast.ClassDef) -> Iterator[str]:
    """Public methods and properties, without those that have a private parameter."""
    for item in node.body:
        if not isinstance(item, ast.FunctionDef) or (item.name.startswith("_") and item.name not in _SPECIAL):
            continue
        if any(argument.arg.startswith("_") for argument in item.args.args):
            continue
        is_property = any(isinstance(by, ast.Name) and by.id.endswith("property") for by in item.decorator_list)
        doc = (ast.get_docstring(item) or "").partition("\n\n")[0].replace("\n", " ")
        yield f"- `{item.name if is_property else _call(item.name, item, columns=10_000)}`: {doc}"


def _call(spelt: str, function: ast.FunctionDef, columns: int = _COLUMNS) -> str:
    """Signature with types and defaults from the source."""
    arguments = function.args
    positional = [item for item in arguments.args if item.arg not in ("self", "cls")]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    words = [_argument(item, default) for item, default in zip(positional, defaults, strict=True)]
    words += ["*"] if arguments.kwonlyargs else []
    words += [_argument(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    returns = (
        "" if function.returns is None or function.name == "__init__" else ast.unparse(function.returns).strip("'")
    )
    return _fitted(spelt, words, f" -> {returns}" if returns and returns != "None" else "", columns)


def _argument(item: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(item.annotation)}" if item.annotation else ""
    return item.arg + kind + (f" = {ast.unparse(default)}" if default is not None else "")


def _fitted(spelt: str, arguments: list[str], after: str, columns: int = _COLUMNS) -> str:
    """One line if it fits, else one line per argument."""
    line = f"{spelt}({', '.join(arguments)}){after}"
    inside = textwrap.indent(",\n".join(arguments), "    ")
    return line if len(line) <= columns else f"{spelt}(\n{inside},\n){after}"


def _prose(text: str) -> Iterator[str]:
    """Paragraphs of a docstring. A paragraph after a colon is code."""
    before = ""
    for paragraph in text.split("\n\n"):
        yield f"```text\n{paragraph}\n```\n" if before.endswith(":") else f"{paragraph}\n"
        before = paragraph


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page(), encoding="utf-8")
