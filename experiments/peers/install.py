"""Installs the peers that records/peers.md compares with, in their own environments beside the project's.

    python -m experiments.peers.install        # 120 MB in .peers, half a minute

`.peers/router` is a virtual environment with vllm-router and what it needs, `.peers/engine` holds agentinfer
alone: a vLLM server imports it, and has the packages that its scheduler needs. Versions are those of
requirements/peers.lock. PEERS_DIR names another folder. A sweep leaves out a contender that is not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer

from experiments.sweep.cases import PEERS, ROUTERS

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "peers.lock"
FOLDER = Path(os.environ.get("PEERS_DIR", ROOT / ".peers"))
ROUTER = FOLDER / "router" / "bin" / "vllm-router"
ENGINE = FOLDER / "engine"
PIP = ("-m", "pip", "-q", "--disable-pip-version-check", "--no-input", "install", "--no-deps", "--no-compile")


def missing(contender: str, simulated: bool = False) -> str:
    """Why that contender cannot run here; "" if it can. Simulated peers all need agentinfer."""
    if contender not in PEERS:
        return ""
    needed = ROUTER if contender in ROUTERS and not simulated else ENGINE / "agentinfer"
    if needed.exists():
        return ""
    return f"{needed} does not exist; python -m experiments.peers.install makes it"


def pinned(name: str) -> str:
    """The line of the lock file for a package."""
    (line,) = [line for line in LOCK.read_text().splitlines() if line.partition("==")[0] == name]
    return line


def environment(folder: Path, lock: Path) -> Path:
    """A virtual environment with the lock file's versions; its `bin`. Raises OSError, CalledProcessError."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / "python"), *PIP, "-r", str(lock)], check=True)
    return folder / "bin"


def main() -> None:
    """Make both environments, or bring them to the lock file's versions."""
    try:
        environment(FOLDER / "router", LOCK)
        into = ["--upgrade", "--target", str(ENGINE), pinned("agentinfer")]
        subprocess.run([sys.executable, *PIP, *into], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"peers: not installed, and left out of sweeps: {error}") from error
    print(f"peers: installed in {FOLDER}")


if __name__ == "__main__":
    typer.run(main)
