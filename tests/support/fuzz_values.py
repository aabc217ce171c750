"""Strategies for damaged bytes, wrong values and TOML files, from which the inputs of every reader are made."""

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

Files = Mapping[str, bytes]
"""Contents of a folder: path and bytes of each file."""
Inputs = st.SearchStrategy[Files]

NUMBERS = (
    st.integers(-3, 10)
    | st.sampled_from([2**31, 2**32, 2**63 - 1, -(2**63), 2**63, 2**64, 10**30, 10**400, 10**401])
    | st.floats()
    | st.sampled_from([1e-300, 1e300, 0.5])
)
ORDINARY = st.integers(0, 100) | st.floats(0, 1)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)


def trees(keys: Sequence[str]) -> st.SearchStrategy[Any]:
    """Anything that JSON can say, with these keys among others."""
    names = st.sampled_from(keys) | st.text(max_size=4)
    return st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5), max_leaves=12
    )


@st.composite
def damaged(draw: st.DrawFn, raw: bytes) -> bytes:
    """Some bytes flipped, zeroed, inserted, left out, or all of it cut short."""
    data = bytearray(raw)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["flip", "write", "insert", "remove", "cut"]))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "write":
            new = draw(st.binary(min_size=1, max_size=8))
            data[at : at + len(new)] = new
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif kind == "remove":
            del data[at : at + draw(st.integers(1, 64))]
        elif kind == "cut":
            del data[at:]
    return bytes(data)


@st.composite
def with_values(draw: st.DrawFn, tree: Any, values: st.SearchStrategy[Any]) -> Any:
    """A tree of lists and dicts in which something, at some depth, is another thing, twice or is not there."""
    if type(tree) not in (dict, list) or not tree or draw(st.integers(0, 7)) == 0:
        return draw(values)
    key: Any = draw(st.sampled_from(sorted(tree) if isinstance(tree, dict) else range(len(tree))))
    new: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    kind = draw(st.sampled_from(["deeper", "deeper", "deeper", "remove", "twice"]))
    if kind == "remove":
        del new[key]
    elif kind == "twice" and isinstance(new, list):
        new.insert(key, new[key])
    else:
        new[key] = draw(with_values(new[key], values))
    return new


def in_one(files: Files, others: Callable[[str, bytes], st.SearchStrategy[bytes]]) -> Inputs:
    """The same files, but for one."""
    return st.sampled_from(sorted(files)).flatmap(
        lambda name: others(name, files[name]).map(lambda raw: {**files, name: raw})
    )


def as_json(tree: Any) -> bytes:
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {as_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, float):
        return str(value) if not math.isfinite(value) or "." in str(value) else f"{value:.1e}"
    if isinstance(value, int) and abs(value) > 10**300:
        return "1" + "0" * 5000 if value == 10**400 else "0x" + "f" * 5000  # more digits than Python reads, or writes
    return json.dumps(value) if value is not None else "1979-05-27T07:32:00Z"


def as_tables(tree: Any) -> bytes:
    """A tree as the file that a person would write."""
    if not isinstance(tree, dict):
        return as_toml(tree).encode("utf-8", "surrogatepass")
    plain = [f"{json.dumps(key)} = {as_toml(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for name, table in tree.items():
        if isinstance(table, dict):
            plain += [f"[{json.dumps(name)}]", *(f"{json.dumps(k)} = {as_toml(v)}" for k, v in table.items())]
    return "\n".join([*plain, ""]).encode("utf-8", "surrogatepass")


TOML_TEXT = st.text(alphabet="[]{}=\"'.#\n\\ abdeginostu0123456789-_:TZ", max_size=60).map(str.encode)
LONG_LINES = st.builds(
    lambda word, times: f'seed = -1\n[data]\npath = """\n{word * times}!\n"""\n'.encode(),
    st.sampled_from(["a", "a.", "' ", "[", " ", "a = "]),
    st.integers(1, 4000),
)


def toml_inputs(name: str, valid: bytes, keys: Sequence[str], more: Sequence[st.SearchStrategy[bytes]] = ()) -> Inputs:
    tree = tomllib.loads(valid.decode())
    values = trees(keys)
    texts = st.one_of(
        with_values(tree, values).map(as_tables),
        with_values(tree, ORDINARY).flatmap(lambda one: with_values(one, ORDINARY)).map(as_tables),
        with_values(tree, SCALARS).flatmap(lambda one: with_values(one, SCALARS)).map(as_tables),
        damaged(valid),
        values.map(as_tables),
        TOML_TEXT,
        LONG_LINES,
        st.binary(max_size=40),
        *more,
    )
    return texts.map(lambda raw: {name: raw})
