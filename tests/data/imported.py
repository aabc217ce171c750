"""Run imports through the command line and read the data set back with the original keys."""

from pathlib import Path
from typing import Any

import polars as pl

from freescale.cli.main import main
from freescale.data.manifest import MANIFEST_FILE, Manifest, parse_manifest

LOG = ["--user", "user", "--item", "item", "--time", "time"]
HEADER = "user,item,time\n"


def import_events(source: Path | str, *words: str, target: Path) -> int:
    """Import a log with columns user, item and time; return the exit code."""
    return main(["data", "import", "events", str(source), str(target), *LOG, *words])


def rows(target: Path) -> list[dict[str, Any]]:
    """Rows of a data set in log order, with original item keys."""
    keys = pl.read_parquet(target / "vocabulary.parquet")["key"].to_list()
    result = pl.read_parquet(sorted(target.glob("part-*.parquet"))).to_dicts()
    named = ("item_id", "candidate_id")
    return [{name: [keys[i] for i in v] if name in named else v for name, v in row.items()} for row in result]


def manifest(target: Path) -> Manifest:
    """Manifest of a data set."""
    return parse_manifest((target / MANIFEST_FILE).read_bytes(), str(target))


def named_rows(target: Path) -> list[dict[str, Any]]:
    """Rows of a data set in log order, with original keys of items and features."""
    features = manifest(target).features
    keys = {name: pl.read_parquet(target / f"vocabulary-{name}.parquet")["key"].to_list() for name in features}
    assert {name: len(known) for name, known in keys.items()} == features
    keys |= {f"candidate_{name}": known for name, known in keys.items()}
    return [{n: named(v, keys[n]) if n in keys else v for n, v in row.items()} for row in rows(target)]


def named(value: Any, keys: list[str]) -> Any:
    """Ids, or nested lists of them, as their keys."""
    if value is None:
        return None
    return [named(part, keys) for part in value] if isinstance(value, list) else keys[value]


def histories(
    text: str | bytes, folder: Path, *words: str, name: str = "log.csv"
) -> list[tuple[Any, list[Any], list[int]]]:
    """Import a log with this content and return its histories."""
    source = folder / name
    source.write_bytes(text if isinstance(text, bytes) else text.encode())
    target = folder / f"data-{len(list(folder.iterdir()))}"
    assert import_events(source, *words, target=target) == 0
    return [(row["user_id"], row["item_id"], row["timestamp"]) for row in rows(target)]
