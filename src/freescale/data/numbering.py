"""Number keys by popularity: count the keys of a log in bounded memory, assign ids, and save the vocabularies.

Row i of a vocabulary file holds the key with id i and how often it occurs. With the vocabulary of an earlier data set,
keys that it lacks get a stable hashed id after its end. Raw ids, for dynamic tables, need no vocabulary: whole numbers
stay, text is hashed to 63 bits, and the file has a column `id` for lookups.
"""

import hashlib
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pyarrow.parquet as pq

from freescale.data.feature_columns import KEY, Kind, SideTable, integer_key
from freescale.data.vocabulary import VOCABULARY_FILE, feature_vocabulary_file
from freescale.errors import DataError, reason
from freescale.log import warning_once
from freescale.progress import track

_BATCH = 1_000_000


class KeyNumbering(NamedTuple):
    """Ids of keys."""

    vocabulary: pl.DataFrame
    """`key` and `count` in the order of the ids, as saved."""
    ids: pl.DataFrame
    """`key` and `number`, including keys outside the vocabulary. The vocabulary is first, in its order."""
    unknown: int
    """Number of occurrences of keys outside the vocabulary."""

    def replace(self, column: str, kind: Kind) -> pl.Expr:
        """Expression that replaces text keys of a column by ids."""
        # An Enum looks keys up in one hash table, which a join or `replace` would build again for every batch.
        enum, known = pl.Enum(self.ids["key"]), 0 if "id" in self.vocabulary.columns else len(self.vocabulary)
        physical = pl.element() if kind == "set" else pl.col(column).cast(enum)
        numbers = physical.to_physical().cast(pl.Int64)
        if len(self.ids) > known:
            outside = self.ids["number"].slice(known)
            numbers = numbers.replace(pl.int_range(known, len(self.ids), eager=True), outside)
        return pl.col(column).cast(pl.List(enum)).list.eval(numbers) if kind == "set" else numbers.alias(column)


def count_keys(table: pl.LazyFrame, column: str, events: int | None = None) -> pl.DataFrame:
    """Sorted distinct keys of a log, and how often each occurs."""
    # Batch by batch: the memory of Polars' streaming group_by was measured to grow with the events.
    counts, pending = pl.DataFrame(schema={"key": table.collect_schema()[column], "count": pl.Int64}), []
    batches = table.select(key=column).collect_batches(engine="streaming", chunk_size=_BATCH)
    for batch in track(batches, f"counting by {column}", total=events, unit="events", size=len):
        pending.append(batch.group_by("key").agg(pl.len().cast(pl.Int64).alias("count")))
        if sum(map(len, pending)) > _BATCH:
            counts, pending = merge_counts(counts, pending), []
    return merge_counts(counts, pending).sort("key")


def merge_counts(counts: pl.DataFrame, more: list[pl.DataFrame]) -> pl.DataFrame:
    """Sum the counts per key."""
    return pl.concat([counts, *more]).group_by("key").agg(pl.col("count").sum())


def assign_ids(counts: pl.DataFrame, known: pl.DataFrame | None, *, column: str) -> KeyNumbering:
    """Assign ids by popularity, or the index in a known vocabulary and a stable hash after its end."""
    if known is None:
        counts = counts.sort("count", "key", descending=[True, False])
        return KeyNumbering(counts, counts.select("key").with_row_index("number").cast({"number": pl.Int64}), 0)
    if counts["key"].dtype != known["key"].dtype:
        kinds = f"{counts['key'].dtype} in the log, {known['key'].dtype} in the vocabulary"
        remedy = "give the vocabulary that belongs to this log"
        raise DataError(f"the keys of {column} have different types: {kinds}", remedy=remedy)
    unknown = counts.join(known, on="key", how="anti").sort("key")
    hashed = [len(known) + (zlib.crc32(str(key).encode()) << 20) for key in unknown["key"]]
    numbered = known.select("key").with_row_index("number").cast({"number": pl.Int64})
    others = pl.DataFrame([pl.Series("number", hashed, pl.Int64), unknown["key"]])
    return KeyNumbering(known, pl.concat([numbered, others]), int(unknown["count"].sum()))


def keep_ids(counts: pl.DataFrame, *, column: str) -> KeyNumbering:
    """Keep whole numbers as ids, and hash text to 63 bits. No two keys may have one id."""
    keys = counts["key"]
    if keys.dtype == pl.String:
        numbers = pl.Series([_hash_text(key) for key in keys], dtype=pl.Int64)
    else:
        numbers = keys.cast(pl.Int64)
        if len(keys) and int(keys.min()) < 0:  # type: ignore[arg-type]
            what = f"{int(keys.min())} cannot be a raw id of {column}: ids are 0 or more"  # type: ignore[arg-type]
            raise DataError(what, remedy="give that key another number, or write the keys as text")
    kept = counts.with_columns(id=numbers)
    if (same := kept.filter(pl.col("id").is_duplicated()).sort("id")).height:
        pair = " and ".join(repr(key) for key in same["key"][:2])
        raise DataError(f"{pair} of {column} have the same 63-bit hash", remedy="rename one of the two")
    return KeyNumbering(kept.sort("id"), kept.select("key", number="id"), 0)


def _hash_text(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def save_keys(keys: pl.DataFrame, path: Path) -> None:
    """Write keys and counts."""
    pq.write_table(keys.to_arrow(), path, write_page_checksum=True, compression="zstd")


def load_vocabulary(folder: Path, file: str = VOCABULARY_FILE) -> pl.DataFrame:
    """Read a vocabulary of a data set."""
    path = folder / file
    try:
        vocabulary = pl.read_parquet(path, columns=["key", "count"])
    except (pl.exceptions.PolarsError, OSError) as error:
        what = "there is no vocabulary here" if not path.exists() else f"the vocabulary cannot be read: {reason(error)}"
        raise DataError(what, where=str(folder), remedy="give the folder of an imported data set") from error
    if vocabulary["key"].null_count() or vocabulary["key"].n_unique() < len(vocabulary):
        what, remedy = "the vocabulary is damaged: a key is missing or occurs twice", "import that data set again"
        raise DataError(what, where=str(path), remedy=remedy)
    return vocabulary


class FeatureVocabularies:
    """Numbers the categorical columns of one import and saves their vocabularies."""

    def __init__(self, folder: Path, known: Path | None, raw: Collection[str] = ()) -> None:
        self._folder, self._known, self.raw = folder, known, raw
        self.sizes: dict[str, int] = {}
        """Size of the vocabulary of every column so far."""

    def number_column(self, table: pl.LazyFrame, column: str, kind: Kind) -> pl.LazyFrame:
        """Replace the keys of a column of a log by ids."""
        keys = table.select(column)
        counts = count_keys((keys.explode(column) if kind == "set" else keys).drop_nulls(), column)
        return table.with_columns(self._assign(column, counts).replace(column, kind))

    def number_table(self, table: SideTable, counts: pl.DataFrame, ids: pl.DataFrame, *, name: str) -> pl.DataFrame:
        """Rows of a side table that occur in the log, by id in column `name`, with ids instead of keys.

        `counts`: how often each item or user occurs, which is the popularity of its values. `ids`: their ids.
        """
        rows = _cast_key(table.rows, counts["key"].dtype)
        occurring = counts.join(ids, on="key").select(pl.col("key").alias(KEY), _count="count", _id="number")
        found = rows.join(occurring, on=KEY).sort("_id")
        for column, kind in table.kinds.items():
            values = found.select(key=column, count="_count")
            values = (values.explode("key") if kind == "set" else values).drop_nulls("key")
            numbering = self._assign(column, values.group_by("key").agg(pl.col("count").sum()))
            found = found.with_columns(numbering.replace(column, kind))
        return found.drop(KEY, "_count").rename({"_id": name})

    def number_items(self, counts: pl.DataFrame, known: pl.DataFrame | None) -> KeyNumbering:
        """Assign ids to the items."""
        raw = "item_id" in self.raw
        items = keep_ids(counts, column="the items") if raw else assign_ids(counts, known, column="the items")
        save_keys(items.vocabulary, self._folder / VOCABULARY_FILE)
        return items

    def _assign(self, column: str, counts: pl.DataFrame) -> KeyNumbering:
        file, known = feature_vocabulary_file(column), None
        if column in self.raw:
            numbering = keep_ids(counts, column=f"feature '{column}'")
            save_keys(numbering.vocabulary, self._folder / file)
            return numbering
        if self._known is not None:
            if (self._known / file).exists():
                known = load_vocabulary(self._known, file)
            else:
                warning_once(f"{self._known} has no vocabulary of feature '{column}': its values are numbered anew")
        numbering = assign_ids(counts, known, column=f"feature '{column}'")
        if numbering.unknown:
            what = f"feature '{column}' has {numbering.unknown:,} values outside its vocabulary"
            warning_once(f"{what}; they share a few table rows")
        self.sizes[column] = len(numbering.vocabulary)
        save_keys(numbering.vocabulary, self._folder / file)
        return numbering


def _cast_key(rows: pl.DataFrame, kind: pl.DataType) -> pl.DataFrame:
    """Convert the keys of a side table to the type of the log. Keys that the log cannot hold are dropped."""
    if rows[KEY].dtype == kind:
        return rows
    key = pl.col(KEY).cast(pl.String)
    return rows.with_columns((key if kind == pl.String else integer_key(key)).alias(KEY)).drop_nulls(KEY)
