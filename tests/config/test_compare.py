"""Guarantee: a resumed run names every changed field, and knows which of them change the training result."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from freescale.config import RECIPES, RunConfig, differences

TINY = RECIPES["tiny"]


def changed(section: str, **values: Any) -> RunConfig:
    return replace(TINY, **{section: replace(getattr(TINY, section), **values)})


def test_equal_configs_do_not_differ() -> None:
    assert differences(TINY, replace(TINY)) == []


def test_every_changed_field_is_named_with_both_values() -> None:
    after = replace(changed("train", lr=0.5, log_every=3), seed=4)
    found = {d.key: (d.before, d.after) for d in differences(TINY, after)}
    assert found == {"seed": (0, 4), "train.lr": (1e-3, 0.5), "train.log_every": (10, 3)}


def test_what_changes_the_training_result_is_told_from_what_does_not() -> None:
    def changes_result(after: RunConfig) -> bool:
        (difference,) = differences(TINY, after)
        return difference.changes_result

    assert changes_result(changed("train", lr=0.5))
    assert changes_result(changed("tables", lr=0.5))
    assert changes_result(changed("model", dropout=0.0))
    assert changes_result(changed("data", max_history=10))
    assert not changes_result(changed("train", keep=5))
    assert not changes_result(changed("balance", mode="off"))
    assert not changes_result(changed("transport", urgent="c10d"))
    assert not changes_result(changed("task", seen="allow"))


def test_a_longer_run_changes_the_result_only_where_decay_follows_its_length() -> None:
    (longer,) = differences(TINY, changed("train", epochs=9))
    assert not longer.changes_result
    decaying = replace(TINY, train=replace(TINY.train, decay="cosine"))
    (longer,) = differences(decaying, replace(decaying, train=replace(decaying.train, epochs=9)))
    assert longer.changes_result


def test_every_field_named_as_neutral_exists() -> None:
    from freescale.config import compare

    known = {f"{section.name}.{field.name}" for section in fields(TINY) if is_dataclass(getattr(TINY, section.name))
             for field in fields(getattr(TINY, section.name))}  # fmt: skip
    assert known >= {*compare._NEUTRAL, *compare._LENGTH}
    assert all(any(key.startswith(section) for key in known) for section in compare._NEUTRAL_SECTIONS)
