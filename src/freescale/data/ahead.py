"""Run an iterator in a background thread, a few items ahead. Knows nothing of data."""

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

from freescale.log import warning_once

T = TypeVar("T")
_END = object()


def run_ahead(items: Iterator[T], depth: int, *, work_off: bool = False) -> Iterator[T]:
    """Yield the items of an iterator that a thread advances, at most `depth` items ahead of the consumer.

    An item being made counts as ahead, so memory holds `depth` of them and the one in use. An error is raised where
    the item would have come. When the consumer stops early, the thread ends with it; with `work_off` only after the
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
        if not work_off:
            stop.set()
        orders.put(False)
        thread.join()
        while work_off and not ready.empty():
            if (error := ready.get()[1]) is not None:
                warning_once(f"while ending, what nobody waits for any more failed: {error}")
