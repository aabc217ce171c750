"""Commands that run in the process of a test, and the log records of it."""

import logging
from collections.abc import Sequence

from freescale import log
from freescale.cli.main import main


class ListHandler(logging.Handler):
    """Collects the messages of log records."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def freescale(words: Sequence[str]) -> int:
    """Run a single-rank command in this process and return its exit code."""
    import torch.distributed as dist

    log._logged.clear()  # repeated texts are logged once per process
    try:
        return main(words)
    finally:
        if dist.is_initialized():  # a command that failed ends with its process, which leaves its group
            dist.destroy_process_group()
