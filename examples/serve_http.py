"""Serve an exported model over HTTP, with FastAPI and uvicorn.

    python examples/serve_http.py --demo

trains and exports a small model, serves it on a free port of this machine, and asks it once. With a folder that
`freescale export --format pt2` or `aoti` wrote, instead of --demo, it serves that. With --follow ADDRESS it serves the
newest version that `freescale publish` has put there, by the scripts of the folder. Needs torch, fastapi and uvicorn.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException

POLL_SECONDS = 0.5
Current = Callable[[], Any]
"""Returns the model that answers a request from its beginning to its end."""


def load(folder: Path) -> Current:
    """Load a model by the `serve.py` of its folder, and check its example."""
    sys.path.insert(0, str(folder))
    model = importlib.import_module("serve").Recommender(folder)
    model.check()
    return lambda: model


def follow(address: str, folder: Path) -> Current:
    """Load the newest version at an address, and every later one, by the scripts of a folder."""
    sys.path.insert(0, str(folder))
    follower = importlib.import_module("follow").Follower(address, importlib.import_module("serve"))

    def poll() -> None:
        while True:
            time.sleep(POLL_SECONDS)
            if not follower.poll() and follower.error:
                print(f"version {follower.version} stays: {follower.error}", file=sys.stderr)

    if not follower.poll():
        raise SystemExit(f"no version can be loaded: {follower.error}")
    threading.Thread(target=poll, daemon=True).start()
    return lambda: follower.model


def build_app(current: Current) -> FastAPI:
    """Return the server of a model. Each request is answered by one version."""
    torch.set_num_threads(1)  # requests are answered in parallel
    app = FastAPI()

    @app.post("/recommend")
    def recommend(requests: list[dict[str, Any]], k: int = 10) -> list[dict[str, Any]]:
        model = current()
        return answer(lambda: model.recommend(requests, k))

    @app.post("/score")
    def score(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        model = current()
        return answer(lambda: model.score(model.encode(requests), requests))

    @app.get("/version")
    def version() -> dict[str, Any]:
        return {name: current().facts[name] for name in ("task", "format", "step")}

    return app


def answer(compute: Any) -> Any:
    """Return an answer; a request that cannot be answered has status 422 and the reason."""
    try:
        return compute()
    except ValueError as error:
        raise HTTPException(422, str(error)) from error


def start(app: FastAPI, port: int = 0) -> tuple[uvicorn.Server, str]:
    """Serve on this machine from a thread; return the server and its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise SystemExit(f"port {port} cannot be used: choose another with --port")
        time.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()
    return server, f"http://{host}:{port}"


def ask(address: str, requests: list[dict[str, Any]]) -> Any:
    """Return the answer to requests."""
    body, kind = json.dumps(requests).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address, body, kind)) as answered:
        return json.load(answered)


def export_small_model(place: Path) -> Path:
    """Train for a moment and export."""

    def freescale(words: str) -> None:
        subprocess.run(["freescale", *words.split()], cwd=place, check=True, stdout=subprocess.DEVNULL)

    freescale("data synth --users 300 --items 200 data")
    freescale("train tiny --data data --out run --train.max-steps 2 --quiet")
    freescale("export run model --format pt2 --quiet")
    return place / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve an exported model over HTTP.")
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--follow", help="address of published versions")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    if options.model is not None:
        current = follow(options.follow, options.model) if options.follow else load(options.model)
        server, address = start(build_app(current), options.port)
        print(address, flush=True)
        threading.Event().wait()
    if not options.demo:
        parser.error("give the folder of an export, or --demo")
    with tempfile.TemporaryDirectory() as folder:
        server, address = start(build_app(load(export_small_model(Path(folder)))))
        print(ask(f"{address}/recommend?k=3", [{"item_id": [3, 17, 5], "timestamp": [100, 160, 220], "time": 230}]))
        server.should_exit = True


if __name__ == "__main__":
    main()
