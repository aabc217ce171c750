"""Learning rates rise and fall as the config says."""

import pytest

from freescale.config import TrainConfig
from freescale.train.trainer import lr_factor


def test_learning_rates_warm_up_linearly_then_stay() -> None:
    config = TrainConfig(warmup_steps=4)
    assert [lr_factor(step, 100, config) for step in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("decay", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_learning_rates_decay_to_their_final_value_after_warm_up(decay: str, middle: float) -> None:
    config = TrainConfig(warmup_steps=10, decay=decay, final_lr=0.1)  # type: ignore[arg-type]
    assert lr_factor(10, 110, config) == pytest.approx(1.0)
    assert lr_factor(60, 110, config) == pytest.approx(middle)
    assert lr_factor(110, 110, config) == pytest.approx(0.1)
    assert all(lr_factor(s, 110, config) >= lr_factor(s + 1, 110, config) for s in range(10, 110))
