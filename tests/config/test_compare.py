"""A comparison lists every changed field and whether it changes the training result."""

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
    result = {d.key: (d.before, d.after) for d in differences(TINY, after)}
    assert result == {"seed": (0, 4), "train.lr": (1e-3, 0.5), "train.log_every": (10, 3)}


def test_fields_that_change_the_training_result_are_marked() -> None:
    def changes_result(after: RunConfig) -> bool:
        (difference,) = differences(TINY, after)
        return difference.changes_result

    assert changes_result(changed("train", lr=0.5))
    assert changes_result(changed("train", clip=0.5))
    assert changes_result(changed("train", precision="bf16"))
    assert changes_result(changed("train", tf32=True))
    assert changes_result(changed("tables", lr=0.5))
    assert changes_result(changed("model", dropout=0.0))
    assert changes_result(changed("data", max_history=10))
    assert not changes_result(changed("train", keep=5))
    assert not changes_result(changed("balance", mode="off"))
    assert not changes_result(changed("transport", urgent="c10d"))
    assert not changes_result(changed("task", seen="allow"))


def test_a_longer_run_changes_the_result_only_with_decay() -> None:
    (longer,) = differences(TINY, changed("train", epochs=9))
    assert not longer.changes_result
    decaying = replace(TINY, train=replace(TINY.train, decay="cosine"))
    (longer,) = differences(decaying, replace(decaying, train=replace(decaying.train, epochs=9)))
    assert longer.changes_result


def test_every_neutral_field_exists() -> None:
    from freescale.config import compare

    known = {f"{section.name}.{field.name}" for section in fields(TINY) if is_dataclass(getattr(TINY, section.name))
             for field in fields(getattr(TINY, section.name))}  # fmt: skip
    assert known >= {*compare._NEUTRAL, *compare._LENGTH}
    assert all(any(key.startswith(section) for key in known) for section in compare._NEUTRAL_SECTIONS)
