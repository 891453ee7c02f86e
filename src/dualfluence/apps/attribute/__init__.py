"""Bodies of `dualfluence attribute` and `dualfluence audit`."""

from ._audit import audit as audit
from ._data import load_data as load_data
from ._data import load_model as load_model
from ._page import write_audit as write_audit
from ._page import write_queries as write_queries
from ._queries import explain as explain
