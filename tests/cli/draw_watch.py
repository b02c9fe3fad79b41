"""Draw the picture of docs/watch.md: a job of three ranks, of which one has stalled.

``scripts/make_images.sh watch`` calls it, with the path of the picture. It needs chromium, mpi4py
and mpiexec, and takes half a minute.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

MPISHARD = [sys.executable, "-m", "mpishard"]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
LIMIT = 120  # seconds


def wait_until(address, holds):
    """Request the state of the run until the condition holds."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        with urllib.request.urlopen(f"{address}/state") as answer:
            if holds(json.load(answer)):
                return
        time.sleep(0.5)
    raise TimeoutError(f"the job has not come so far within {LIMIT} s")


def draw(picture):
    """Train in the working folder, and draw."""
    run = Path("runs/small")
    shutil.copy(Path(__file__).with_name("watched_job.py"), "train.py")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    watch = [*MPISHARD, "watch", str(run), "--port", "0"]
    job = [*MPISHARD, "run", "-n", "3", "--log-dir", str(run), "train.py", str(run)]
    with (
        subprocess.Popen(watch, env=environment, stdout=subprocess.PIPE, text=True) as watching,
        subprocess.Popen(job, env=environment, stdout=subprocess.DEVNULL) as training,
    ):
        try:
            address = re.search(r"http://\S+", watching.stdout.readline())[0]
            wait_until(address, lambda now: now["last"].get("step", 0) > 900)
            (run / "stall").touch()
            wait_until(address, lambda now: now["verdict"])
            command = [
                BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--window-size=1180,920", "--virtual-time-budget=1500",
                f"--screenshot={picture}", address,
            ]  # fmt: skip
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=LIMIT)
        finally:
            for process in (training, watching):
                process.send_signal(signal.SIGINT)


if __name__ == "__main__":
    target = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        draw(target)
