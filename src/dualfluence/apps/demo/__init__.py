"""The demo: the effects of digits, wrong labels, and removals by every method, on one page."""

from ._page import gain_in_words as gain_in_words
from ._page import percent as percent
from ._page import write_page as write_page
from ._run import METHODS as METHODS
from ._run import run_demo as run_demo
