"""With balance.adapt, costs and rank speeds follow measured steps, identically on all ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freescale.balance.cost import Cost, sizes
from freescale.balance.planner import SUMS, CostModel, CostModelEstimator, Planner, Stopwatch
from freescale.config import BalanceConfig, RunConfig
from freescale.train.build import build
from freescale.train.trainer import Trainer
from tests.support.ranks import Ranks, World
from tests.support.training import joined, small

TRUE, STEP = Cost(sample=1e-4, token=2e-5, pair=3e-8), 0.01
RANKS, BATCH = 8, 32
GUESS = Cost.hstu(dim=64)


def measured(lengths: NDArray[np.int64], slower: float = 1.0) -> list[int]:
    """What a rank's stopwatch says of a step."""
    tokens, pairs = sizes(lengths)
    seconds = slower * (STEP + TRUE.of(lengths).sum())
    return [1, len(lengths), int(tokens.sum()), int(pairs.sum()), int(1e9 * seconds)]


def simulated(slower: Any, steps: int, seed: int = 0) -> tuple[list[float], Planner]:
    """Share of a rank's time that it waits, step by step, where rank r computes slower(step, r, rng) times as long."""
    rng = np.random.default_rng(seed)
    planner = Planner(GUESS, BalanceConfig(adapt=True), world_size=RANKS)
    homes, idle, said = np.repeat(np.arange(RANKS), BATCH), [], np.zeros((RANKS, SUMS + 3), dtype=np.int64)
    for step in range(steps):
        planner.receive_stats(said)
        lengths = np.minimum(rng.lognormal(4.0, 1.2, RANKS * BATCH).astype(np.int64) + 1, 2000)
        rank = planner({"history": lengths}, homes).rank
        proposed = planner._estimator.proposal()
        said = np.array([measured(lengths[rank == r], slower(step, r, rng)) + proposed for r in range(RANKS)])
        idle.append(1 - said[:, 4].mean() / said[:, 4].max())
    return idle, planner


def test_a_slow_rank_is_given_less_within_twenty_steps_and_more_again_when_it_recovers() -> None:
    idle, planner = simulated(lambda step, rank, _: 1.6 if rank == 3 and step < 40 else 1.0, 80)
    assert np.mean(idle[:2]) > 0.2
    assert np.mean(idle[20:40]) < 0.05
    assert np.mean(idle[60:]) < 0.03
    assert planner.cost_model.speeds is not None
    assert planner.cost_model.speeds.tolist() == [1.0] * RANKS


def test_the_cost_becomes_that_of_the_machine() -> None:
    _, planner = simulated(lambda _step, _rank, rng: 1 + 0.03 * rng.standard_normal(), 64)
    assert planner.calibration is not None
    assert 0.01 < planner.calibration.error < 0.06
    lengths = np.array([1, 10, 100, 500, 2000])
    found, true = planner.cost_model.cost.of(lengths), TRUE.of(lengths)
    assert (found / found.sum())[2:] == pytest.approx((true / true.sum())[2:], rel=0.1)


def test_noise_and_one_odd_step_move_hardly_any_work() -> None:
    def noisy(odd: float) -> Any:
        return lambda step, rank, rng: (odd if (step, rank) == (30, 2) else 1.0) * (1 + 0.01 * rng.standard_normal())

    (_, without), (_, planner) = (simulated(noisy(odd), 34) for odd in (1.0, 5.0))
    assert planner.cost_model.speeds is not None
    assert planner.cost_model.speeds.tolist() == [1.0] * RANKS
    lengths = np.array([20, 100, 500])
    costs, usual = planner.cost_model.cost.of(lengths), without.cost_model.cost.of(lengths)
    assert costs / costs.sum() == pytest.approx(usual / usual.sum(), rel=0.1)


def test_ranks_that_computed_nothing_say_nothing() -> None:
    learner, basis = CostModelEstimator(is_rank_zero=False), CostModel(GUESS)
    assert learner.update(basis, np.zeros((4, SUMS + 3), dtype=np.int64)) == basis
    sums = [measured(np.array([100, 20])), [1, 0, 0, 0, 10**6], [0] * SUMS, measured(np.array([90, 30]))]
    speeds = learner.update(basis, np.array([[*of_rank, 0, 0, 0] for of_rank in sums])).speeds
    assert speeds is not None
    assert speeds[[1, 2]].tolist() == [1.0, 1.0]


def test_all_ranks_take_the_fit_of_rank_0_to_the_last_bit() -> None:
    learner, basis = CostModelEstimator(is_rank_zero=False), CostModel(GUESS)
    proposed = np.array([[0.1, 0.2, 0.3], [7.0, 7.0, 7.0]]).view(np.int64)
    told = np.concatenate([np.zeros((2, SUMS), dtype=np.int64), proposed], axis=1)
    assert learner.update(basis, told).cost.constants == (0.1, 0.2, 0.3)


def test_the_first_step_of_a_process_is_not_counted() -> None:
    watch = Stopwatch()
    for step in range(3):
        watch.record_samples(step, np.array([3, 4]), np.array([1, 0]))
    watch.record_time(0, 10**9)
    assert watch.read() == [0] * 5
    watch.record_time(1, 5)
    watch.record_time(2, 6)
    assert watch.read() == [2, 4, 16, 2 * (6 + 4 + 10), 11]
    assert watch.read() == [0] * 5


def measure_true_cost(planner: Planner, trainer: Trainer) -> None:
    """Let a step take the time of its samples by `TRUE`, whatever else runs on this machine."""
    watch = planner.stopwatch
    if watch is not None:
        trainer.components.profiler.on_compute_time = lambda step, _: watch.record_time(
            step, true_nanoseconds(watch, step)
        )


def true_nanoseconds(watch: Stopwatch, step: int) -> int:
    """The compute time of a step that was recorded."""
    return int(1e9 * (STEP + TRUE.summed(*watch._pending[step])))


def adapting(world: World, config: RunConfig, folder: str, resume: bool) -> tuple[Any, Any]:
    """What placements rest on before and after a run."""
    trainer = build(config, joined(world), Path(folder))
    planner = trainer.components.planner
    assert planner is not None
    measure_true_cost(planner, trainer)
    if resume:
        trainer.checkpoints.resume()
    before = planner.state_dict()
    trainer.fit()
    trainer.close()
    return before, planner.state_dict()


def test_what_was_learnt_is_in_the_checkpoint_and_all_ranks_learn_alike(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    config = small(log, balance={"adapt": True}, train={"max_steps": 24, "epochs": 10})
    (guess, one), (_, two) = groups[2].run(adapting, config, str(tmp_path), False)
    assert one == two
    assert one["cost"] != guess["cost"]
    more = small(log, train={"max_steps": 26, "epochs": 10})
    for rank in groups[2].run(adapting, more, str(tmp_path), True):
        assert rank == (one, one)  # nothing is learnt any more, and nothing is forgotten
    own = small(log, balance={"cost": (1.0, 2.0, 3.0)}, train={"max_steps": 28, "epochs": 10})
    for before, _ in groups[2].run(adapting, own, str(tmp_path), True):
        assert before["cost"][:3] == [1.0, 2.0, 3.0]
