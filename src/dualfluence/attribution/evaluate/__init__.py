"""Evaluation of scores, of any method: measures, retrained truth, noise ceilings."""

from ._measures import Measured as Measured
from ._measures import lds as lds
from ._measures import loo_correlation as loo_correlation
from ._measures import mislabel_auc as mislabel_auc
from ._measures import noise_ceiling as noise_ceiling
from ._plots import plot_measured as plot_measured
from ._plots import plot_removal as plot_removal
from ._removal import RemovalCurve as RemovalCurve
from ._removal import removal_curve as removal_curve
from ._truth import Truth as Truth
from ._truth import random_masks as random_masks
from ._truth import retrain_linearised as retrain_linearised
from ._truth import retrain_networks as retrain_networks
