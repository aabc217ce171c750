"""Answers requests with an exported model. Needs torch and numpy, nothing else: copy this folder to the server.

    from serve import Recommender
    model = Recommender("model/")
    model.recommend([{"item_id": [3, 17, 5], "timestamp": [100, 160, 220], "time": 230}], k=10)  # retrieval
    kept = model.encode([{"item_id": [3, 17, 5], "timestamp": [100, 160, 220]}])                 # ranking
    model.score(kept, [{"candidate_id": [8, 9], "time": 230}])

A request holds the columns of serving.json; `time` is when it is made, by default that of the last event.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

DTYPES = {"F32": np.float32, "F64": np.float64, "I64": np.int64, "I32": np.int32}


class RequestError(ValueError):
    """A request that cannot be answered, and why."""


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Map the tensors of a file: 8 bytes with the size of the header, the header in JSON, then the data."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "c", offset=8 + size)
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = torch.from_numpy(data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"]))
    return found


def splitmix64(x: Any) -> Any:
    """Return the hash that selects the shared row of an unknown id."""
    z = np.atleast_1d(x).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (z ^ z >> np.uint64(31)).reshape(np.shape(x))


class Recommender:
    """An exported model. Ids become rows here; the programs compute everything else."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.facts = json.loads((self.folder / "serving.json").read_text())
        for name, entry in self.facts["files"].items():
            if hashlib.sha256((self.folder / name).read_bytes()).hexdigest() != entry["sha256"]:
                raise ValueError(f"{self.folder / name} was changed or is incomplete: export again")
        self.weights = read_safetensors(self.folder / "weights.safetensors")
        slots = {name: self.weights.pop(f"{name}.ids").numpy().ravel() for name in self.facts["dynamic"]}
        self.slots = {name: (ids[order := np.argsort(ids)], order) for name, ids in slots.items()}
        self.programs = {name: self._load(self.folder / f"{name}.pt2") for name in self.facts["programs"]}
        if self.facts["task"] == "retrieval":
            read = np.lib.format.open_memmap  # unlike np.load, it cannot execute code. Ids ascend.
            self.item_ids = read(self.folder / "item_ids.npy", "c")
            self.items = torch.from_numpy(read(self.folder / "items.npy", "c"))

    def _load(self, path: Path) -> Any:
        if self.facts["format"] == "aoti":
            return torch._inductor.aoti_load_package(str(path))
        return torch.export.load(path).module()

    @torch.inference_mode()
    def recommend(self, requests: list[dict[str, Any]], k: int = 10) -> list[dict[str, list[Any]]]:
        """Return the best items of each request and their scores, best first."""
        inputs = self._inputs("query", requests)
        scores = self.programs["query"](self.weights, inputs)["vector"] @ self.items.T
        for row, request in enumerate(requests if self.facts["exclude_seen"] else []):
            seen = np.asarray(request["item_id"])
            place = np.searchsorted(self.item_ids, seen).clip(max=len(self.item_ids) - 1)
            scores[row, place[self.item_ids[place] == seen]] = -torch.inf
        best, at = scores.topk(min(k, scores.shape[1]), dim=1)
        found = zip(self.item_ids[at.numpy()], best.numpy(), best.numpy() > -np.inf, strict=True)
        return [{"item_id": ids[ok].tolist(), "score": score[ok].tolist()} for ids, score, ok in found]

    @torch.inference_mode()
    def encode(self, requests: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
        """Return what ranking keeps of the history of each request."""
        inputs = self._inputs("history", requests)
        kept = self.programs["history"](self.weights, inputs)["kept"]
        times, lengths = inputs["timestamp"], inputs["length"]
        samples = [slice(i, i + 1) for i in range(len(requests))]
        return [{"kept": kept[:, :, i], "timestamp": times[i], "length": lengths[i]} for i in samples]

    @torch.inference_mode()
    def score(self, kept: list[dict[str, torch.Tensor]], requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the outputs of the candidates of each request, by label, after the history that is kept."""
        answers = []
        for history, request in zip(kept, requests, strict=True):
            last = int(history["timestamp"][0, self.facts["prefix"] + int(history["length"]) - 1])
            inputs = self._inputs("candidates", [{"time": last, **request}])
            outputs = self.programs["candidates"](self.weights, inputs | history)["outputs"][0]
            by_label = outputs[: len(request["candidate_id"])].T.tolist()
            answers.append(dict(zip(self.facts["labels"], by_label, strict=True)))
        return answers

    def _inputs(self, program: str, requests: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Check requests and pad their columns."""
        if not isinstance(requests, list) or not all(isinstance(request, dict) for request in requests) or not requests:
            raise RequestError("give a list of requests, each a dict")
        columns, inputs, sizes = self.facts["programs"][program], {}, [0] * len(requests)
        prefix = 0 if program == "candidates" else self.facts["prefix"]
        for name, column in columns.items():
            rows = [self._values(name, column, request) for request in requests]
            if not column["most"]:
                inputs[column["input"]] = torch.from_numpy(np.stack(rows))
                continue
            sizes = sizes if any(sizes) else [len(row) for row in rows]
            if [len(row) for row in rows] != sizes:
                raise RequestError(f"'{name}' has another length than the other columns of its request")
            filled = np.zeros((len(rows), prefix + max(2, *sizes)), rows[0].dtype)
            for row, into in zip(rows, filled, strict=True):
                into[prefix : prefix + len(row)] = row
            inputs[column["input"]] = torch.from_numpy(filled)
        return inputs if program == "candidates" else inputs | {"length": torch.tensor(sizes)}

    def _values(self, name: str, column: dict[str, Any], request: dict[str, Any]) -> Any:
        """Return the checked values of a column of a request: rows instead of ids."""
        value = np.asarray(request["timestamp"][-1] if name == "time" and name not in request else request.get(name))
        kinds = "iuf" if column["kind"] == "number" else "iu"
        if value.dtype.kind not in kinds or value.ndim != bool(column["most"]):
            raise RequestError(f"'{name}' must be {column['means']}")
        if value.ndim and not 1 <= len(value) <= column["most"]:
            raise RequestError(f"'{name}' has {len(value)} values; a request has 1 to {column['most']}")
        if column["kind"] == "number":
            return value.astype(np.float64)
        value, known = value.astype(np.int64), column["known"]
        if (value < 0).any():
            raise RequestError(f"'{name}' holds a negative value, or one above 2^63")
        if column["table"] in self.slots:
            return self._find_rows(column["table"], value)
        shared = known + (splitmix64(value) % np.uint64(column["shared"] or 1)).astype(np.int64)
        return np.where(value < known, value, shared) if known else value

    def _find_rows(self, table: str, ids: Any) -> Any:
        """Return the row of each dynamic id: its slot, or the shared row of its bucket."""
        buckets, slots = self.facts["dynamic"][table]
        bucket, (known, rows) = splitmix64(ids) >> np.uint64(65 - buckets.bit_length()), self.slots[table]
        place = np.searchsorted(known, ids).clip(max=len(known) - 1)
        return np.where(known[place] == ids, rows[place], bucket.astype(np.int64) * (slots + 1) + slots)
