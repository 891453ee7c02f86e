"""The experiments of Sun and Valaee, "Extending Kernel Trick to Influence Functions".

`remove` solves the paper's own systems, for comparison. `_reproduce.reproduce` runs the experiments,
draws the paper's figures and compares with the published values.
"""

from ._config import NAMES as NAMES
from ._config import SCALES as SCALES
from ._forms import AbstractPaperForm as AbstractPaperForm
from ._forms import PaperCG as PaperCG
from ._forms import PaperDirect as PaperDirect
from ._forms import PaperFull as PaperFull
from ._remove import remove as remove
from ._reproduce import reproduce as reproduce
