"""A rank with several threads computes bitwise the same gradients every time."""

from pathlib import Path
from typing import Any

import pytest
import torch

from freescale.data.loader import Loader
from freescale.embedding.tables import ReplicatedTables, Table
from freescale.train.sharded_model import SequenceModule, build_model
from tests.support.datasets import histories, write_dataset
from tests.support.training import small

CASES: dict[str, dict[str, Any]] = {
    "hstu": {"model": {"dim": 32, "heads": 1}},
    "sasrec": {"model": {"kind": "sasrec", "dim": 32, "heads": 1}},
    "ranking": {"model": {"dim": 32, "heads": 1}, "task": {"kind": "ranking", "labels": ("label_click",)}},
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_do_not_depend_on_thread_order(case: str, tmp_path: Path) -> None:
    lengths = [200, 3, 40, 120, 80, 7] * 8
    write_dataset(tmp_path, histories(lengths, items=40, candidates=True), rows_per_group=8, items=40)
    config = small(tmp_path, data={"max_history": 200, "global_batch": 48, "split": "none"}, **CASES[case])
    loader = Loader(config.data, seed=0)
    model = build_model(config, items=loader.vocabulary.rows)
    tables = ReplicatedTables([Table(n, *size) for n, size in model.tables.items()], seed=0, deviation=0.02)
    network, inputs = SequenceModule(model, replicated=tables), model.prepare(next(iter(loader)))
    (wanted,) = network.unique_ids([inputs.ids])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = [torch.autograd.grad(network(inputs, wanted, None), list(network.parameters())) for _ in range(8)]
    finally:
        torch.set_num_threads(threads)
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True))
