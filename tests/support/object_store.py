"""An S3 server on loopback, in a process of its own, and the environment in which commands reach it."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUCKET = "logs"


def install_packages(folder: Path) -> dict[str, str]:
    """Install the packages of requirements/s3.txt into a folder; return an environment that uses them."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, "-r", str(ROOT / "requirements" / "s3.txt")], check=True)
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    return {**os.environ, **keys, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), str(folder)])}


@contextlib.contextmanager
def object_store(environment: dict[str, str]) -> Iterator[int]:
    """Run a server with one bucket; give its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_open(port)
        make_bucket = f"import s3fs; s3fs.S3FileSystem(endpoint_url='{address(port)}').mkdir('{BUCKET}')"
        subprocess.run([sys.executable, "-c", make_bucket], env=environment, check=True)
        yield port
    finally:
        server.kill()
        server.wait()


def address(port: int) -> str:
    """Return the address of a server."""
    return f"http://127.0.0.1:{port}"


def _wait_until_open(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.1)
    raise TimeoutError("the S3 server did not start within 60 s")
