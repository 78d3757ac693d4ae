"""The files that come along beside the code: lmcache.json, profiles, the simulator, what operating needs.

In a wheel they lie in this folder (setup.py), in a clone at its root.
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from continuum_lmcache.connector_names import EXTRA, SERVER_ARGS
from continuum_lmcache.errors import ConfigError

HERE = Path(__file__).parent
FILES = HERE if (HERE / "lmcache.json").is_file() else HERE.parents[1]
LMCACHE, SIMULATION, MEASURE = "lmcache.json", "experiments/estimate.py", "profiles/measure.py"
OPERATING = ("docs/grafana", "docs/compose", "docs/kubernetes.yaml", "docs/ray.yaml")


def connector_config(dram_gib: float, disk: str, disk_gib: float) -> dict[str, Any]:
    """The shipped lmcache.json with these sizes. `disk`: a folder of LMCache's server; "": none.

    They go into the server's command line, which LMCACHE_* variables still override.
    """
    config: dict[str, Any] = json.loads((FILES / LMCACHE).read_text(encoding="utf-8"))
    words = shlex.split(config[EXTRA][SERVER_ARGS])
    options = dict(zip(words[::2], words[1::2], strict=True))
    options["--l1-size-gb"] = f"{dram_gib:g}"
    if disk:
        adapter = json.loads(options["--l2-adapter"]) | {"base_path": disk, "max_capacity_gb": disk_gib}
        options["--l2-adapter"] = json.dumps(adapter)
    else:
        del options["--l2-adapter"], options["--l2-prefetch-policy"]
    config[EXTRA][SERVER_ARGS] = shlex.join(word for option in options.items() for word in option)
    return config


def why_unwritable(folder: Path) -> str:
    """Why nobody could write into the folder, or make it, here and now; "": one could."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        TemporaryFile(dir=there).close()
    except OSError as error:
        return f"{there}: {error.strerror}"
    return ""


def write(folder: Path, config: dict[str, Any], operating: bool, force: bool) -> list[Path]:
    """Write lmcache.json into the folder, and `operating`: OPERATING beside it, or beside one that is there.
    Returns what was written.

    Raises ConfigError, before anything is written, where one is there already.
    """
    keeps_config = operating and not force and (folder / LMCACHE).exists()
    names = [*([] if keeps_config else [LMCACHE]), *(OPERATING if operating else ())]
    there = [name for name in names if (folder / name).exists()]
    if there and not force:
        raise ConfigError(f"{folder / there[0]} is there already; --force replaces it")
    folder.mkdir(parents=True, exist_ok=True)
    if not keeps_config:
        (folder / LMCACHE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in OPERATING if operating else ():
        source, target = FILES / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)
    return [folder / name for name in names]
