"""Models of other frameworks: one call in, one call back. Frameworks are imported when used."""

from ._adapted import Adapted as Adapted
from ._equinox import from_equinox as from_equinox
from ._haiku import from_haiku as from_haiku
from ._keras import from_keras as from_keras
from ._linen import from_linen as from_linen
from ._nnx import from_nnx as from_nnx
from ._records import sgd_record as sgd_record
from ._torch import from_torch as from_torch
