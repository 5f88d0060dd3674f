"""A hook of mkdocs: adds pages from outside docs/ to the site, and turns links between files into links of the site.

README.md ──> index.md      docs/X ──> X      another file of the repository ──> its path in place of a link
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
}
"""Page of the site by file of the repository."""

LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")
"""The text, the path and the place of a relative link."""


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds the pages outside docs/."""
    for source, page in ADDED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrites the relative links of a page; a link to a file that does not exist stays and fails the build."""
    here = PurePosixPath(page.file.src_uri)
    source = next((source for source, added in ADDED.items() if added == str(here)), f"docs/{here}")

    def rewritten(link: re.Match[str]) -> str:
        text = link[1]
        path = link[2]
        place = link[3] or ""
        target = os.path.normpath(PurePosixPath(source).parent / path)
        on_site = ADDED.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if on_site:
            return f"[{text}]({os.path.relpath(on_site, here.parent)}{place})"
        return f"{text} (`{target}`)" if (ROOT / target).exists() else link[0]

    return LINK.sub(rewritten, markdown)
