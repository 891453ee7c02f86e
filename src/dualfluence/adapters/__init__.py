"""Models of other frameworks: one call takes a model, another gives it back. Frameworks are imported
when used."""

from typing import TYPE_CHECKING, Any

from ._adapted import Adapted as Adapted
from ._adapted import need
from ._equinox import from_equinox as from_equinox
from ._from_sklearn import from_sklearn as from_sklearn
from ._from_sklearn import to_sklearn as to_sklearn
from ._haiku import from_haiku as from_haiku
from ._keras import from_keras as from_keras
from ._linen import from_linen as from_linen
from ._nnx import from_nnx as from_nnx
from ._records import adam_record as adam_record
from ._records import sgd_record as sgd_record
from ._text import HashedText as HashedText
from ._tokenised import tokenised as tokenised
from ._torch import from_torch as from_torch

if TYPE_CHECKING:
    from ._sklearn import DualInfluenceClassifier as DualInfluenceClassifier
    from ._sklearn import DualInfluenceRegressor as DualInfluenceRegressor

_ESTIMATORS = ("DualInfluenceClassifier", "DualInfluenceRegressor")


def __getattr__(name: str) -> Any:
    """Estimators are classes of scikit-learn, which is imported when the first one is used."""
    if name not in _ESTIMATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    need("sklearn", f"adapters.{name}", "sklearn")
    from . import _sklearn

    return getattr(_sklearn, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_ESTIMATORS])
