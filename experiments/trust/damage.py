"""Ways in which a file of LMCache's disk tier stops being what was stored."""

from __future__ import annotations

import os
import random
from pathlib import Path

from connectors.lmcache_mp.server.checksums import TRAILER_BYTES

FLIPPED_BYTES = 64


def files_of(folder: Path) -> list[Path]:
    """The chunks on disk."""
    return sorted(folder.rglob("*.data"))


def chunk_bytes(file: Path) -> int:
    """A whole file's bytes of KV."""
    return file.stat().st_size - TRAILER_BYTES


def flip(file: Path, draw: random.Random) -> None:
    whole = bytearray(file.read_bytes())
    at = draw.randrange(chunk_bytes(file) - FLIPPED_BYTES)
    whole[at : at + FLIPPED_BYTES] = bytes(255 - byte for byte in whole[at : at + FLIPPED_BYTES])
    file.write_bytes(whole)


def zero(file: Path, draw: random.Random) -> None:
    zeros = file.stat().st_size if draw.random() < 0.5 else chunk_bytes(file)
    file.write_bytes(bytes(zeros) + file.read_bytes()[zeros:])


def swap(file: Path, draw: random.Random) -> None:
    other = draw.choice([each for each in files_of(file.parent) if each != file])
    mine, others = file.read_bytes(), other.read_bytes()
    file.write_bytes(others)
    other.write_bytes(mine)


def rename_over(file: Path, draw: random.Random) -> None:
    other = draw.choice([each for each in files_of(file.parent) if each != file])
    other.replace(file)


def cut(file: Path, draw: random.Random) -> None:
    os.truncate(file, draw.randrange(file.stat().st_size))


def lose_the_trailer(file: Path, draw: random.Random) -> None:  # noqa: ARG001
    """A kill between LMCache's rename and our append; or a file of stock LMCache."""
    os.truncate(file, file.stat().st_size - TRAILER_BYTES)


def append(file: Path, draw: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(draw.randbytes(draw.randrange(1, 64)))


DAMAGE = (flip, zero, swap, rename_over, cut, lose_the_trailer, append)
