"""Files that commands write: checked before minutes of work, and written with their machine."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path

from mpishard.cli.machine import describe_machine
from mpishard.cli.wording import refuse


def check_output(command: str, flag: str, path: Path | None) -> None:
    """Refuse a file that cannot be written. Its folder may be missing: it is made later."""
    if path is None:
        return
    # The first parent that exists: the others are made when the result is written.
    folder = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if path.is_dir():
        refuse(command, f"{flag}: {path} is a folder: give the name of a file")
    if not folder.is_dir():
        refuse(command, f"{flag}: {folder} is a file, and no folder for {path.name}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        is_read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        reason = ", which is on a read-only file system" if is_read_only else ""
        refuse(command, f"{flag}: this user may not write {path}{reason}")


def check_png(command: str, flag: str, path: Path | None) -> None:
    """Refuse a picture that cannot be drawn: in another format, elsewhere, without matplotlib."""
    if path is not None and path.suffix.lower() != ".png":
        refuse(command, f"{flag}: a PNG is drawn: give a name that ends with .png, got {path}")
    check_output(command, flag, path)
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        refuse(command, f"{flag} needs matplotlib: pip install 'mpishard[plot]'")


def write_json(path: Path, result: Mapping[str, object]) -> None:
    """Write measurements, with the machine that they were made on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": describe_machine(), **result}
    # NaN and infinity are refused: other readers of JSON do not know them.
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
