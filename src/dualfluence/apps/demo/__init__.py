"""The demo: one network, six removals, every method side by side, one page."""

from ._page import percent as percent
from ._page import write_page as write_page
from ._run import METHODS as METHODS
from ._run import run_demo as run_demo
