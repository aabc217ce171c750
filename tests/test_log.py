"""Every distinct fallback is logged, once, and a handler receives records only while it is installed."""

import contextlib

import pytest

from freescale import log
from tests.support.in_process import ListHandler


def test_each_distinct_text_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_logged", set())
    with log.handled_by(handler := ListHandler()):
        for text in ("no shared memory", "no compiler", "no shared memory"):
            log.warning_once(text)
            log.info_once(f"{text}, again")
    texts = ["no shared memory", "no compiler"]
    assert handler.messages == [message for text in texts for message in (text, f"{text}, again")]


@pytest.mark.parametrize("failure", [None, ValueError])
def test_the_previous_handlers_and_level_are_restored(failure: type[Exception] | None) -> None:
    outer, inner = ListHandler(), ListHandler()
    before = log.logger.handlers, log.logger.level, log.logger.propagate
    with log.handled_by(outer):
        with contextlib.suppress(ValueError), log.handled_by(inner):
            log.logger.info("inside")
            if failure is not None:
                raise failure
        log.logger.info("afterwards")
    assert (inner.messages, outer.messages) == (["inside"], ["afterwards"])
    assert (log.logger.handlers, log.logger.level, log.logger.propagate) == before
