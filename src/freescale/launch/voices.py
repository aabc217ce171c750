"""What the ranks of one host say: an error that all of them meet is read once, and not once per rank.

Each rank has a pipe of its own: one that is killed while it speaks keeps nobody else from speaking.
"""

import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

from freescale.log import tell

_LOOK_SECONDS = 0.1


class Voices:
    """Says each distinct text of the ranks of one generation once, as soon as the first rank says it."""

    def __init__(self, ranks: int) -> None:
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(ranks)]
        self._ears: list[Connection] = [ear for ear, _ in pipes]
        self.mouths = [mouth for _, mouth in pipes]
        """One for each rank."""
        self._ended = threading.Event()
        self._listening = threading.Thread(target=self._listen, daemon=True)

    def begin(self) -> None:
        """Listen, once every rank has its mouth."""
        for mouth in self.mouths:
            mouth.close()  # so that a pipe ends with its rank
        self._listening.start()

    def end(self) -> None:
        """Return when all was said that ranks said before they ended."""
        self._ended.set()
        self._listening.join()

    def _listen(self) -> None:
        heard: set[str] = set()
        while self._ears:
            ready = wait(self._ears, _LOOK_SECONDS)
            if not ready and self._ended.is_set():
                return  # what a rank started lives on, and keeps its pipe open
            for ear in [ear for ear in self._ears if ear in ready]:
                if not (text := self._next(ear)) or text in heard:
                    continue
                heard.add(text)
                tell(text)

    def _next(self, ear: Connection) -> str:
        """What came out of a pipe; nothing, and the pipe is forgotten, once its rank has ended."""
        try:
            return ear.recv_bytes().decode()
        except (EOFError, OSError):  # an OSError: it was killed while it spoke
            self._ears.remove(ear)
            ear.close()
            return ""


def speaker(mouth: Connection) -> Callable[[str], None]:
    """What a rank says goes to the process that started it; several of its threads may speak."""
    one_at_a_time = threading.Lock()

    def speak(text: str) -> None:
        with one_at_a_time:
            mouth.send_bytes(text.encode(errors="backslashreplace"))  # as stderr does it

    return speak
