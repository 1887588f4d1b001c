"""Hook of mkdocs: links of pages to files outside `docs/` lead to the repository."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# mkdocs counts warnings of this logger, and a strict build fails after a warning.
LOG = logging.getLogger("mkdocs.hooks.site_links")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace relative links that leave `docs/`. Log a warning for a file that does not exist.

    Without `repo_url`, a link leads to the file in this checkout.
    """
    folder = ROOT / "docs" / Path(page.file.src_uri).parent
    base = f"{config.repo_url.rstrip('/')}/blob/main" if config.repo_url else ROOT.as_uri()

    def replace(link: re.Match[str]) -> str:
        name, _, anchor = link[1].partition("#")
        target = (folder / name).resolve()
        if not name or ROOT / "docs" in target.parents:
            return link[0]
        if not target.exists():
            LOG.warning("%s links to %s, which does not exist", page.file.src_uri, name)
        return f"]({base}/{target.relative_to(ROOT).as_posix()}{'#' + anchor if anchor else ''})"

    return re.sub(r"\]\(((?!\w+:)[^)\s]+)\)", replace, markdown)
