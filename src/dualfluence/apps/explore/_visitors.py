"""Sessions of several readers: each has its own edits, and all share the first model."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from ._session import Session

MOST = 32
"""Number of visits that are kept. Each may hold the edits of a session (`HELD_BYTES`) and a few scores."""

IDLE = 3600.0
"""Seconds after its last request until a visit is dropped."""


class VisitEnded(Exception):
    """A visit that has ended."""


class Visitors:
    """Visits by name; the one used last is at the end. Only the thread of the event loop may use it."""

    def __init__(
        self,
        first: Session,
        *,
        most: int = MOST,
        idle: float = IDLE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.first, self.most, self.idle, self._clock = first, most, idle, clock
        self._visits: OrderedDict[str, tuple[Session, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._visits)

    def begin(self) -> tuple[str, Session]:
        """A new visit and its name; the visit that was unused for longest may be dropped."""
        self._drop_idle()
        while len(self._visits) >= self.most:
            self._visits.popitem(last=False)
        name, session = secrets.token_urlsafe(18), self.first.another()
        self._visits[name] = session, self._clock()
        return name, session

    def find(self, name: str) -> Session:
        """The session of a visit; an error if it was dropped."""
        self._drop_idle()
        if name not in self._visits:
            raise VisitEnded(
                "This visit has ended and its edits are gone: the server keeps the last "
                f"{self.most} visits, each for {self.idle / 60:g} minutes after its last "
                "request, and none after a restart. Reload the page to start again."
            )
        session, _ = self._visits.pop(name)
        self._visits[name] = session, self._clock()
        return session

    def _drop_idle(self) -> None:
        oldest = self._clock() - self.idle
        while self._visits and next(iter(self._visits.values()))[1] < oldest:
            self._visits.popitem(last=False)
