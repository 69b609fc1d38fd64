"""How torch's threads on the CPU wait. Imported before torch."""

from __future__ import annotations

import os


def let_threads_sleep() -> None:
    """Limits how long torch's CPU threads spin while they wait for each other. Before torch is imported.

    By default they spin for milliseconds: where another process, or another instance, wants their core, every
    small convolution then takes 20 ms. What the user has set stays. Tuning and serving both call it, so that
    plans are timed as they are served.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
