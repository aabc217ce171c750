"""The page about a measured step: bubbles by cause of every way to train, beside compute alone. Pure."""

from collections.abc import Sequence
from typing import Any

from freescale import page
from freescale.bench.step import PLAIN, SPARSE_DIST, WAYS, Exact, Found
from freescale.bubbles.report import COLOURS

HEADER = ["way", "ms per step", "steps/s", "samples/s", "of compute", "bubble ms", "fewer than TorchRec", "SparseDist"]
EXACT_HEADER = ["way", "precision", "losses against nothing"]
_SEEN_MS = 0.01


def rows(figures: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line per way."""
    return [
        [
            one["way"],
            f"{one['step_ms']:.1f}",
            f"{one['iterations_per_second']:.2f}",
            f"{one['samples_per_second']:,.0f}",
            *_against(one),
        ]
        for one in figures
    ]


def _against(one: dict[str, Any]) -> list[str]:
    if "bubble_ms" not in one:
        return ["1.000", "", "", ""]
    shares = [one[f"fewer_bubbles_than_{other}"] for other in ("torchrec", "sparse_dist")]
    fewer = ["-" if share is None else f"{100 * share:+.1f}%" for share in shares]
    return [f"{one['step_over_compute']:.3f}", f"{one['bubble_ms']:.1f}", *fewer]


def exact_rows(found: Sequence[Exact]) -> list[list[str]]:
    """A line per comparison."""
    return [
        [one.way, one.precision, "the same bits" if one.bitwise else f"off by at most {one.largest_relative:.1e}"]
        for one in found
    ]


def headline(found: Found) -> str:
    """The measurement in a sentence or three."""
    best = next(one for one in found.figures() if one["way"] == "everything")
    low, high = found.floor()
    compute = "a wait of its calibrated length" if found.timed else "real"
    return (
        f"{found.world_size} ranks, {found.samples} samples a step, compute is {compute}. With everything a step takes "
        f"{best['step_over_compute']:.3f} of compute alone, and its bubble is "
        f"{_smaller(best['fewer_bubbles_than_torchrec'], PLAIN)}, "
        f"{_smaller(best['fewer_bubbles_than_sparse_dist'], SPARSE_DIST)}. "
        f"The plain loop was {low:.3f} to {high:.3f} of itself."
    )


def _smaller(share: float | None, baseline: str) -> str:
    if share is None:
        return f"not comparable with that of {baseline}, which has none"
    return f"{100 * abs(share):.1f}% {'smaller' if share >= 0 else 'larger'} than that of {baseline}"


def document(found: Found, exact: Sequence[Exact]) -> str:
    """The whole page."""
    figures = found.figures()
    bars = [page.StackedBar(way, found.causes(way)) for way in WAYS]
    bars.insert(0, page.StackedBar("compute alone", {"forward": figures[0]["step_ms"]}))
    seen = {cause: c for cause, c in COLOURS.items() if any(bar.values.get(cause, 0) > _SEEN_MS for bar in bars)}
    return page.document(
        "A step in every way",
        headline(found),
        page.section(
            "Where a step goes",
            "Mean of all ranks and turns. Compute alone and SparseDist do not tell forward and backward apart.",
            page.legend(seen),
            page.stacked_bars(bars, seen, rows="", axis="ms per step"),
        ),
        page.section(
            "All figures",
            "Medians over turns; bubbles are compared within a turn. A bubble is what a step takes beyond compute "
            "alone: forward, backward and update of the same samples with every row at hand and nobody to wait for, "
            "mean of all ranks.",
            page.table(HEADER, rows(figures)),
        ),
        page.section(
            "The same is learnt",
            "Losses of a few steps with real compute. Where samples move, sums have another order; TorchRec adds "
            "gradients of one row in another order, too.",
            page.table(EXACT_HEADER, exact_rows(exact), words=(0, 1, 2)),
        ),
    )
