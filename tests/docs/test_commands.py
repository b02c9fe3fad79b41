"""Commands that the pages name exist, with their options; so do the scripts that they start."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from mpishard.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text):
    """Yield the words of each command of mpishard, in fences of shells and between backquotes."""
    shells = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(shells).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`(mpishard [^`]+)`", text)
    for line in lines:
        for part in re.split(r"[|;&]+", line.partition(" #")[0]):
            start, name, command = part.strip().rpartition("mpishard ")
            if name and (not start or start.startswith(("srun ", "MPISHARD_"))):
                yield command.split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page):
    text = page.read_text(encoding="utf-8")
    for words in commands(text):
        command, rest = get_command(app), list(words)
        while rest and hasattr(command, "get_command"):
            found = command.get_command(None, rest[0])
            if not rest[0].startswith("-"):
                assert found is not None, f"{page.name}: mpishard {' '.join(words)}"
            if found is None:
                break
            command = found
            rest.pop(0)
        known = {name for option in command.params for name in option.opts + option.secondary_opts}
        known |= {"--help", "-h"}
        for word in rest:
            if word == "--" or re.search(r"\.py$|^(?:python|[a-z]\w*\.\w+)$", word):
                break  # what follows is for the script
            if word.startswith("-"):
                name = word.partition("=")[0]
                assert name in known, f"{page.name}: mpishard {' '.join(words)} has no {name}"
    for path in re.findall(r"\bbenchmarks/\w+\.(?:py|sh)\b", text):
        assert (ROOT / path).exists(), f"{page.name}: {path}"
