"""Answers requests with an exported model. Needs torch and numpy, nothing else: copy this folder to the server.

    model = serve.Recommender("model/")
    model.recommend([{"item_id": [3, 17, 5], "timestamp": [100, 160, 220], "time": 230}], k=10)  # retrieval
    kept = model.encode([{"item_id": [3, 17, 5], "timestamp": [100, 160, 220]}])                 # ranking
    model.score(kept, [{"candidate_id": [8, 9], "time": 230}])

`time`: of the request, by default of the last event. `python serve.py FOLDER` compares the answer to an example.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch


class RequestError(ValueError):
    """A request that cannot be answered, and why."""


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Map the tensors of a file: 8 bytes with the size of the header, the header in JSON, then the data."""
    file = np.memmap(path, np.uint8, "c")
    begin = 8 + int.from_bytes(file[:8], "little")
    found, data, dtypes = {}, file[begin:], {"F32": np.float32, "F64": np.float64, "I64": np.int64, "I32": np.int32}
    for name, entry in json.loads(bytes(file[8:begin])).items():
        if name != "__metadata__":
            values = data[slice(*entry["data_offsets"])].view(dtypes[entry["dtype"]])
            found[name] = torch.from_numpy(values.reshape(entry["shape"]))
    return found


def splitmix64(x: Any) -> Any:
    """Return the hash that selects the shared row of an unknown id."""
    z = np.atleast_1d(x).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (z ^ z >> np.uint64(31)).reshape(np.shape(x))


def pad(rows: list[Any], padding: int) -> Any:
    """Return arrays with one number of dimensions as one array."""
    filled = np.full((len(rows), *np.max([row.shape for row in rows], axis=0, initial=2)), padding, rows[0].dtype)
    for i, row in enumerate(rows):
        filled[(i, *map(slice, row.shape))] = row
    return filled


class Recommender:
    """An exported model. Ids become rows here; programs, compiled to take weights by position, do the rest."""

    def __init__(self, folder: str | Path, programs: Any = None, weights: Any = None) -> None:
        self.folder = Path(folder)
        self.facts = json.loads((self.folder / "serving.json").read_text())
        for name, entry in self.facts["files"].items():
            if hashlib.sha256((self.folder / name).read_bytes()).hexdigest() != entry["sha256"]:
                raise ValueError(f"{self.folder / name} was changed or is incomplete: export again")
        self.weights = dict(sorted((weights or read_safetensors(self.folder / "weights.safetensors")).items()))
        slots = {name: self.weights.pop(f"{name}.ids").numpy().ravel() for name in self.facts["dynamic"]}
        self.slots = {name: (ids[order := np.argsort(ids)], order) for name, ids in slots.items()}
        load = {"pt2": lambda path: torch.export.load(path).module(), "aoti": torch._inductor.aoti_load_package}
        files = {name: str(self.folder / f"{name}.pt2") for name in self.facts["programs"]}
        self.programs = programs or {name: load[self.facts["format"]](file) for name, file in files.items()}
        if self.facts["task"] == "retrieval":  # the same as item_ids.npy and items.npy
            ids, rows = self.slots.get("item", (np.arange(self.facts["items"]),) * 2)
            self.item_ids, rows = ids[ids >= 0], rows[ids >= 0]
            self.items = torch.nn.functional.normalize(self.weights["tables.item"][rows], dim=-1)

    def query(self, requests: list[dict[str, Any]]) -> torch.Tensor:
        """Return the unit vector of each user, to compare with those of items.npy."""
        return self.programs["query"](self.weights, self._inputs("query", requests))["vector"]

    def recommend(self, requests: list[dict[str, Any]], k: int = 10, vectors: Any = None) -> list[dict[str, list[Any]]]:
        """Return the best items of each request and their scores, best first. `vectors`: default those of `query`."""
        scores = (self.query(requests) if vectors is None else vectors) @ self.items.T
        for row, request in enumerate(requests if self.facts["exclude_seen"] else []):
            seen = np.asarray(request.get("item_id", []))
            place = np.searchsorted(self.item_ids, seen).clip(max=len(self.item_ids) - 1)
            scores[row, place[self.item_ids[place] == seen]] = -torch.inf
        best, at = scores.topk(min(k, scores.shape[1]), dim=1)
        found = zip(self.item_ids[at.numpy()], best.numpy(), best.numpy() > -np.inf, strict=True)
        return [{"item_id": ids[ok].tolist(), "score": score[ok].tolist()} for ids, score, ok in found]

    def encode(self, requests: list[dict[str, Any]]) -> list[Any]:
        """Return what ranking keeps of the history of each request."""
        kept = self.programs["history"](self.weights, self._inputs("history", requests))
        return [{name: value[i : i + 1] for name, value in kept.items()} for i in range(len(requests))]

    def score(self, kept: list[Any], requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the outputs of the candidates of each request, by label, after the history that is kept."""
        answers = []
        for history, request in zip(kept, requests, strict=True):
            inputs = self._inputs("candidates", [request]) | history
            outputs = self.programs["candidates"](self.weights, inputs)["outputs"][0, : len(request["candidate_id"])]
            answers.append(dict(zip(self.facts["labels"], outputs.T.tolist(), strict=True)))
        return answers

    def _inputs(self, program: str, requests: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Check requests and pad their columns."""
        if not isinstance(requests, list) or not all(isinstance(request, dict) for request in requests) or not requests:
            raise RequestError("give a list of requests, each a dict")
        inputs, sizes, (prefix, per_event) = {}, [], self.facts["tokens"]
        for name, column in self.facts["programs"][program].items():
            rows = [self._values(column, request.get(column["column"]), column["most"]) for request in requests]
            sizes = sizes or [len(row) for row in rows]  # the first column is a list
            if column["per_entry"] and [len(row) for row in rows] != sizes:
                raise RequestError(f"'{column['column']}' has another length than the other columns of its request")
            inputs[name] = torch.from_numpy(pad(rows, column["padding"]))
        lengths = {"length": torch.tensor(sizes), "position": torch.arange(prefix + per_event * max(2, *sizes))}
        return inputs if program == "candidates" else inputs | lengths

    def _values(self, column: dict[str, Any], value: Any, most: list[int]) -> Any:
        """Return the checked values of a column of a request: rows instead of ids. `most`: lengths of nested lists."""
        if value in column["empty"]:
            return np.zeros(0, np.int64)
        if len(most) > 1 and isinstance(value, list) and 0 < len(value) <= most[0]:
            return pad([self._values(column, ids, most[1:]) for ids in value], column["padding"])
        value, (low, high) = np.array(value, dtype=object), column["range"]
        null = np.equal(value, np.array(None)) & column["nullable"]
        value, types = np.where(null, low, value), {int, type(low)}
        valid = value.ndim == len(most) and 0 < value.size <= max([1, *most]) and {*map(type, value.flat)} <= types
        if not valid or not np.all((value >= low) & (value <= high)):
            raise RequestError(f"'{column['column']}' must be {column['means']}")
        if column["kind"] == "number":
            return np.where(null, np.nan, value).astype(np.float64)
        value, known = np.where(null, column["missing"], value).astype(np.int64), column["known"]
        if column["table"] not in self.slots:
            shared = known + (splitmix64(value) % np.uint64(column["shared"])).astype(np.int64)
            return np.where((value < known) | null, value, shared) if known else value
        # A dynamic id has its slot, or the shared row of its bucket.
        (ids, rows), (buckets, slots) = self.slots[column["table"]], self.facts["dynamic"][column["table"]]
        bucket, place = splitmix64(value) >> np.uint64(65 - buckets.bit_length()), np.searchsorted(ids, value)
        place = place.clip(max=len(ids) - 1)
        return np.where(ids[place] == value, rows[place], bucket.astype(np.int64) * (slots + 1) + slots)

    def check(self) -> None:
        """Answer the example of serving.json; raise if the answer is not that of the model in training."""
        asked, answer = [self.facts["example"]["request"]], self.facts["example"]["answer"]
        found = self.recommend(asked) if self.facts["task"] == "retrieval" else self.score(self.encode(asked), asked)
        if not all(np.allclose(found[0][name], answer[name], atol=1e-5) for name in answer if name != "item_id"):
            raise ValueError(f"the answer to the example of {self.folder} is {found[0]} instead of {answer}")


if __name__ == "__main__":
    Recommender(sys.argv[1]).check()
