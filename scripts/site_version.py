"""The version of mpishard beside its name in the site's header: a hook of mkdocs."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

PACKAGE = Path(__file__).parents[1] / "mpishard" / "__init__.py"


def on_config(config: MkDocsConfig) -> None:
    """Append the version to the site's name."""
    found = re.search(r'^__version__ = "(.*)"$', PACKAGE.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{PACKAGE} has no line __version__ = ...")
    config.site_name = f"{config.site_name} {found[1]}"
