"""The page of a simulation: how it scales, where the time goes, and what each technique is worth. Pure."""

from collections.abc import Callable, Sequence

from freescale import page
from freescale.bubbles.report import visible_colours
from freescale.simulate.cluster import FIGURES, Cluster
from freescale.simulate.whatif import Outcome

HEADER = ["ranks", "with", "step, ms", "samples/s", "scaling", "bubbles", "likely", "straggler", "shared"]


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """A line for each size and set of techniques."""
    return [
        [
            f"{one.world_size:,}",
            one.techniques.name,
            f"{one.summary.step_ms:,.1f}",
            f"{one.samples_per_second:,.0f}",
            f"{100 * scaling(one, outcomes):.0f}%",
            f"{one.summary.bubble_percent:.1f}%",
            f"{one.bubble_percent.low:.0f}-{one.bubble_percent.high:.0f}%",
            f"{one.summary.straggler_percent:.1f}%",
            f"{100 * one.collisions:.0f}%",
        ]
        for one in outcomes
    ]


def scaling(one: Outcome, outcomes: Sequence[Outcome]) -> float:
    """Samples per second and rank, against the fewest ranks with the same techniques."""
    first = min((o for o in outcomes if o.techniques == one.techniques), key=lambda o: o.world_size)
    return one.samples_per_second / one.world_size / (first.samples_per_second / first.world_size)


def report(name: str, cluster: Cluster, said: Sequence[str], outcomes: Sequence[Outcome]) -> str:
    """The whole page."""
    return page.document(
        f"{name} on {cluster.name}",
        "Simulated, not measured: " + " ".join(said),
        page.section(
            "Figures",
            "Likely: the bubbles of eight in ten of the clusters that the figures below allow. Shared: rows of a step "
            "that the step before needs too.",
            page.table(HEADER, rows(outcomes), words=(1,)),
        ),
        _scaling(outcomes),
        *_ablation(outcomes),
        page.section("The cluster", "Where a figure is not known, a range.", _cluster(cluster)),
    )


def _scaling(outcomes: Sequence[Outcome]) -> str:
    by = {one.techniques: [o for o in outcomes if o.techniques == one.techniques] for one in outcomes}
    ranks = page.Axis("ranks", log=len({one.world_size for one in outcomes}) > 1)

    def curves(figure: Callable[[Outcome], float]) -> list[page.Series]:
        return [page.Series(t.name, [o.world_size for o in some], [figure(o) for o in some]) for t, some in by.items()]

    computing, samples = curves(lambda o: 1.0 - o.summary.bubble_percent / 100), curves(lambda o: o.samples_per_second)
    return page.section(
        "Scaling",
        "Throughput, and the share of its time that a rank computes.",
        page.line_chart(samples, ranks, page.Axis("samples per second", log=True)),
        page.line_chart(computing, ranks, page.Axis("time spent computing", percent=True)),
    )


def _ablation(outcomes: Sequence[Outcome]) -> list[str]:
    """At every size, a bar for each set of techniques."""
    colours, sections = visible_colours(line for one in outcomes for line in one.summary.lines), []
    for size in sorted({one.world_size for one in outcomes}):
        some = [one for one in outcomes if one.world_size == size]
        bars = [page.StackedBar(o.techniques.name, {line.cause: line.ms for line in o.summary.lines}) for o in some]
        drawn = page.stacked_bars(bars, colours, rows="with", axis="ms per step, mean of all ranks")
        sections.append(page.section(f"A step on {size:,} ranks", "By cause.", page.legend(colours), drawn))
    return sections


def _cluster(cluster: Cluster) -> str:
    between = {n: f"{one.low:g} to {one.high:g}" if one.low < one.high else "" for n, one in cluster.figures.items()}
    figures = [[n, FIGURES[n], f"{one.value:g}", between[n], one.source] for n, one in cluster.figures.items()]
    return page.table(["figure", "meaning", "value", "range", "source"], figures, words=(0, 1, 4))
