"""The compute model that is fitted to a run reproduces the run."""

import pytest

from freescale.bubbles.events import RankStep, Span
from freescale.bubbles.records import StepSample
from freescale.errors import DataError
from freescale.simulate.operations import fit_compute

MS = 1_000_000


def step(number: int, work: float, forward: int, backward: int, look_up: int = 7) -> StepSample:
    ends = [0, 2, 2 + look_up, 2 + look_up + forward, 2 + look_up + forward + backward]
    kinds = ("host", "forward", "forward", "backward")
    spans = tuple(Span(k, a * MS, b * MS) for k, a, b in zip(kinds, ends[:-1], ends[1:], strict=True))
    return StepSample(RankStep(0, number, 0, ends[-1] * MS, spans, (), work), {})


def test_compute_has_a_fixed_part_and_a_rate_and_excludes_lookups() -> None:
    samples = {n: [step(n, work, 10 + int(work), 20 + 2 * int(work))] for n, work in enumerate([5.0, 10, 20, 40] * 4)}
    found = fit_compute(samples)
    assert found.step == pytest.approx(0.030)
    assert found.work == pytest.approx(0.003)
    assert found.forward == pytest.approx(1 / 3)
    assert found.error < 1e-9


def test_a_wait_inside_the_backward_pass_does_not_count_as_compute() -> None:
    def waiting(sample: StepSample) -> StepSample:
        *before, backward = sample.step.spans
        ends = backward.end + 15 * MS
        spans = (*before, Span("dense gradients", backward.end, ends), backward._replace(end=ends))
        return sample._replace(step=sample.step._replace(end=ends, spans=spans))

    samples = {n: [step(n, 5.0, 10, 20)] for n in range(8)}
    assert fit_compute({n: [waiting(one)] for n, (one,) in samples.items()}) == fit_compute(samples)


def test_work_that_hardly_varies_explains_all_of_the_time() -> None:
    samples = {n: [step(n, 100.0 + n % 2, 30 - n % 2, 60)] for n in range(12)}
    assert fit_compute(samples).step == 0.0
    with pytest.raises(DataError, match="too few whole steps"):
        fit_compute({1: [step(1, 5.0, 10, 20)]})
