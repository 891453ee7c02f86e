"""Scores of training points for predictions: of exact models, of real networks, and checks of scores."""

from . import evaluate as evaluate
from ._attribution import Attribution as Attribution
from ._attribution import GroupAttribution as GroupAttribution
from ._attribution import Ranked as Ranked
from ._attribution import Top as Top
from ._audit_record import Audit as Audit
from ._audit_record import Finding as Finding
from ._probes import LeadingProbes as LeadingProbes
from ._probes import RandomProbes as RandomProbes
from ._ridge_path import RidgePath as RidgePath
from ._rivals import TRAK as TRAK
from ._rivals import GradCos as GradCos
from ._rivals import GradDot as GradDot
from ._rivals import TracIn as TracIn
from ._rivals import gradient_dot as gradient_dot
from ._trajectory import KAPPA as KAPPA
from ._trajectory import Trajectory as Trajectory
from ._trajectory import attribute_runs as attribute_runs
