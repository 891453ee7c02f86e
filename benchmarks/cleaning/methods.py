"""Ways to rank labels by how suspicious they are, each with its own threshold where it has one.

All get the same features. A base model is chosen once for each data set by the log loss (the error, for
numbers) of cross-validation on noisy labels, on points and errors of a seed that is not reported.
"""

import time
import warnings
from dataclasses import dataclass

import numpy as np
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores
from cleanlab.regression.rank import get_label_quality_scores as quality_of_numbers
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifier
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_predict
from sklearn.neighbors import NearestNeighbors
from sklearn.svm import SVC, SVR

import dualfluence as dfl

FOLDS, NEIGHBOURS = 5, 10
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
"""Tried for the linear model: `C` of the logistic regression, `1/alpha` of the ridge regression."""

STIFFNESS = (30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0, 30_000.0)
"""Tried for `alpha` of the ridge model that `audit` is given where errors come in batches."""

OURS = "dualfluence.audit"
STIFF = "dualfluence.audit, stiff model"
SAME = "confident learning, linear"
STRONG = "confident learning, strong"
KNN, LOSS, MARGIN = "nearest neighbours", "loss of one fit", "margin of one fit"

warnings.filterwarnings("ignore", category=ConvergenceWarning)
warnings.filterwarnings("ignore", message="The least populated class")


@dataclass(frozen=True)
class Found:
    """A rank for every point, the points flagged by a threshold of the method's own, and what it cost.

    `wrong`: the stated probability that each label is wrong, `None` where a method has none.
    """

    suspicion: np.ndarray
    flagged: np.ndarray | None
    wrong: np.ndarray | None
    seconds: float
    cpu_seconds: float


def linear_models(is_classes):
    if is_classes:
        return {f"logistic, C {c:g}": LogisticRegression(C=c, max_iter=200) for c in PENALTIES}
    return {f"ridge, alpha {1 / c:g}": Ridge(alpha=1 / c) for c in PENALTIES}


def strong_models(is_classes, columns):
    """Boosting only on tables: with ten classes and hundreds of columns it takes a minute a fit."""
    if is_classes:
        models = {
            "random forest": RandomForestClassifier(200, random_state=0),
            "SVM": CalibratedClassifierCV(SVC(), cv=3, ensemble=False),
        }
        if columns < 50:
            models["boosting"] = HistGradientBoostingClassifier(random_state=0)
        return models
    return {
        "random forest": RandomForestRegressor(200, random_state=0),
        "SVM, C 50": SVR(C=50.0),
        "boosting": HistGradientBoostingRegressor(random_state=0),
    }


def left_out(model, x, y, seed):
    """Predictions at every point by the model of the folds that it is not in."""
    folds = StratifiedKFold if y.dtype.kind == "i" else KFold
    split = folds(FOLDS, shuffle=True, random_state=seed)
    method = "predict_proba" if y.dtype.kind == "i" else "predict"
    return cross_val_predict(model, x, y, cv=split, method=method)


def error_of(predicted, y):
    if y.dtype.kind == "i":
        return float(-np.mean(np.log(np.maximum(predicted[np.arange(len(y)), y], 1e-12))))
    return float(np.mean((predicted - y) ** 2))


def choose(models, case):
    """The model of least cross-validated error on the labels as given, and the errors of all."""
    errors = {
        name: error_of(left_out(model, case.x, case.given, 0), case.given)
        for name, model in models.items()
    }
    return min(errors, key=lambda name: errors[name]), errors


def ours(case):
    task = "classification" if case.given.dtype.kind == "i" else "regression"
    found = dfl.audit(None, case.x, case.given, task=task)
    return found.suspicion, found.flagged, found.wrong


def stiff(alpha):
    """`audit` of a linear model with a large penalty, which five near points do not bend."""

    def find(case):
        model = (RidgeClassifier if case.given.dtype.kind == "i" else Ridge)(alpha=alpha)
        found = dfl.audit(model, case.x, case.given)
        return found.suspicion, found.flagged, found.wrong

    return find


def confident_learning(model, seed):
    def find(case):
        y = case.given
        predicted = left_out(model, case.x, y, seed)
        if y.dtype.kind == "f":
            return -quality_of_numbers(y, predicted), None, None
        flagged = np.flatnonzero(find_label_issues(y, predicted, n_jobs=1))
        quality = get_label_quality_scores(y, predicted)
        return -quality, flagged, 1 - quality

    return find


def nearest_neighbours(case):
    """The share of the ten nearest with another label, near ones first; the distance from their mean."""
    near = NearestNeighbors(n_neighbors=NEIGHBOURS).fit(case.x)
    apart, at = near.kneighbors()
    weight = 1 / np.maximum(apart, 1e-9)
    weight /= weight.sum(axis=1, keepdims=True)
    labels = case.given[at]
    if labels.dtype.kind == "i":
        return np.sum(weight * (labels != case.given[:, None]), axis=1), None, None
    return np.abs(case.given - np.sum(weight * labels, axis=1)), None, None


def one_fit(model, by):
    def find(case):
        y = case.given
        if y.dtype.kind == "f":
            return np.abs(y - model.fit(case.x, y).predict(case.x)), None, None
        p = model.fit(case.x, y).predict_log_proba(case.x)
        own = p[np.arange(len(y)), y]
        if by == LOSS:
            return -own, None, None
        others = p.copy()
        others[np.arange(len(y)), y] = -np.inf
        return np.exp(others.max(axis=1)) - np.exp(own), None, None

    return find


def methods(linear, strong, alpha, seed, is_classes):
    """By name, a function of a case."""
    found = {
        OURS: ours,
        STIFF: stiff(alpha),
        SAME: confident_learning(linear, seed),
        STRONG: confident_learning(strong, seed),
        KNN: nearest_neighbours,
        LOSS: one_fit(linear, LOSS),
    }
    return found | {MARGIN: one_fit(linear, MARGIN)} if is_classes else found


def run(method, case):
    wall, cpu = time.perf_counter(), time.process_time()
    suspicion, flagged, wrong = method(case)
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    return Found(np.asarray(suspicion, float), flagged, wrong, *seconds)
