"""What pyproject.toml cannot say: the files beside the packages that the wheel takes along, and its page.

CONTINUUM_REPOSITORY=https://... is the repository's address. With it README's links lead there, on any index
page; without it they are text.
"""

import os
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = (  # they keep their places, below continuum_lmcache/shipped
    *("lmcache.json", "profiles/*.py", "profiles/*.yaml", "experiments/**/*.py", "experiments/sim/*.yaml"),
    *("docs/grafana/*", "docs/compose/*", "docs/*.yaml"),
)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)]+)\)")
ROOT = Path(__file__).parent


class BuildWithShipped(build_py):
    """Copies SHIPPED; an editable install reads them where they are."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        for path in (path for pattern in SHIPPED for path in ROOT.glob(pattern)):
            target = Path(self.build_lib, "continuum_lmcache", "shipped", path.relative_to(ROOT))
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))


def page(repository):
    """README with links that work away from the repository."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if repository:
        places = {"": "blob", "!": "raw"}
        return LINK.sub(lambda m: f"{m[1]}[{m[2]}]({repository}/{places[m[1]]}/main/{m[3]})", text)
    return LINK.sub(lambda m: m[2] if not m[1] else "", text)


repository = os.environ.get("CONTINUUM_REPOSITORY", "").rstrip("/")
urls = {"Paper": "https://arxiv.org/abs/2511.02230"}
if repository:
    places = {"Documentation": "blob/main/docs", "Changes": "blob/main/CHANGELOG.md", "Issues": "issues"}
    urls |= {"Repository": repository, **{name: f"{repository}/{at}" for name, at in places.items()}}
setup(
    cmdclass={"build_py": BuildWithShipped},
    long_description=page(repository),
    long_description_content_type="text/markdown",
    project_urls=urls,
)
