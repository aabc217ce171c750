"""Data loader: yields one rank's batches in order and reads ahead with threads.

Threads instead of processes: Arrow decodes in C++ without the GIL, nothing is pickled, and no worker process can leak.
`order` decides what a batch contains.
"""

import queue
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from freescale.config import DataConfig, RunConfig
from freescale.data.batch import Batch, Split, Window, build_batch, pack_window
from freescale.data.columns import CANDIDATE
from freescale.data.dataset import Dataset
from freescale.data.feature_schema import FeatureSchema, candidate_column, resolve_features
from freescale.data.order import Cursor, EpochOrder, WindowShare
from freescale.data.partitions import IS_TARGET
from freescale.data.validation import Quarantine, RowGroup
from freescale.data.vocabulary import DataIdentity, ItemVocabulary
from freescale.errors import ConfigError
from freescale.log import warning_once

T = TypeVar("T")
_END = object()


class Loader:
    """Iterates over the rest of the current epoch, one batch per step; iterate again for the next epoch.

    Every rank yields the same number of batches. `state_dict` is the position after the last yielded batch. It can be
    loaded with any world size and any number of workers.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        part: Literal["train", "test"] = "train",
        quarantine_file: str | None = None,
        schema: FeatureSchema = FeatureSchema(),  # noqa: B008  immutable
    ) -> None:
        if world_size > config.shards:
            what = f"data.shards = {config.shards} cannot feed {world_size} ranks: each shard is read by one rank"
            remedy = f"set data.shards to {world_size} or more (it is part of the order of the samples)"
            raise ConfigError(what, key="data.shards", remedy=remedy)
        quarantine = Quarantine(config.on_bad, quarantine_file)
        columns = [*config.columns, *schema.columns()]
        columns += [IS_TARGET] if config.split == "targets" else []
        options: Any = {"longest": config.longest, "quarantine": quarantine, "until": config.until}
        self.dataset = Dataset(config.path, features=columns, **options)
        _require_fit(self.dataset, config)
        self.features = resolve_features(schema, self.dataset, config.oov_rows)
        self.vocabulary = self._item_vocabulary(schema, config.oov_rows)
        self.identity = DataIdentity.from_dataset(self.dataset)
        ends = self.dataset.ends if config.order == "log" else ()
        self.cursor = Cursor(seed, config.order, config.global_batch, config.shards, self.dataset.rows, ends)
        self.unknown: Counter[str] = Counter()
        """Ids outside the vocabulary of their column, by column."""
        self._vocabularies = self._by_column()
        self._schema = schema
        self._config, self._rank, self._world_size = config, rank, world_size
        self._split = Split(config.split, config.split_time, part)
        self._warn_of_empty_ranks()

    @staticmethod
    def from_run(
        config: RunConfig, *, rank: int = 0, world_size: int = 1, data: DataConfig | None = None, **options: Any
    ) -> "Loader":
        """Return a loader of all columns that a run reads. `data`: replaces that of the config."""
        schema = FeatureSchema.from_config(config)
        return Loader(data or config.data, seed=config.seed, rank=rank, world_size=world_size, schema=schema, **options)

    @property
    def partitions(self) -> dict[int, str]:
        """The partitions by their first step in log order."""
        partitions = () if self.dataset.partitioned is None else self.dataset.partitioned.partitions
        return dict(zip(self.cursor.first_steps, (one.name for one in partitions), strict=False))

    def __len__(self) -> int:
        """Steps per epoch."""
        return self.cursor.steps

    def __iter__(self) -> Iterator[Batch]:
        if not self._config.workers:
            yield from self._batches(self._windows(None))
            return
        with ThreadPoolExecutor(self._config.workers, thread_name_prefix="freescale-read") as pool:
            windows = prefetch(self._windows(pool), self._config.prefetch)
            try:
                yield from self._batches(windows)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # first, or the prefetch thread continues to read

    def state_dict(self) -> dict[str, Any]:
        """Position from which to resume."""
        return self.cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a position, with any world size and number of workers."""
        self.cursor.load_state_dict(state)

    def report(self) -> list[str]:
        """Lines that summarize rejected rows and items mapped to shared rows."""
        lines = [self.dataset.quarantine.summary()]
        shared = f"mapped to {self.vocabulary.oov_rows} shared rows"
        items = sum(self.unknown[name] for name in ("item_id", CANDIDATE))
        others = {name: count for name, count in self.unknown.items() if name not in ("item_id", CANDIDATE)}
        counts = {"events with items": items, **{f"values of column '{n}'": count for n, count in others.items()}}
        lines += [f"{count:,} {what} outside the vocabulary, {shared}" for what, count in counts.items() if count]
        return [line for line in lines if line]

    def _item_vocabulary(self, schema: FeatureSchema, oov_rows: int) -> ItemVocabulary:
        if schema.item is not None:
            return ItemVocabulary(schema.item.rows, oov_rows, dynamic=True)
        shared = any(feature.table == "item" and feature.vocabulary.missing for feature in self.features.values())
        items = self.dataset.manifest.items if self.dataset.manifest else 0
        return ItemVocabulary(items, oov_rows, missing=shared)

    def _by_column(self) -> dict[str, ItemVocabulary]:
        """Return the vocabulary of every column of ids."""
        found = {"item_id": self.vocabulary, CANDIDATE: self.vocabulary}
        for feature in self.features.values():
            if feature.config.kind in ("id", "set") and feature.column != "user_id":
                found |= dict.fromkeys((feature.column, candidate_column(feature.column)), feature.vocabulary)
        return found

    def _warn_of_empty_ranks(self) -> None:
        """Warn if steps in log order span fewer row groups than there are ranks: the other ranks are empty."""
        rows = max(1, self.dataset.layout.common)
        groups = -(-self._config.global_batch // rows)
        if self._config.order == "log" and groups < self._world_size:
            few = f"a step of {self._config.global_batch} samples comes from about {groups} row groups of {rows}"
            warning_once(f"order = log: {few}, so most of {self._world_size} ranks are empty before balancing")

    def _batches(self, windows: Iterator[tuple[int, Window]]) -> Iterator[Batch]:
        """Slice windows into steps."""
        epoch, loaded = self.cursor.epoch, 0
        pending: list[Window] = []
        for step in range(self.cursor.step, self.cursor.steps):
            begin, end = self.cursor.span(step)
            while loaded < end:
                loaded, window = next(windows)
                pending.append(window)
            slices = [part for window in pending if len((part := window.slice(begin, end)).position)]
            batch = build_batch(slices or [pending[-1].slice(end, end)], epoch=epoch, step=step)
            pending = pending[-1:]
            self.cursor.advance()
            yield batch

    def _windows(self, pool: ThreadPoolExecutor | None) -> Iterator[tuple[int, Window]]:
        """Read the rest of the epoch: each window with its end position."""
        config, cursor = self._config, self.cursor
        order = EpochOrder(self.dataset.layout, config.order, config.shards, cursor.seed, cursor.epoch)
        windows = order.windows_in(cursor.span(cursor.step)[0], cursor.samples)
        shares = (order.share(window, rank=self._rank, world_size=self._world_size) for window in windows)
        for window, (share, groups) in zip(windows, self._read(shares, pool), strict=True):
            prepared, unknown = pack_window(
                share,
                groups,
                self.dataset.columns,
                split=self._split,
                max_history=config.max_history,
                vocabularies=self._vocabularies,
                schema=self._schema,
            )
            self.unknown += unknown
            yield order.window_start(window + 1), prepared

    def _read(
        self, shares: Iterator[WindowShare], pool: ThreadPoolExecutor | None
    ) -> Iterator[tuple[WindowShare, list[RowGroup]]]:
        """Read the row groups of each share. With a pool, the next share is read while the current one is packed."""
        read = map if pool is None else pool.map
        started = ((share, read(self.dataset.read_group, share.groups.tolist())) for share in shares)
        following = next(started, None)
        while following is not None:
            (share, groups), following = following, next(started, None)
            yield share, list(groups)


def _require_fit(dataset: Dataset, config: DataConfig) -> None:
    """Refuse to read partitions in a way that would train some of their events never, or twice."""
    if dataset.partitioned is None:
        return
    if config.split != "none":
        what = f'data.split = "{config.split}" would hold out events of every partition'
        remedy = 'set data.split to "none"; `freescale train --until` evaluates a partition before it trains on it'
        raise ConfigError(what, key="data.split", remedy=remedy)
    if config.max_history < dataset.partitioned.max_history:
        kept = dataset.partitioned.max_history
        what = f"samples of this data set have up to {kept} events, data.max_history = {config.max_history} cuts them"
        raise ConfigError(what, key="data.max_history", remedy=f"set data.max_history to {kept} or more")


def prefetch(items: Iterator[T], depth: int, *, drain: bool = False) -> Iterator[T]:
    """Advance an iterator in a background thread, at most `depth` items ahead of the consumer.

    An item under construction counts, so memory holds `depth` items and the one in use. An error of the iterator is
    raised in place of its item. If the consumer stops early, the thread stops too; with `drain` it first completes its
    `depth` items, so that ranks that consumed equally many items also produced equally many.
    """
    ready: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()
    requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
    stop = threading.Event()

    def produce() -> None:
        try:
            while requests.get() and not stop.is_set():
                item = next(items, _END)
                ready.put((item, None))
                if item is _END:
                    return
        except BaseException as error:  # raised in the consumer
            ready.put((_END, error))

    thread = threading.Thread(target=produce, name="freescale-prefetch", daemon=True)
    thread.start()
    for _ in range(depth):
        requests.put(True)
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            requests.put(True)
            yield item  # type: ignore[misc]
    finally:
        if not drain:
            stop.set()
        requests.put(False)
        thread.join()
        while drain and not ready.empty():
            if (error := ready.get()[1]) is not None:
                warning_once(f"a prefetched item that is no longer needed failed: {error}")
