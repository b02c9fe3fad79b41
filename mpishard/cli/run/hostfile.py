"""Files of ``--hosts @FILE``, as MPI libraries, DeepSpeed and Kubeflow's MPI operator write them.

A line names a machine and its slots, ``node1 slots=4`` or ``node1:4``. Lines of a name alone share
the remaining ranks evenly. A name on several lines, as in the node file of PBS, has the sum of
their slots, where a name alone counts as one.
"""

from __future__ import annotations

from pathlib import Path

from mpishard.cli.run.launcher import is_host_name

_FORMS = "NAME, NAME:SLOTS or NAME slots=SLOTS"
_UPPER_LIMITS = ("max_slots", "max-slots")


def expanded_hosts(text: str) -> str:
    """Return the ``NAME:SLOTS,..`` of ``@FILE``; other texts as they are.

    Raises
    ------
    ValueError
        If the file cannot be read, names no machine, or a line is wrong; with file and line.
    """
    if not text.startswith("@"):
        return text
    file = Path(text[1:])
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"--hosts @{file}: the file of hosts cannot be read: {reason}") from None
    slots: dict[str, list[int]] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            try:
                name, given = _parsed(words)
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}") from None
            slots.setdefault(name, []).append(given)
    if not slots:
        raise ValueError(f"--hosts @{file}: the file names no machine; a line is {_FORMS}")
    return ",".join(
        name if given == [0] else f"{name}:{sum(each or 1 for each in given)}"
        for name, given in slots.items()
    )


def _parsed(words: list[str]) -> tuple[str, int]:
    """Return name and slots of a line; 0 slots if it has no number."""
    name, *options = words
    name, colon, number = name.partition(":")
    if not is_host_name(name):
        raise ValueError(f"{name!r} is no name or address of a machine; a line is {_FORMS}")
    found = {"slots": number} if colon else {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key not in ("slots", *_UPPER_LIMITS) or key in found:
            raise ValueError(f"{option!r} is not known here; a line is {_FORMS}")
        found[key] = value
    for key, value in found.items():
        if not (value.isdecimal() and int(value)):
            raise ValueError(f"a machine has 1 slot or more, got {key}={value}")
    given = int(found.get("slots", 0))
    # No more ranks than slots are started on a machine, so that a larger limit changes nothing.
    if any(int(found[key]) < given for key in _UPPER_LIMITS if key in found):
        raise ValueError(f"max_slots is below slots={given}")
    return name, given
