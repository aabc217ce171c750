"""A training step in every way that is worth comparing: TorchRec's two loops, and ours with techniques on and off.

All ways train the same model on the same samples, in turns, so that a machine that slows down slows all of them. What a
step takes beyond compute alone is its bubble. TorchRec's plain loop runs twice in a turn: how far it is from itself is
the floor under every comparison.
"""

import gc
import itertools
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from freescale.bench import torchrec
from freescale.bench.compute import Compute, calibrated, limit
from freescale.bubbles.records import read_intervals
from freescale.bubbles.summary import Summary, summarize
from freescale.config import RunConfig
from freescale.data.loader import Loader
from freescale.models.protocol import Model
from freescale.simulate.whatif import Techniques
from freescale.train.build import build, model_of
from freescale.train.journal import entries
from freescale.transport.world import World

PLAIN, SPARSE_DIST, AGAIN = "TorchRec", "TorchRec SparseDist", "TorchRec again"
OURS = {
    "nothing": Techniques(balance=False, priority=False, sm_free=False),
    "balance": Techniques(priority=False, sm_free=False),
    "priority": Techniques(balance=False, sm_free=False),
    "SM-free": Techniques(balance=False, priority=False),
    "everything": Techniques(),
}
WAYS = (PLAIN, SPARSE_DIST, *OURS, AGAIN)
COMPARED: dict[Literal["fp64", "fp32"], tuple[str, ...]] = {
    "fp64": tuple(OURS),
    "fp32": (PLAIN, SPARSE_DIST, "nothing"),
}
"""Whose losses are compared, by precision."""
_NEVER = 10**9


class Turn(NamedTuple):
    """One way to train, once."""

    way: str
    summary: Summary
    limit_ms: float
    """Of a step that only computes, in the same turn."""

    @property
    def bubble_ms(self) -> float:
        """What a step takes beyond compute."""
        return self.summary.step_ms - self.limit_ms


class Found(NamedTuple):
    """What was measured; known on the first rank."""

    world_size: int
    samples: int
    """Of a step, on all ranks."""
    timed: bool
    compute: Compute
    turns: list[Turn]

    def of(self, way: str, figure: Callable[[Turn], float]) -> list[float]:
        """A figure of every turn of a way."""
        return [figure(turn) for turn in self.turns if turn.way == way]

    def median(self, way: str, figure: Callable[[Turn], float]) -> float:
        """Over its turns."""
        return statistics.median(self.of(way, figure))

    def fewer(self, way: str, than: str) -> float | None:
        """By what share bubbles are fewer: the median over turns, each compared within itself.

        None if the baseline of a turn has no bubble, which noise can cause: there is nothing to compare with.
        """
        pairs = list(zip(self.of(way, _bubble), self.of(than, _bubble), strict=True))
        if any(other <= 0 for _, other in pairs):
            return None
        return statistics.median(1 - one / other for one, other in pairs)

    def floor(self) -> tuple[float, float]:
        """How far the plain loop's step was from itself: the smallest and the largest ratio of a turn."""
        pairs = zip(self.of(AGAIN, _step), self.of(PLAIN, _step), strict=True)
        ratios = [one / other for one, other in pairs]
        return min(ratios), max(ratios)

    def figures(self) -> list[dict[str, Any]]:
        """Of every way, for a file or another program."""
        limit_ms = self.median(PLAIN, lambda turn: turn.limit_ms)
        return [{"way": "compute alone", "step_ms": limit_ms, **self._speed(limit_ms)}] + [
            {
                "way": way,
                "step_ms": self.median(way, _step),
                **self._speed(self.median(way, _step)),
                "step_over_compute": self.median(way, lambda turn: turn.summary.step_ms / turn.limit_ms),
                "bubble_ms": self.median(way, _bubble),
                "fewer_bubbles_than_torchrec": self.fewer(way, PLAIN),
                "fewer_bubbles_than_sparse_dist": self.fewer(way, SPARSE_DIST),
                "causes_ms": self.causes(way),
            }
            for way in WAYS
        ]

    def causes(self, way: str) -> dict[str, float]:
        """Milliseconds of a step by cause: the mean over turns, so that they add up."""
        lines = [line for turn in self.turns if turn.way == way for line in turn.summary.lines]
        by_cause = {line.cause: [one.ms for one in lines if one.cause == line.cause] for line in lines}
        return {cause: statistics.mean(ms) for cause, ms in by_cause.items()}

    def _speed(self, step_ms: float) -> dict[str, float]:
        return {"iterations_per_second": 1e3 / step_ms, "samples_per_second": 1e3 * self.samples / step_ms}


def _bubble(turn: Turn) -> float:
    return turn.bubble_ms


def _step(turn: Turn) -> float:
    return turn.summary.step_ms


def measure(
    config: RunConfig,
    world: World,
    folder: Path,
    *,
    turns: int,
    timed: bool,
    say: Callable[[str], None] = lambda _: None,
) -> Found:
    """Train in every way, turn after turn, for `train.max_steps` each; every turn has samples of its own.

    `timed`: compute is a wait as long as the model was measured to take, which leaves the processor free for traffic,
    as a GPU does.
    """
    compute = calibrated(config, world)
    costed = replace(config, balance=replace(config.balance, cost=compute.cost.constants))
    items = Loader(config.data, seed=0).vocabulary.rows
    found = []
    for turn in range(turns):
        turned = replace(costed, seed=config.seed + turn)

        def model(turned: RunConfig = turned) -> Model:
            real = model_of(turned, items=items)
            return compute.lane(real) if timed else real

        loader = Loader(turned.data, seed=turned.seed, rank=world.rank, world_size=world.world_size)
        limit_ms = limit(turned, world, model(), itertools.islice(loader, config.train.max_steps))
        for way in WAYS:
            place = folder / f"{turn}-{way.replace(' ', '-')}"
            trained(way, turned, world, place, model())
            if world.is_rank_zero:
                found.append(Turn(way, summarize(read_intervals(place)), limit_ms))
                say(f"turn {turn + 1} of {turns}, {way}: {_step(found[-1]):.1f} ms, compute alone {limit_ms:.1f} ms")
    return Found(world.world_size, config.data.global_batch, timed, compute, found)


def trained(way: str, config: RunConfig, world: World, folder: Path, model: Model) -> list[float]:
    """Train one way and give the losses of its steps, which only the first rank knows of ours."""
    gc.collect()  # what another way trained refers to itself in circles, and its tables take room
    if way not in OURS:
        return torchrec.train(config, world, folder, model, pipelined=way == SPARSE_DIST)
    trainer = build(with_techniques(config, OURS[way]), world, folder, model=model, quiet=True)
    trainer.fit()
    trainer.close()
    if world.is_rank_zero:
        shutil.rmtree(folder / "checkpoints")  # of a model that nobody asked for
    return [entry["loss"] for entry in entries(folder) if entry["kind"] == "train"] if world.is_rank_zero else []


def with_techniques(config: RunConfig, used: Techniques) -> RunConfig:
    """A run with some of them; nothing else is saved, told or evaluated while it is measured."""
    transport = config.transport if used.sm_free else replace(config.transport, urgent="c10d", deferred="c10d")
    return replace(
        config,
        balance=replace(config.balance, mode="on" if used.balance else "off"),
        tables=replace(config.tables, placement="sharded", overlap="on" if used.priority else "off"),
        transport=transport,
        train=replace(config.train, epochs=_NEVER, save_every=_NEVER),
    )


class Exact(NamedTuple):
    """Whether a way learns what ours learns with nothing."""

    way: str
    precision: str
    bitwise: bool
    largest_relative: float
    """Difference of the losses of a step."""


def compared(
    config: RunConfig, world: World, folder: Path, *, steps: int, say: Callable[[str], None] = lambda _: None
) -> list[Exact]:
    """Train for a few steps with real compute in every way, and compare the losses. Known on the first rank.

    Ours among each other in fp64, where only the order of additions can differ; TorchRec's loops, whose tables have no
    fp64, with ours in fp32.
    """
    losses: dict[tuple[str, str], Sequence[float]] = {}
    items = Loader(config.data, seed=0).vocabulary.rows
    for precision, ways in COMPARED.items():
        train = replace(config.train, precision=precision, max_steps=steps, log_every=1)
        of_precision = replace(config, train=train)
        for way in ways:
            place = folder / f"{precision}-{way.replace(' ', '-')}"
            losses[precision, way] = trained(way, of_precision, world, place, model_of(config, items=items))
            say(f"{way} in {precision}")
    return _differences(losses) if world.is_rank_zero else []


def _differences(losses: Mapping[tuple[str, str], Sequence[float]]) -> list[Exact]:
    found = []
    for (precision, way), own in losses.items():
        like = losses[precision, "nothing"]
        if way != "nothing":
            off = max(abs(a - b) / max(abs(b), 1e-300) for a, b in zip(own, like, strict=True))
            found.append(Exact(way, precision, list(own) == list(like), off))
    return found
