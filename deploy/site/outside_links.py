"""A hook of mkdocs: links from docs/ to other files of the repository lead to the repository's page."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

_LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]*)(#[^)\s]*)?(\))")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of a page. A link to a file that is not there stays, and mkdocs reports it."""
    folder, docs = PurePosixPath(page.file.src_uri).parent, Path(config["docs_dir"])

    def rewritten(found: re.Match[str]) -> str:
        goal = Path(os.path.normpath(docs / folder / found[2]))
        if goal.is_relative_to(docs) or not goal.exists():
            return found[0]
        path = goal.relative_to(docs.parent).as_posix()
        return f"{found[1]}{config['repo_url']}/blob/main/{path}{found[3] or ''}{found[4]}"

    return _LINK.sub(rewritten, markdown)
