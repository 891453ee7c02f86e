"""The problem that is solved: training set, edits, objective, certificate."""

from ._certificate import Certificate as Certificate
from ._edits import AbstractEdit as AbstractEdit
from ._edits import Add as Add
from ._edits import Relabel as Relabel
from ._edits import Remove as Remove
from ._edits import Replace as Replace
from ._edits import Reweight as Reweight
from ._objective import Problem as Problem
from ._objective import State as State
from ._objective import TrainingSet as TrainingSet
