"""Draw a kept result: that of streaming, of embedding or of scale. Needs the extra `viz`.

python benchmarks/picture.py benchmarks/results/streaming.json benchmarks/results/streaming.png
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def streaming(rows: list[Any]) -> Figure:
    names = [f"{row['preset']}\n{row['order']}" for row in rows]
    middle = [row["ratio_median"] for row in rows]
    spread = [
        [row["ratio_median"] - row["ratio_range"][0] for row in rows],
        [row["ratio_range"][1] - row["ratio_median"] for row in rows],
    ]
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    speed.bar(names, middle, yerr=spread, capsize=4, color="#1b6ca8")
    speed.axhline(0.5, color="#d1495b", linestyle="--", label="aim")
    speed.set(title="rows per second, over pyarrow's scan", ylim=(0, 1))
    speed.legend()
    memory.bar(names, [row["memory_grown_mb"] for row in rows], color="#3a7d44")
    memory.axhline(400, color="#d1495b", linestyle="--", label="bound")
    memory.set(title="memory above the bare process, MB")
    memory.legend()
    return figure


def embedding(results: list[Any]) -> Figure:
    swept = [result for result in results if "swept" in result.get("ids", "")]
    share = [100 * result["collisions"] for result in swept]
    line = results[-1]["linear_fit"]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    plain = [result["torchrec_exposed_ms"] for result in swept]
    axes.plot(share, plain, "o-", color="#d1495b", label="TorchRec's plain loop")
    ours = [result["prioritized_exposed_ms"] for result in swept]
    axes.plot(share, ours, "o", color="#1b6ca8", label="prioritized")
    fitted = [line["base_ms"] + line["ms_per_percent"] * percent for percent in share]
    axes.plot(share, fitted, "--", color="#1b6ca8", label=f"linear fit, R² = {line['r_squared']}")
    axes.set(xlabel="ids that the batch before has too, %", ylabel="exposed per step, ms", ylim=(0, None))
    axes.legend()
    return figure


def scale(results: list[Any]) -> Figure:
    ranks = [result["ranks"] for result in results]
    figure, (bubbles, terms) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, colour in (("nothing", "#d1495b"), ("everything", "#1b6ca8"), ("both", "#3a7d44")):
        likely = list(zip(*(result[name]["bubble_percent_likely"] for result in results), strict=True))
        bubbles.fill_between(ranks, *likely, color=colour, alpha=0.2)
        label = "everything, two-level, in groups" if name == "both" else name
        bubbles.plot(ranks, [result[name]["bubble_percent"] for result in results], "o-", color=colour, label=label)
    bubbles.set(title="bubbles, % of a step", xscale="log", xlabel="GPUs", ylim=(0, None))
    grows = {"planning": "planning_ms", "before urgent rows leave a host": "urgent_latency_ms"}
    grows["gathering lengths"] = "gathering_lengths_ms"
    for (name, term), colour in zip(grows.items(), ("#1b6ca8", "#d1495b", "#3a7d44"), strict=True):
        for kind, line in (("everything", "o-"), ("both", "s--")):
            label = name if kind == "everything" else f"{name}, two-level, in groups"
            terms.plot(ranks, [result[kind][term] for result in results], line, color=colour, label=label)
    terms.set(title="what grows, ms", xscale="log", yscale="log", xlabel="GPUs")
    for axes in (bubbles, terms):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    return figure


def main(source: Path, target: Path) -> None:
    kept = json.loads(source.read_text())
    figure = {"streaming": streaming, "embedding": embedding, "scale": scale}[source.stem](kept["results"])
    figure.suptitle(kept["command"], fontsize=9)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
