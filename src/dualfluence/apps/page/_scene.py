"""The content of the page: a fitted model, queries, and the form of their answers."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ...fitted._fitted import Fitted
from ...losses import Logistic, SoftmaxCrossEntropy
from ...problem._edits import targets_like

Kind = Literal["softmax", "binary", "number"]
"""Kinds of answers: probabilities of classes, of two classes from one output, or the outputs themselves."""


@dataclass(frozen=True, eq=False)
class Scene:
    """A model before any edit, and the queries of the page.

    - `name`: of the data.
    - `title`: the model in a few words.
    - `groups`: name of the group of every training point, if the data has groups.
    - `notes`: further facts for the reader.
    - `heading`: a heading for a report; the suspicious points then come first.
    """

    fitted: Fitted
    xq: np.ndarray
    yq: np.ndarray
    name: str
    title: str
    groups: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    heading: str | None = None

    @cached_property
    def kind(self) -> Kind:
        loss, targets = self.fitted.loss, np.asarray(self.fitted.data.targets)
        if isinstance(loss, SoftmaxCrossEntropy):
            return "softmax"
        binary = isinstance(loss, Logistic) and targets.shape[1:] == (1,)
        return "binary" if binary and np.isin(targets, (0, 1)).all() else "number"

    @property
    def num_classes(self) -> int:
        """Number of classes; zero if answers are numbers."""
        return {"softmax": self.fitted.num_outputs, "binary": 2, "number": 0}[self.kind]

    @cached_property
    def query_targets(self) -> jax.Array:
        fitted = self.fitted
        return targets_like(
            "queries", self.yq, fitted.data.targets, fitted.loss, fitted.num_outputs
        )

    def labels(self, targets: Any) -> list[Any]:
        """Targets in the form that the page shows: a class, a number, or a row of numbers."""
        array = np.asarray(targets)
        if self.kind == "softmax":
            return array.argmax(axis=1).tolist()
        if self.kind == "binary":
            return array[:, 0].astype(int).tolist()
        return (array[:, 0] if array.shape[1] == 1 else array).tolist()

    def answers(self, outputs: Any) -> np.ndarray:
        """Outputs in the form that the page shows: probabilities of the classes, or the outputs
        themselves."""
        outputs = jnp.asarray(outputs)
        if self.kind == "softmax":
            return np.asarray(jax.nn.softmax(outputs, axis=1))
        if self.kind == "binary":
            return np.asarray(
                jnp.concatenate([jax.nn.sigmoid(-outputs), jax.nn.sigmoid(outputs)], 1)
            )
        return np.asarray(outputs)

    def losses(self, outputs: Any) -> np.ndarray:
        """Loss of each query."""
        return np.asarray(self.fitted.loss.value(jnp.asarray(outputs), self.query_targets))

    @property
    def named_groups(self) -> dict[str, np.ndarray]:
        """Positions by group: the groups of the data, or the original classes; none for numbers."""
        if self.groups is not None:
            return {str(g): np.flatnonzero(self.groups == g) for g in np.unique(self.groups)}
        if self.kind == "number":
            return {}
        labels = np.asarray(self.labels(self.fitted.data.targets))
        return {f"class {k}": np.flatnonzero(labels == k) for k in np.unique(labels)}
