"""Score a user with an exported retrieval model, in plain torch: every step from the files to the best items.

    python examples/score_from_export.py --demo

trains a small model, exports it, and compares the result with `freescale predict`. With two paths instead of --demo it
scores a history: the folder of `freescale export`, and a CSV file with lines of item,timestamp (seconds, oldest first).
Nothing of freescale is imported here. tests/cli/test_trained_model.py compares this file with `freescale predict`.
"""

import argparse
import csv
import json
import subprocess
import tempfile
import tomllib
import zlib
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import torch
import torch.nn.functional as F  # noqa: N812  the name that everyone knows
from safetensors.torch import load_file
from torch import Tensor


class Scorer:
    """An exported model: vocabulary, table, encoder."""

    def __init__(self, folder: Path) -> None:
        self.config = tomllib.loads((folder / "config.toml").read_text())
        self.weights = load_file(folder / "model.safetensors")
        if "tables.item" not in self.weights:  # sharded: one file per rank, in the order of their rows
            shards = [load_file(path) for path in sorted(folder.glob("tables-*.safetensors"))]
            self.weights["tables.item"] = torch.cat([shard["tables.item"] for shard in shards])
        self.shared = self.config["data"]["oov_rows"]
        self.items = len(self.weights["tables.item"]) - self.shared
        vocabulary = folder / "vocabulary.parquet"  # a synthetic log has none: its items are their numbers
        self.keys = pq.read_table(vocabulary)["key"].to_pylist() if vocabulary.exists() else list(range(self.items))
        self.number = {key: number for number, key in enumerate(self.keys)}

    @torch.no_grad()
    def recommend(self, items: Sequence[object], times: Sequence[int], k: int) -> list[tuple[object, float]]:
        """The best k items after a history (item keys and seconds since the epoch, oldest first), with their scores."""
        # 1. The most recent events. Items become row numbers; unknown ones share the rows behind the vocabulary.
        longest = self.config["data"]["max_history"]
        ids = torch.tensor([self.row(item) for item in items[-longest:]])
        seconds = torch.tensor(times[-longest:], dtype=torch.int64)
        # 2. The vector of the last event, compared with every item by cosine.
        query = F.normalize(self.encode(ids, seconds)[-1], dim=-1)
        scores = F.normalize(self.weights["tables.item"][: self.items], dim=-1) @ query
        # 3. Items of the history are left out, unless the model was trained for repeats.
        if self.config["task"]["seen"] == "exclude":
            scores[ids[ids < self.items]] = -torch.inf
        best = scores.topk(min(k, self.items))
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [(self.keys[item], score) for score, item in pairs if score > -torch.inf]

    def row(self, item: object) -> int:
        """Row of an item in the table. Unknown items are hashed twice: their key to a number, that to a shared row."""
        if item in self.number:
            return self.number[item]
        return self.items + splitmix64(self.items + (zlib.crc32(str(item).encode()) << 20)) % self.shared

    def encode(self, ids: Tensor, seconds: Tensor) -> Tensor:
        """One vector per event [events, dim]."""
        w, model = self.weights, self.config["model"]
        x = w["tables.item"][ids] * model["dim"] ** 0.5 + w["encoder.stem.position"][: len(ids)]
        for layer in range(model["layers"]):
            prefix = f"encoder.blocks.{layer}."
            block = {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}
            x = self.hstu(x, block, seconds) if model["kind"] == "hstu" else self.sasrec(x, block)
        return x if model["kind"] == "hstu" else layer_norm(x, w, "encoder.last")

    def hstu(self, x: Tensor, w: dict[str, Tensor], seconds: Tensor) -> Tensor:
        """A layer of HSTU: silu instead of softmax, a bias by distance in positions and in time, and a gate u."""
        u, v, q, k = F.silu(F.linear(layer_norm(x, w, "before"), w["uvqk.weight"])).chunk(4, dim=-1)
        q, k, v = (self.split_heads(part) for part in (q, k, v))
        place = torch.arange(len(x))
        distance = (place[:, None] - place[None, :]).clamp(min=0)
        asked = torch.cat([seconds[1:], seconds[-1:]])  # each event is asked for the next one when that happens
        bias = w["bias.position"][distance] + w["bias.time"][time_bucket(asked[:, None] - seconds[None, :])]
        weights = F.silu(q @ k.mT + bias) / len(self.weights["encoder.stem.position"])
        mixed = (weights.tril() @ v).transpose(0, 1).flatten(1)
        return x + F.linear(u * layer_norm(mixed, w, "after"), w["out.weight"], w["out.bias"])

    def sasrec(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        """A layer of SASRec: causal softmax attention on normalised queries, then two feed-forward layers."""

        def linear(y: Tensor, name: str) -> Tensor:
            return F.linear(y, w[f"{name}.weight"], w[f"{name}.bias"])

        normed = layer_norm(x, w, "before")
        q, k, v = (self.split_heads(part) for part in (linear(normed, "q"), linear(x, "k"), linear(x, "v")))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = layer_norm(normed + linear(mixed, "out"), w, "between")
        return x + linear(linear(x, "widen").relu(), "narrow")

    def split_heads(self, x: Tensor) -> Tensor:
        """[events, dim] to [heads, events, width]."""
        return x.unflatten(-1, (self.config["model"]["heads"], -1)).transpose(0, 1)


def layer_norm(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def time_bucket(seconds: Tensor) -> Tensor:
    """log(seconds) / 0.301, of seconds cut to seven significant bits; 0 below a second, at most 128."""
    bits = seconds.abs().float().view(torch.int32) >> 17 << 17
    return (bits.view(torch.float32).double().clamp(min=1).log() / 0.301).long().clamp(max=128)


def splitmix64(z: int) -> int:
    """A 64-bit hash."""
    mask = (1 << 64) - 1
    z = z + 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def demo() -> None:
    """Train, export and predict with the command line, then score the same users here."""
    with tempfile.TemporaryDirectory() as folder:

        def freescale(words: str) -> None:
            subprocess.run(["freescale", *words.split()], cwd=folder, check=True, stdout=subprocess.DEVNULL)

        freescale("data synth --users 300 --items 200 data")
        freescale("train tiny --data data --out run --train.max-steps 5 --quiet")
        freescale("export run model")
        freescale("predict run top --k 5")
        scorer = Scorer(Path(folder, "model"))
        histories = [
            row for path in sorted(Path(folder, "data").glob("*.parquet")) for row in pq.read_table(path).to_pylist()
        ]
        predicted = {row["user_id"]: row["item_id"] for row in pq.read_table(Path(folder, "top")).to_pylist()}
        scored = {row["user_id"]: scorer.recommend(row["item_id"], row["timestamp"], 5) for row in histories}
        equal = sum(predicted[user] == [item for item, _ in best] for user, best in scored.items())
        print(f"{equal} of {len(scored)} users have the same five items as in `freescale predict`")


def main() -> None:
    parser = argparse.ArgumentParser(description="Score a history with an exported model.")
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("history", type=Path, nargs="?")
    parser.add_argument("--k", type=int, default=10)
    options = parser.parse_args()
    if options.demo:
        demo()
        return
    if options.history is None:
        parser.error("give the folder of an export and a CSV of item,timestamp, or --demo")
    scorer = Scorer(options.model)
    integers = isinstance(scorer.keys[0], int)
    rows = [(int(item) if integers else item, int(time)) for item, time in csv.reader(options.history.open())]
    best = scorer.recommend([item for item, _ in rows], [time for _, time in rows], options.k)
    print(json.dumps([{"item": item, "score": round(score, 6)} for item, score in best], indent=1))


if __name__ == "__main__":
    main()
