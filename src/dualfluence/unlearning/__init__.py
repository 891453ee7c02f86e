"""Requests to a fitted model, their ledger, certified removal and verification."""

from ._desk import Answer as Answer
from ._desk import Desk as Desk
from ._desk import open as open
from ._engine import Engine as Engine
from ._ledger import Ledger as Ledger
from ._ledger import LedgerError as LedgerError
