"""Influence functions, data attribution and unlearning in data space.

In flow order: linearise a model, fit it, edit its training set, read out what changed.
"""

from . import adapters as adapters
from . import attribution as attribution
from . import datasets as datasets
from . import infinite as infinite
from . import kernels as kernels
from . import losses as losses
from . import metrics as metrics
from . import operators as operators
from . import primal as primal
from . import solvers as solvers
from . import store as store
from . import unlearning as unlearning
from ._plan import PlanError as PlanError
from ._plan import plan as plan
from ._support.checks import NotFinite as NotFinite
from ._support.files import FileError as FileError
from ._version import __version__ as __version__
from .dual._descent import Descent as Descent
from .dual._descent import kernel_gradient_descent as kernel_gradient_descent
from .dual._fidelity import Fidelity as Fidelity
from .dual._fidelity import FidelityWarning as FidelityWarning
from .dual._fit import fit as fit
from .dual._fit import kernel_operator as kernel_operator
from .dual._fitted import Fitted as Fitted
from .dual._from_trained import from_trained as from_trained
from .dual._io import load as load
from .dual._record import NotConverged as NotConverged
from .dual._sketch import Sketch as Sketch
from .dual._update import Update as Update
from .kernels._linearized import Linearized as Linearized
from .kernels._linearized import linearize as linearize
from .losses import Convex as Convex
from .losses import Logistic as Logistic
from .losses import SoftmaxCrossEntropy as SoftmaxCrossEntropy
from .losses import SquaredError as SquaredError
from .models import Kernel as Kernel
from .models._low_rank import low_rank as low_rank
from .models._options import KernelOptions as KernelOptions
from .models._sources import PrecomputedKernel as PrecomputedKernel
from .operators import UnsupportedStructure as UnsupportedStructure
from .problem._certificate import Certificate as Certificate
from .problem._edits import Add as Add
from .problem._edits import Relabel as Relabel
from .problem._edits import Remove as Remove
from .problem._edits import Replace as Replace
from .problem._edits import Reweight as Reweight
from .solvers import CG as CG
from .solvers import Auto as Auto
from .solvers import Cholesky as Cholesky
