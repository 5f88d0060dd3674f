"""A hook of mkdocs: adds pages from outside docs/ to the site, and turns links between files into links of the site.

README.md ──> index.md      bench/results/learning.md ──> results/learning.md      docs/X ──> X
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ADDED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/results/learning.md": "results/learning.md",
}
"""Page of the site by file of the repository."""

LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=(?:#[^)]*)?\))")
"""The path of a relative link."""


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds the pages outside docs/."""
    for source, page in ADDED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrites the relative links of a page; a link to a file that the site lacks stays and fails the build."""
    here = PurePosixPath(page.file.src_uri)
    source = next((source for source, added in ADDED.items() if added == str(here)), f"docs/{here}")

    def rewritten(link: re.Match[str]) -> str:
        target = os.path.normpath(PurePosixPath(source).parent / link[1])
        on_site = ADDED.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        return os.path.relpath(on_site, here.parent) if on_site else link[1]

    return LINK.sub(rewritten, markdown)
