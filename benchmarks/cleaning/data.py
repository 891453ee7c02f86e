"""Data sets with a clean test set, and errors of three kinds planted in the training labels."""

import gzip
from dataclasses import dataclass

import numpy as np
from sklearn import datasets

import dualfluence as dfl

SHARE = 0.1
"""Of the training labels that are made wrong."""

GROUP = 5
"""Points that go wrong together with `neighbourhood`: a point and its four nearest of the same class."""

TEXT_COLUMNS = 1024
"""Of `HashedText`, the features of all methods on text."""


@dataclass(frozen=True)
class Pool:
    """All points of a data set, before any is drawn.

    - `x`, `y`: points to train on; `x_test`, `y_test`: `None` where a test set is drawn from them too.
    - `train`, `test`: how many are drawn; `chosen_on`: on how many base models are chosen.
    - `by_column`: whether the columns have scales of their own, as those of a table have.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    train: int
    test: int
    chosen_on: int
    by_column: bool = False
    x_test: np.ndarray | None = None
    y_test: np.ndarray | None = None

    @property
    def is_classes(self):
        return self.y.dtype.kind == "i"


@dataclass(frozen=True)
class Case:
    """Drawn points: what is given, what is true, and which labels were made wrong."""

    x: np.ndarray
    given: np.ndarray
    truth: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @property
    def wrong(self):
        return self.given != self.truth


def of_table(name, loaded, train, chosen_on):
    y = loaded.target
    y = y.astype(float) if name == "diabetes" else y.astype(int)
    x = np.asarray(loaded.data, float)
    return Pool(name, x, y, train, len(y) - train, chosen_on, name != "digits")


def of_images(name, data, train, test, chosen_on):
    flat = lambda a: np.asarray(a).reshape(len(a), -1)  # noqa: E731
    labels = [np.asarray(y).astype(int) for y in (data.y_train, data.y_test)]
    x, x_test = flat(data.x_train), flat(data.x_test)
    return Pool(name, x, labels[0], train, test, chosen_on, x_test=x_test, y_test=labels[1])


def read_descriptions(folder, part):
    with gzip.open(folder / "debian-descriptions" / f"{part}.tsv.gz", "rt") as file:
        rows = [line.rstrip("\n").split("\t", 1) for line in file]
    return [row[1] for row in rows], np.array([row[0] for row in rows])


def of_texts(folder, train, test, chosen_on):
    encode = dfl.adapters.HashedText(TEXT_COLUMNS)
    (texts, names), (asked, asked_names) = (read_descriptions(folder, p) for p in ("train", "test"))
    classes, y = np.unique(names, return_inverse=True)
    y_test = np.searchsorted(classes, asked_names[:test])
    x, x_test = encode(texts), encode(asked[:test])
    return Pool("descriptions", x, y, train, test, chosen_on, False, x_test, y_test)


def pools(folder, smoke, wanted=None):
    """By name, those whose data are there. `--smoke` has few points and needs no file."""
    n, test, chosen_on, words = (150, 300, 150, 150) if smoke else (500, 1000, 800, 600)
    cancer, diabetes = min(n, 400), min(n, 330)
    load = dfl.datasets.load
    sets = {
        "digits": lambda name: of_table(name, datasets.load_digits(), n, chosen_on),
        "mnist": lambda name: of_images(name, load(name, data_dir=folder), n, test, chosen_on),
        "mnist-small": lambda name: of_images(name, load(name), n, test, chosen_on),
        "breast cancer": lambda name: of_table(
            name, datasets.load_breast_cancer(), cancer, min(chosen_on, cancer)
        ),
        "diabetes": lambda name: of_table(
            name, datasets.load_diabetes(), diabetes, min(chosen_on, diabetes)
        ),
        "descriptions": lambda name: of_texts(folder, words, 2 * test, 2 * words),
    }
    if folder is None:
        del sets["mnist"], sets["descriptions"]
    return {name: make(name) for name, make in sets.items() if wanted is None or name in wanted}


def draw_case(pool, kind, seed, train=None):
    """Points and errors by seed; `kind` `None` plants none."""
    rng = np.random.default_rng([seed, sum(map(ord, pool.name))])
    order, train = rng.permutation(len(pool.y)), train or pool.train
    rows, rest = order[:train], order[train : train + pool.test]
    x, y = np.asarray(pool.x[rows], float), pool.y[rows]
    if pool.x_test is None:
        x_test, y_test = pool.x[rest], pool.y[rest]
    else:
        x_test, y_test = pool.x_test[: pool.test], pool.y_test[: pool.test]
    view = scaling(x, pool.by_column)
    x, x_test = view(x), view(np.asarray(x_test, float))
    given = y if kind is None else PLANT[pool.is_classes][kind](x, y, rng)
    return Case(x, given, y, x_test, y_test)


def scaling(x, by_column):
    """One scale for pixels and words, one for each column of a table; the same features for all methods."""
    if by_column:
        centre, size = x.mean(axis=0), x.std(axis=0)
        return lambda points: (points - centre) / np.where(size > 0, size, 1)
    size = np.sqrt(np.mean(x**2))
    return lambda points: points / size


def uniform(x, y, rng):
    """Another class, any one."""
    given, c = y.copy(), int(y.max()) + 1
    at = rng.permutation(len(y))[: round(SHARE * len(y))]
    given[at] = (y[at] + rng.integers(1, c, len(at))) % c
    return given


def by_pair(x, y, rng):
    """Every class is mistaken for one other class."""
    given, c = y.copy(), int(y.max()) + 1
    circle = rng.permutation(c)
    partner = np.empty(c, int)
    partner[circle] = np.roll(circle, 1)
    at = rng.permutation(len(y))[: round(SHARE * len(y))]
    given[at] = partner[y[at]]
    return given


def groups_of_neighbours(x, y, rng):
    """Disjoint groups of near points of one class (of any, for numbers), a share of all points together."""
    taken = np.zeros(len(y), bool)
    for centre in rng.permutation(len(y)):
        if taken.sum() >= round(SHARE * len(y)):
            return
        same = ~taken & ((y == y[centre]) if y.dtype.kind == "i" else True)
        if taken[centre]:
            continue
        apart = np.where(same, np.sum((x - x[centre]) ** 2, axis=1), np.inf)
        group = np.argsort(apart, kind="stable")[:GROUP]
        group = group[np.isfinite(apart[group])]
        taken[group] = True
        yield group


def by_neighbourhood(x, y, rng):
    """Five near points of one class carry the same wrong label: they support each other."""
    given, c = y.copy(), int(y.max()) + 1
    for group in groups_of_neighbours(x, y, rng):
        given[group] = (y[group] + rng.integers(1, c)) % c
    return given


def swapped(x, y, rng):
    """The number of another point, at least one standard deviation away."""
    given = y.copy()
    for i in rng.permutation(len(y))[: round(SHARE * len(y))]:
        given[i] = rng.choice(y[np.abs(y - y[i]) > np.std(y)])
    return given


def shifted_together(x, y, rng):
    """Five near points are one and a half standard deviations off, all in the same direction."""
    given = y.copy()
    for group in groups_of_neighbours(x, y, rng):
        given[group] = y[group] + rng.choice([-1.5, 1.5]) * np.std(y)
    return given


PLANT = {
    True: {"uniform": uniform, "by class pair": by_pair, "by neighbourhood": by_neighbourhood},
    False: {"uniform": swapped, "by neighbourhood": shifted_together},
}
"""Kinds of errors, for classes and for numbers."""
