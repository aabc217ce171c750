"""Loader."""

import queue
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from freescale.config import DataConfig
from freescale.data.batch import Batch, Split, Window, build_batch, pack_window
from freescale.data.dataset import Dataset
from freescale.data.order import Cursor, EpochOrder, WindowShare
from freescale.data.validation import Quarantine, RowGroup
from freescale.data.vocabulary import DataIdentity, ItemVocabulary
from freescale.errors import ConfigError
from freescale.log import warning_once


class Loader:
    """Iterate to get the rest of the current epoch, one batch a step; iterate again for the next epoch.

    Every rank yields the same number of batches. `state_dict` is the position behind the last batch that was yielded,
    and fits any number of ranks and workers.
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
    ) -> None:
        if world_size > config.shards:
            what = f"data.shards = {config.shards} cannot feed {world_size} ranks: each shard is read by one rank"
            remedy = f"set data.shards to {world_size} or more (it is part of the order of the samples)"
            raise ConfigError(what, key="data.shards", remedy=remedy)
        quarantine = Quarantine(config.on_bad, quarantine_file)
        self.dataset = Dataset(config.path, features=config.features, longest=config.longest, quarantine=quarantine)
        known = self.dataset.manifest.items if self.dataset.manifest else 0
        self.vocabulary = ItemVocabulary(known, config.oov_rows)
        self.identity = DataIdentity.from_dataset(self.dataset)
        self.cursor = Cursor(seed, config.order, config.global_batch, config.shards, self.dataset.rows)
        self.unknown_items = 0
        self._config, self._rank, self._world_size = config, rank, world_size
        self._split = Split(config.split, config.split_time, part)
        self._say_who_stays_empty()

    def __len__(self) -> int:
        """Steps in an epoch."""
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
                pool.shutdown(wait=False, cancel_futures=True)  # first, or the thread behind `windows` reads on

    def state_dict(self) -> dict[str, int | str]:
        """Where to continue."""
        return self.cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue from there, with any number of ranks and workers."""
        self.cursor.load_state_dict(state)

    def report(self) -> list[str]:
        """Say what was set aside or mapped to shared rows so far."""
        lines = [self.dataset.quarantine.summary()]
        if self.unknown_items:
            shared = f"mapped to {self.vocabulary.oov_rows} shared rows"
            lines.append(f"{self.unknown_items:,} events with items outside the vocabulary, {shared}")
        return [line for line in lines if line]

    def _say_who_stays_empty(self) -> None:
        """In log order a step takes few row groups, and a rank without any of them holds nothing."""
        rows = max(1, self.dataset.layout.common)
        groups = -(-self._config.global_batch // rows)
        if self._config.order == "log" and groups < self._world_size:
            few = f"a step of {self._config.global_batch} samples comes from about {groups} row groups of {rows}"
            warning_once(f"order = log: {few}, so most of {self._world_size} ranks hold nothing before balancing")

    def _batches(self, windows: Iterator[tuple[int, Window]]) -> Iterator[Batch]:
        """Cut windows into steps."""
        epoch, upto = self.cursor.epoch, 0
        held: list[Window] = []
        for step in range(self.cursor.step, self.cursor.steps):
            begin, end = self.cursor.span(step)
            while upto < end:
                upto, window = next(windows)
                held.append(window)
            pieces = [piece for window in held if len((piece := window.slice(begin, end)).position)]
            batch = build_batch(pieces or [held[-1].slice(end, end)], epoch=epoch, step=step)
            held = held[-1:]
            self.cursor.advance()
            yield batch

    def _windows(self, pool: ThreadPoolExecutor | None) -> Iterator[tuple[int, Window]]:
        """Read the rest of the epoch: each window with the position at which it ends."""
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
                vocabulary=self.vocabulary,
            )
            self.unknown_items += unknown
            yield order.window_start(window + 1), prepared

    def _read(
        self, shares: Iterator[WindowShare], pool: ThreadPoolExecutor | None
    ) -> Iterator[tuple[WindowShare, list[RowGroup]]]:
        """Read the row groups of each share; with a pool, those of the next share while this one is worked on."""
        read = map if pool is None else pool.map
        begun = ((share, read(self.dataset.read_group, share.groups.tolist())) for share in shares)
        following = next(begun, None)
        while following is not None:
            (share, groups), following = following, next(begun, None)
            yield share, list(groups)


T = TypeVar("T")
_END = object()


def prefetch(items: Iterator[T], depth: int, *, drain: bool = False) -> Iterator[T]:
    """Yield the items of an iterator that a thread advances, at most `depth` items ahead of the consumer.

    An item being made counts as ahead, so memory holds `depth` of them and the one in use. An error is raised where
    the item would have come. When the consumer stops early, the thread ends with it; with `drain` only after the
    items that it may be ahead, which is the same number wherever as many were consumed.
    """
    ready: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()
    orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
    stop = threading.Event()

    def produce() -> None:
        try:
            while orders.get() and not stop.is_set():
                item = next(items, _END)
                ready.put((item, None))
                if item is _END:
                    return
        except BaseException as error:  # whatever it is, it belongs to the consumer
            ready.put((_END, error))

    thread = threading.Thread(target=produce, name="freescale-ahead", daemon=True)
    thread.start()
    for _ in range(depth):
        orders.put(True)
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            orders.put(True)
            yield item  # type: ignore[misc]
    finally:
        if not drain:
            stop.set()
        orders.put(False)
        thread.join()
        while drain and not ready.empty():
            if (error := ready.get()[1]) is not None:
                warning_once(f"while ending, what nobody waits for any more failed: {error}")
