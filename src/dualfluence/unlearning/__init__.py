"""Requests to a fitted model, their ledger, certified removal and verification."""

from ._desk import Answer as Answer
from ._desk import Desk as Desk
from ._desk import open as open
from ._documents import sign_documents as sign_documents
from ._documents import write_documents as write_documents
from ._engine import Engine as Engine
from ._ledger import Ledger as Ledger
from ._ledger import LedgerError as LedgerError
from ._ledger import erase_references as erase_references
from ._metrics import klom as klom
from ._metrics import margins as margins
from ._metrics import membership_auc as membership_auc
from ._removal import BudgetSpent as BudgetSpent
from ._removal import Published as Published
from ._removal import Publisher as Publisher
from ._removal import delta_of as delta_of
from ._removal import epsilon_of as epsilon_of
from ._removal import mu_of as mu_of
from ._removal import sigma_of as sigma_of
from ._verify import Report as Report
from ._verify import verify as verify
