"""How long other threads wait for the interpreter while something runs."""

import threading
import time
from collections.abc import Callable


def waits(work: Callable[[], object]) -> list[float]:
    """Seconds of each turn that another thread waited for, as long as work goes on in a thread of its own."""
    thread, found = threading.Thread(target=work), []
    thread.start()
    before = time.perf_counter()
    while thread.is_alive():
        time.sleep(0)
        now = time.perf_counter()
        found.append(now - before)
        before = now
    return found
