"""The limits of tests, which guard against hangs: they stretch with the load of the machine.

A test has its limit in seconds if its cores are free, and as many times longer as there are
processes for each core. The load is read only when the limit has passed, and again at the end of
each extension. So a test that hangs ends soon after the others have.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import pytest_timeout

from mpishard.cli.machine import usable_cores


def load_per_core() -> float:
    """Processes that ran or wanted to run in the last minute, for each core of this process."""
    return os.getloadavg()[0] / usable_cores()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    """Set the timer of a test in the place of pytest-timeout, with its two methods."""
    started = time.monotonic()

    def left() -> float:
        allowed = settings.timeout * max(1.0, load_per_core())
        return allowed - (time.monotonic() - started)

    def ended():
        return settings._replace(timeout=round(time.monotonic() - started, 1))

    if settings.method == "thread" or threading.current_thread() is not threading.main_thread():
        is_over = threading.Event()

        def watch():
            seconds = settings.timeout
            while seconds > 0:
                if is_over.wait(seconds):
                    return
                seconds = left()
            pytest_timeout.timeout_timer(item, ended())

        watcher = threading.Thread(target=watch, name=f"limit of {item.nodeid}", daemon=True)
        watcher.start()

        def cancel():
            is_over.set()
            watcher.join()

    else:

        def ring(*_):
            __tracebackhide__ = True
            seconds = left()
            if seconds > 0:
                signal.setitimer(signal.ITIMER_REAL, seconds)
            else:
                pytest_timeout.timeout_sigalrm(item, ended())

        def cancel():
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    item.cancel_timeout = cancel
    return True
