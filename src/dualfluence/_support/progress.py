"""Progress with time left, for work that takes more than two seconds."""

import sys
import time
from collections.abc import Callable

ProgressFn = Callable[[int, int, str], None]
"""Called as `progress(done, total, label)`."""

QUIET_SECONDS = 2.0
REDRAW_SECONDS = 0.2


class Ticker:
    """Counts finished units of work and reports how much time is left.

    **Arguments:**

    - `total`: number of units.
    - `label`: what the work is, e.g. `"kernel tiles"`.
    - `progress`: `True` writes one line to standard error once the work has taken two seconds
      (only on a terminal), `False` is silent, a function is called after every unit.
    """

    def __init__(self, total: int, label: str, progress: bool | ProgressFn = True) -> None:
        self.total, self.label, self.done = total, label, 0
        self._callback = progress if callable(progress) else None
        self._draws = progress is True and sys.stderr.isatty()
        self._start = time.monotonic()
        self._drawn = 0.0

    def tick(self, units: int = 1) -> None:
        """Record `units` more finished units."""
        self.done += units
        if self._callback is not None:
            self._callback(self.done, self.total, self.label)
        now = time.monotonic()
        late = now - self._start > QUIET_SECONDS and now - self._drawn > REDRAW_SECONDS
        if self._draws and late:
            self._drawn = now
            left = (now - self._start) / self.done * (self.total - self.done)
            line = f"{self.label}: {self.done}/{self.total}, {left:.0f} s left"
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "Ticker":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
