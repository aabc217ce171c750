"""A custom ranking model on the features of a config, from the building blocks of the built-in models.

python examples/custom_ranking.py
"""

import tempfile
from pathlib import Path
from types import SimpleNamespace as Inputs

import torch
from torch import Tensor, nn

import freescale as fs
from freescale.data.synthetic_features import write_feature_log
from freescale.train.build import build
from freescale.transport.world import destroy_world, init_world


class MeanOfHistory(nn.Module):
    """Scores a candidate by its own features and the mean of the history."""

    def __init__(self, config: fs.RunConfig, loader: fs.Loader) -> None:
        super().__init__()
        self.task, dim = config.task, config.model.dim
        self.features = fs.models.FeatureEmbedding(loader.features, dim, deviation=0.02)
        self.tables = {"item": (loader.vocabulary.rows, dim), **self.features.tables}
        self.head = fs.models.build_heads(config.task, dim)

    def prepare(self, batch: fs.Batch) -> Inputs:
        ids, shown = fs.models.TableIds(), batch.candidates
        assert shown is not None
        items = ids.add("item", batch.history["item_id"]), ids.add("item", shown["candidate_id"])
        parts = self.features.prepare(batch, "history", ids), self.features.prepare(batch, "candidates", ids)
        labels = torch.stack([shown[name] for name in self.task.labels], dim=1)
        found, places = ids.joined(self.tables, batch.history["item_id"]), list(zip(items, parts, strict=True))
        return Inputs(ids=found, count=labels.numel(), parts=places, labels=labels, batch=batch)

    def forward(self, inputs: Inputs, rows: dict[str, fs.models.Rows]) -> Tensor:
        item, batch = rows["item"], inputs.batch
        events, shown = (item.values[item.index[place]] + self.features(of, rows) for place, of in inputs.parts)
        mean = torch.segment_reduce(events, "mean", lengths=batch.history.lengths, axis=0)
        mixed = shown * (1 + mean.repeat_interleave(batch.candidates.lengths, 0))
        return fs.models.multi_task_loss(self.head(mixed), inputs.labels, self.task)


with tempfile.TemporaryDirectory() as folder:
    write_feature_log(f"{folder}/data", "kuairand-ranking", users=300, shorter=300)
    config = fs.RunConfig(
        data=fs.DataConfig(path=f"{folder}/data", global_batch=64, split="none"),
        task=fs.TaskConfig(kind="ranking", labels=("label_click", "label_like")),
        features={"author_id": fs.FeatureConfig(), "tags": fs.FeatureConfig(kind="set", dim=8, combine="concat")},
        train=fs.TrainConfig(epochs=3, lr=1e-2, log_every=5),
    )
    model = MeanOfHistory(config, fs.Loader.from_run(config))
    trainer = build(config, init_world(timeout=60), Path(folder, "run"), model=model)
    trainer.fit()
    trainer.close()
    print(Path(folder, "run", "metrics.jsonl").read_text().splitlines()[-1])
destroy_world()
