"""The batches of one rank, in order, read ahead by threads.

Threads and not processes: decoding is Arrow's C++ work, which runs without the interpreter lock, nothing has to be
pickled, and nothing can be left behind. What a batch holds is the cursor's business; this file only makes it be there
in time.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from freescale.config import DataConfig
from freescale.data.ahead import run_ahead
from freescale.data.batch import Batch, assemble
from freescale.data.identity import DataIdentity
from freescale.data.order.cursor import Cursor, Order, Share
from freescale.data.split import Split
from freescale.data.store.columns import Group
from freescale.data.store.dataset import Dataset
from freescale.data.store.quarantine import Quarantine
from freescale.data.vocabulary import KnownItems
from freescale.data.window import Window, prepare
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
        self.known = KnownItems(known, config.oov_rows)
        self.identity = DataIdentity.of(self.dataset)
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
            windows = run_ahead(self._windows(pool), self._config.prefetch)
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
            shared = f"mapped to {self.known.oov_rows} shared rows"
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
            pieces = [piece for window in held if len((piece := window.between(begin, end)).position)]
            batch = assemble(pieces or [held[-1].between(end, end)], epoch=epoch, step=step)
            held = held[-1:]
            self.cursor.advance()
            yield batch

    def _windows(self, pool: ThreadPoolExecutor | None) -> Iterator[tuple[int, Window]]:
        """Read the rest of the epoch: each window with the position at which it ends."""
        config, cursor = self._config, self.cursor
        order = Order(self.dataset.layout, config.order, config.shards, cursor.seed, cursor.epoch)
        windows = order.windows_in(cursor.span(cursor.step)[0], cursor.samples)
        shares = (order.share(window, rank=self._rank, world_size=self._world_size) for window in windows)
        for window, (share, groups) in zip(windows, self._read(shares, pool), strict=True):
            prepared, unknown = prepare(
                share, groups, self.dataset.columns, split=self._split, max_history=config.max_history, known=self.known
            )
            self.unknown_items += unknown
            yield order.start_of(window + 1), prepared

    def _read(self, shares: Iterator[Share], pool: ThreadPoolExecutor | None) -> Iterator[tuple[Share, list[Group]]]:
        """Read the row groups of each share; with a pool, those of the next share while this one is worked on."""
        read = map if pool is None else pool.map
        begun = ((share, read(self.dataset.read_group, share.groups.tolist())) for share in shares)
        following = next(begun, None)
        while following is not None:
            (share, groups), following = following, next(begun, None)
            yield share, list(groups)
