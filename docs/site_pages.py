"""mkdocs hook: README and ARCHITECTURE as pages of the site, and links that leave docs/.

Those lead to the repository, whose address is CONTINUUM_REPOSITORY (https://...); without it they are text. A
picture is copied. A link to a file that is not there fails the build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"index.md": ROOT / "README.md", "architecture.md": ROOT / "ARCHITECTURE.md"}
LINK = re.compile(r"(!?)\[((?:[^\]`]|`[^`]*`)*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Pages that mkdocs.yml does not name stand behind the others, so that none is left out."""
    named = str(config["nav"])
    found = sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))
    config["nav"].append({"More": [name for name in found if f"'{name}'" not in named]})
    return config


def on_files(files: Any, config: Any) -> Any:
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=source.read_text(encoding="utf-8")))
    for source in (ROOT / "experiments" / "records" / "figures").glob("*.png"):
        files.append(File.generated(config, f"pictures/{source.name}", abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = PAGES.get(page.file.src_uri, ROOT / "docs" / page.file.src_uri)

    def of_site(found: re.Match[str]) -> str:
        mark, text, path, anchor = found[1], found[2], found[3], found[4] or ""
        target = (source.parent / path).resolve()
        if not target.exists():
            raise PluginError(f"{source.name}: {path} is not there")
        here = next((name for name, of in PAGES.items() if of == target), None)
        if here is None and mark and target.is_relative_to(ROOT / "experiments"):
            here = f"pictures/{target.name}"
        if here is None and target.is_relative_to(ROOT / "docs") and target.is_file():
            here = str(target.relative_to(ROOT / "docs"))
        if here is not None:
            return f"{mark}[{text}]({os.path.relpath(here, Path(page.file.src_uri).parent)}{anchor})"
        repository = os.environ.get("CONTINUUM_REPOSITORY", "").rstrip("/")
        return f"[{text}]({repository}/blob/main/{target.relative_to(ROOT)}{anchor})" if repository else text

    return LINK.sub(of_site, markdown)
