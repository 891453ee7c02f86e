"""Influence functions, data attribution and unlearning in data space.

In flow order: linearise a model, fit it, edit its training set, read out what changed.
"""

from . import datasets as datasets
from . import infinite as infinite
from . import kernels as kernels
from . import losses as losses
from . import metrics as metrics
from . import operators as operators
from . import primal as primal
from . import solvers as solvers
from . import store as store
from ._edits import Add as Add
from ._edits import Relabel as Relabel
from ._edits import Remove as Remove
from ._edits import Replace as Replace
from ._edits import Reweight as Reweight
from ._fit import fit as fit
from ._fit import from_trained as from_trained
from ._fit import kernel_operator as kernel_operator
from ._fitted import Fitted as Fitted
from ._fitted import Update as Update
from ._gradient_descent import Descent as Descent
from ._gradient_descent import kernel_gradient_descent as kernel_gradient_descent
from ._io import load as load
from ._linearize import Linearized as Linearized
from ._linearize import linearize as linearize
from ._low_rank import low_rank as low_rank
from ._models import PrecomputedKernel as PrecomputedKernel
from ._newton import NotConverged as NotConverged
from ._plan import PlanError as PlanError
from ._plan import plan as plan
from ._problem import Certificate as Certificate
from ._version import __version__ as __version__
from .losses import Convex as Convex
from .losses import Logistic as Logistic
from .losses import SoftmaxCrossEntropy as SoftmaxCrossEntropy
from .losses import SquaredError as SquaredError
from .solvers import CG as CG
from .solvers import Auto as Auto
from .solvers import Cholesky as Cholesky
