"""The fastest setting is selected, from the inner steps of its turns, and kept unless another is clearly faster."""

from itertools import pairwise

import pytest

from freescale.overlap.autotune import TRIAL_STEPS, Autotuner, Setting

OFF, ON, OTHER = Setting(overlap=False), Setting(overlap=True, deferred="c10d"), Setting(overlap=True, deferred="other")


def trial(tuner: Autotuner, seconds: dict[Setting, float], *, switching: float = 9.0) -> tuple[list[Setting], Setting]:
    """The settings of the steps of a trial, and the selected one. The first and last step of a turn take longer."""
    used: list[Setting] = []
    while True:
        first = not used or used[-1] != tuner.setting
        slow = switching if first or not tuner.keeps_setting else 0.0
        used.append(tuner.setting)
        if (medians := tuner.record(seconds[used[-1]] + slow)) is not None:
            assert medians == pytest.approx([seconds[setting] for setting in tuner.settings])
            return used, tuner.decide(medians)


@pytest.mark.parametrize("settings", [[ON, OFF], [ON, OTHER, OFF]])
@pytest.mark.parametrize("fastest", [OFF, ON])
def test_the_first_steps_select_the_fastest_setting(settings: list[Setting], fastest: Setting) -> None:
    tuner = Autotuner(settings)
    used, selected = trial(tuner, {setting: 1.0 + (setting != fastest) for setting in settings})
    assert selected == fastest == tuner.setting
    assert len(used) <= TRIAL_STEPS
    assert [used.count(setting) for setting in settings] == [len(used) // len(settings)] * len(settings)
    turns = 1 + sum(a != b for a, b in pairwise(used))
    assert turns == 2 * len(settings), "settings are measured in turns"


def test_a_step_prefetches_unless_the_next_one_has_another_setting() -> None:
    tuner, used, keeps, end = Autotuner([ON, OFF]), [], [], 0
    for _ in range(40):
        used.append(tuner.setting)
        keeps.append(tuner.keeps_setting)
        if (medians := tuner.record(1.0)) is not None:
            tuner.decide(medians)
            end = len(used)
    assert all(kept == (a == b) for kept, a, b in zip(keeps[: end - 1], used, used[1:], strict=False))
    assert all(keeps[end:])


def test_settings_are_measured_again_and_a_small_gain_changes_nothing() -> None:
    tuner = Autotuner([ON, OFF], repeat_every=50)
    trial(tuner, {ON: 1.0, OFF: 2.0})
    for after, expected in (({ON: 1.0, OFF: 0.99}, ON), ({ON: 1.0, OFF: 0.9}, OFF), ({ON: 0.99, OFF: 1.0}, OFF)):
        for _ in range(50):
            assert tuner.record(1.0) is None
        assert trial(tuner, after)[1] == expected


def test_one_setting_needs_no_trial() -> None:
    tuner = Autotuner([OFF])
    for _ in range(100):
        assert (tuner.setting, tuner.keeps_setting, tuner.record(1.0)) == (OFF, True, None)


def test_a_resumed_run_continues_with_the_selected_setting() -> None:
    tuner = Autotuner([ON, OFF], repeat_every=20)
    trial(tuner, {ON: 2.0, OFF: 1.0})
    for _ in range(5):
        tuner.record(1.0)
    resumed, elsewhere = Autotuner([ON, OFF], repeat_every=20), Autotuner([ON, OTHER], repeat_every=20)
    resumed.load_state_dict(tuner.state_dict())
    elsewhere.load_state_dict(tuner.state_dict())
    assert resumed.setting == OFF
    assert resumed.state_dict() == tuner.state_dict()
    assert trial(elsewhere, {ON: 2.0, OTHER: 1.0})[1] == OTHER, "a setting that is not possible here is measured anew"
