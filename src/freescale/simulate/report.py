"""The page of a simulation: scaling, time by cause, and the effect of each technique. Pure."""

from collections.abc import Callable, Sequence

from freescale import page
from freescale.bubbles.report import visible_colours
from freescale.simulate.cluster import FIGURES, Cluster
from freescale.simulate.whatif import SimulationResult

HEADER = ["ranks", "with", "step, ms", "samples/s", "scaling", "bubbles", "likely", "straggler", "shared"]


def table_rows(results: Sequence[SimulationResult]) -> list[list[str]]:
    """Return a table row for each size and set of techniques."""
    return [
        [
            f"{result.world_size:,}",
            result.techniques.name,
            f"{result.summary.step_ms:,.1f}",
            f"{result.samples_per_second:,.0f}",
            f"{100 * scaling(result, results):.0f}%",
            f"{result.summary.bubble_percent:.1f}%",
            f"{result.bubble_percent.low:.0f}-{result.bubble_percent.high:.0f}%",
            f"{result.summary.straggler_percent:.1f}%",
            f"{100 * result.collisions:.0f}%",
        ]
        for result in results
    ]


def scaling(result: SimulationResult, results: Sequence[SimulationResult]) -> float:
    """Return samples per second and rank, relative to the smallest world size with the same techniques."""
    first = min((o for o in results if o.techniques == result.techniques), key=lambda o: o.world_size)
    return result.samples_per_second / result.world_size / (first.samples_per_second / first.world_size)


def render_report(name: str, cluster: Cluster, notes: Sequence[str], results: Sequence[SimulationResult]) -> str:
    """Return the HTML page."""
    return page.document(
        f"{name} on {cluster.name}",
        "Simulated, not measured: " + " ".join(notes),
        page.section(
            "Figures",
            "Likely: the bubbles of 80% of the clusters that the ranges below allow. Shared: rows of a step that the "
            "previous step needs too.",
            page.table(HEADER, table_rows(results), words=(1,)),
        ),
        _scaling_section(results),
        *_ablation_sections(results),
        page.section("The cluster", "An uncertain figure has a range.", _cluster_table(cluster)),
    )


def _scaling_section(results: Sequence[SimulationResult]) -> str:
    by = {result.techniques: [o for o in results if o.techniques == result.techniques] for result in results}
    ranks = page.Axis("ranks", log=len({result.world_size for result in results}) > 1)

    def curves(figure: Callable[[SimulationResult], float]) -> list[page.Series]:
        return [
            page.Series(t.name, [o.world_size for o in group], [figure(o) for o in group]) for t, group in by.items()
        ]

    computing, samples = curves(lambda o: 1.0 - o.summary.bubble_percent / 100), curves(lambda o: o.samples_per_second)
    return page.section(
        "Scaling",
        "Throughput, and the share of its time that a rank computes.",
        page.line_chart(samples, ranks, page.Axis("samples per second", log=True)),
        page.line_chart(computing, ranks, page.Axis("time spent computing", percent=True)),
    )


def _ablation_sections(results: Sequence[SimulationResult]) -> list[str]:
    """Return a section for each size, with a bar for each set of techniques."""
    colours, sections = visible_colours(line for result in results for line in result.summary.lines), []
    for size in sorted({result.world_size for result in results}):
        group = [result for result in results if result.world_size == size]
        bars = [page.StackedBar(o.techniques.name, {line.cause: line.ms for line in o.summary.lines}) for o in group]
        chart = page.stacked_bars(bars, colours, rows="with", axis="ms per step, mean of all ranks")
        sections.append(page.section(f"A step on {size:,} ranks", "By cause.", page.legend(colours), chart))
    return sections


def _cluster_table(cluster: Cluster) -> str:
    ranges = {
        n: f"{result.low:g} to {result.high:g}" if result.low < result.high else ""
        for n, result in cluster.figures.items()
    }
    figures = [[n, FIGURES[n], f"{f.value:g}", ranges[n], f.source] for n, f in cluster.figures.items()]
    return page.table(["figure", "meaning", "value", "range", "source"], figures, words=(0, 1, 4))
