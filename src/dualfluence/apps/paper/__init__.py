"""The experiments of Sun and Valaee, "Extending Kernel Trick to Influence Functions".

`remove` solves the paper's own systems, for comparison. `reproduce` runs the experiments, draws the
paper's figures and compares with the published values. `experiment` does so for a network, data and sets
to forget of one's own.
"""

from ._config import NAMES as NAMES
from ._config import SCALES as SCALES
from ._config import Data as Data
from ._config import Minibatches as Minibatches
from ._config import Own as Own
from ._forms import AbstractPaperForm as AbstractPaperForm
from ._forms import PaperCG as PaperCG
from ._forms import PaperDirect as PaperDirect
from ._forms import PaperFull as PaperFull
from ._full_data import FullDataHessian as FullDataHessian
from ._remove import remove as remove
from ._reproduce import experiment as experiment
from ._reproduce import reproduce as reproduce
