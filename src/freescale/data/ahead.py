"""Run an iterator in a background thread, a few items ahead. Knows nothing of data."""

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")
_END = object()


def run_ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield the items of an iterator that a thread advances, at most `depth` items ahead of the consumer.

    An item being made counts as ahead, so memory holds `depth` of them and the one in use. An error is raised where
    the item would have come. When the consumer stops early, the thread ends with it.
    """
    ready: queue.SimpleQueue[tuple[object, BaseException | None]] = queue.SimpleQueue()
    room = threading.Semaphore(depth)
    stop = threading.Event()

    def produce() -> None:
        try:
            room.acquire()
            for item in items:
                ready.put((item, None))
                room.acquire()
                if stop.is_set():
                    return
            ready.put((_END, None))
        except BaseException as error:  # whatever it is, it belongs to the consumer
            ready.put((_END, error))

    thread = threading.Thread(target=produce, name="freescale-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            room.release()
            yield item  # type: ignore[misc]
    finally:
        stop.set()
        room.release()
        thread.join()
