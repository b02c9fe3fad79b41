"""Simulated machines for the tests of ``mpishard doctor``."""

import pytest

from mpishard.cli.probe import Answer, answer_line


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Put only programs of these names on PATH; each prints the given text."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("SLURM_JOB_ID", "SLURM_MPI_TYPE", "CUDA_VISIBLE_DEVICES", "MPISHARD_CUDA_AWARE"):
        monkeypatch.delenv(name, raising=False)

    def add(name, says, code=0):
        path = folder / name
        path.write_text(f"#!/bin/sh\n/bin/cat <<'EOF'\n{says}\nEOF\nexit {code}\n")
        path.chmod(0o755)
        return path

    return add


@pytest.fixture
def answers(monkeypatch):
    """Answer the probes of a module in this order; return the list of their commands."""
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)  # or there is one more question

    def use(module, *replies):
        asked, left = [], list(replies)

        def reply(command, limit, variables=None):
            asked.append((list(command), variables))
            found = left.pop(0)
            return found if isinstance(found, Answer) else Answer(0, answer_line(found), "", limit)

        monkeypatch.setattr(module, "ask", reply)
        return asked

    return use
