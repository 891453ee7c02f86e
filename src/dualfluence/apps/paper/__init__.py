"""The experiments of Sun and Valaee, "Extending Kernel Trick to Influence Functions".

`reproduce` runs them, draws the paper's figures and compares with the published values.
"""

from ._config import NAMES as NAMES
from ._config import SCALES as SCALES
from ._reproduce import reproduce as reproduce
