"""The settings of every experiment, as published and at smoke scale. Nothing here computes."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from ..compare._networks import Architecture

Scale = Literal["smoke", "paper"]
SCALES: tuple[Scale, ...] = ("smoke", "paper")
NAMES = ("fig1", "fig2", "fig3", "fig4", "linear", "linear-ten")


@dataclass(frozen=True)
class Data:
    """A balanced part of a data set.

    - `dataset`: name for `datasets.load`.
    - `classes`: labels to take.
    - `per_class_train`, `per_class_test`: points of each class; for test points, `None` means as many
      as the rarest class has.
    """

    dataset: str
    classes: tuple[int, ...]
    per_class_train: int
    per_class_test: int | None

    @property
    def two_class(self) -> bool:
        """Two classes become one output with targets −1/+1."""
        return len(self.classes) == 2


@dataclass(frozen=True)
class Training:
    """Full-batch gradient descent as published.

    - `loss`: by name.
    - `ridge`: λ.
    - `rate`, `epochs`, `momentum`: of the descent.
    """

    loss: Literal["softmax", "squared"]
    ridge: float
    rate: float
    epochs: int
    momentum: float = 0.0


@dataclass(frozen=True)
class Row:
    """A model and its data: one row of panels.

    - `name`: key in results.
    - `data`, `network`, `training`: the model and its training.
    - `remove_from`: the class that loses points; `None` for all classes.
    """

    name: str
    data: Data
    network: Architecture
    training: Training
    remove_from: int | None = None


@dataclass(frozen=True, kw_only=True)
class Methods:
    """Settings of the methods.

    - `cg_steps`, `cg_rtol`: iterations and relative residual of the published methods.
    - `until`: certified distance of our iterated form, over the norm of the parameters.
    - `matmul_precision`: of every matrix product, as JAX names it.
    """

    cg_steps: int = 500
    cg_rtol: float = 1e-8
    until: float = 1e-7
    matmul_precision: str = "highest"


@dataclass(frozen=True)
class Fig1(Methods):
    """Unlearning from two linearised networks.

    - `rows`: the networks.
    - `percentages`: shares of points to remove.
    - `repeats`: timed calls of every method.
    - `released_repeats`: timed calls of the methods as released; 0 leaves them out.
    - `cold`: whether first calls are timed in new processes too.
    - `seeds`: further seeds of networks and removals, at which distances and accuracies of the models
      trained as published are measured too.
    """

    rows: tuple[Row, ...]
    percentages: tuple[int, ...] = (10, 30, 50, 70, 90)
    repeats: int = 5
    released_repeats: int = 1
    cold: bool = True
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fig2:
    """A network beside its linearisation while both train.

    - `data`, `network`: the model that is trained.
    - `ridges`: values of the ridge; each gives one trajectory.
    - `rate`, `epochs`: of the descent.
    - `record_every`: epochs between records; `None` records every epoch to the 50th and then about every
      2 %, which leaves no gaps on a logarithmic axis.
    - `seeds`: further initialisations, followed at the largest ridge.
    - `matmul_precision`: of every matrix product, as JAX names it.
    """

    data: Data
    network: Architecture
    ridges: tuple[float, ...]
    rate: float
    epochs: int
    record_every: int | None
    seeds: tuple[int, ...] = ()
    matmul_precision: str = "highest"


@dataclass(frozen=True)
class Fig3(Methods):
    """Unlearning from the nonlinear network of fig. 2; fields as in `Fig2` and `Fig1`.

    - `seeds`: further seeds of networks and removals.
    """

    data: Data
    network: Architecture
    ridges: tuple[float, ...]
    rate: float
    epochs: int
    record_every: int
    percentages: tuple[int, ...] = (10, 30, 50, 70, 90)
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fig4(Methods):
    """Estimated against actual changes of infinitely wide networks.

    - `rows`: the networks.
    - `remove_percent`: share of every class to remove.
    - `num_queries`: test points at which changes are compared.
    - `seeds`: further seeds of removals and queries.
    """

    rows: tuple[Row, ...]
    remove_percent: int = 50
    num_queries: int = 10
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Linear(Methods):
    """The linear model of the authors' repository: a readout of random ReLU features, a ridge on `‖θ‖²`.

    - `data`, `num_features`: the points, and the features that replace their pixels.
    - `training`: gradient descent from a random readout, bias included.
    - `percentages`: shares of every class to remove.
    - `repeats`: timed calls of every method after its first.
    """

    data: Data
    num_features: int
    training: Training
    percentages: tuple[int, ...] = (10, 30, 50, 70, 90)
    repeats: int = 5


@dataclass(frozen=True)
class LinearTen(Methods):
    """Ten classes on random ReLU features with a ridge on `‖θ‖²`, trained to the optimum: our addition.

    - `data`: the points whose features are used.
    - `num_features`: their number.
    - `ridge`: λ.
    - `percentages`: shares of points to remove.
    """

    data: Data
    num_features: int
    ridge: float
    percentages: tuple[int, ...] = (10, 30, 50, 70, 90)


@dataclass(frozen=True, kw_only=True)
class Minibatches:
    """Descent with minibatches, momentum and a rate that decays.

    - `loss`, `ridge`, `rate`, `epochs`, `momentum`: as in `Training`.
    - `batch_size`: points of a batch; `None` for all of them.
    - `decay_steps`, `decay_rate`: after every `decay_steps` steps the rate is `decay_rate` times as large.
    """

    loss: Literal["softmax", "squared"]
    ridge: float
    rate: float
    epochs: int
    momentum: float = 0.0
    batch_size: int | None = None
    decay_steps: int = 1
    decay_rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Own(Methods):
    """An experiment of one's own.

    - `data`, `network`, `training`: the model and its training.
    - `forget`: sets to forget; each names classes and the percentage of each that goes.
    - `linearised`: train the linearisation of the network instead of the network.
    - `repeats`: timed calls of every method after its first.
    """

    data: Data
    network: Architecture
    training: Minibatches
    forget: tuple[tuple[tuple[int, float], ...], ...]
    linearised: bool = False
    repeats: int = 3

    def __post_init__(self) -> None:
        check_kinds(self.network.kind, self.training.loss)
        if len(self.data.classes) < 2:
            raise ValueError("experiment: at least two classes are needed, e.g. (3, 8).")
        if self.data.two_class and self.training.loss == "softmax":
            raise ValueError(
                "experiment: two classes become one output with targets -1/+1, which softmax cannot take. "
                "Choose loss='squared', or a third class."
            )
        if not self.forget:
            raise ValueError("experiment: name at least one set to forget, e.g. ((3, 10.0),).")
        for label, percent in (pair for each in self.forget for pair in each):
            if label not in self.data.classes:
                raise ValueError(
                    f"experiment: cannot forget class {label}; the data have {self.data.classes}."
                )
            if not 0 < percent < 100:
                raise ValueError(
                    f"experiment: percentages must lie between 0 and 100, got {percent:g}."
                )


def check_kinds(network: str, loss: str) -> None:
    """An error for a network or a loss that there is not."""
    for what, value, choices in (
        ("network", network, ("fcnn", "cnn")),
        ("loss", loss, ("squared", "softmax")),
    ):
        if value not in choices:
            raise ValueError(f"experiment: {what} must be one of {choices}, got {value!r}.")


OWN = "own"
"""Name of the results of an experiment of one's own."""

Config = Own | Fig1 | Fig2 | Fig3 | Fig4 | Linear | LinearTen

DIGITS = tuple(range(10))
SMOKE_PERCENTAGES = (10, 50, 90)

_MNIST = Data("mnist-small", DIGITS, 200, 200)
_CIFAR = Data("cifar10", (0, 1), 1000, 1000)
_THREE_EIGHT = Data("mnist", (3, 8), 5000, None)
_SMALL_THREE_EIGHT = Data("mnist-small", (3, 8), 100, 200)
_FCNN = Row("fcnn", _MNIST, Architecture("fcnn", 3, 1024), Training("softmax", 1e-2, 0.1, 4000))
_CNN = Row("cnn", _CIFAR, Architecture("cnn", 3, 128), Training("squared", 1e-1, 0.1, 500, 0.9), 0)
_FIG2 = Fig2(
    _THREE_EIGHT,
    Architecture("fcnn", 2, 2048),
    ridges=(1e-1, 1e-2, 1e-3, 1e-4),
    rate=0.1,
    epochs=4000,
    record_every=None,
    seeds=(0, 1, 2, 3),
)


def _wide(digits: Data, images: Data, *, epochs: int) -> Fig4:
    """Two infinitely wide networks; `epochs` are those of the first."""
    fcnn, cnn = Architecture("fcnn", 3, None), Architecture("cnn", 3, None)
    first = Row("fcnn", digits, fcnn, Training("softmax", 1e-1, 0.1, epochs))
    return Fig4((first, Row("cnn", images, cnn, Training("squared", 1e-1, 0.01, 5000))))


CONFIGS: dict[tuple[str, str], Config] = {
    ("fig1", "paper"): Fig1((_FCNN, _CNN), released_repeats=5),
    ("fig1", "smoke"): Fig1(
        (
            replace(
                _FCNN,
                data=Data("mnist-small", DIGITS, 12, 20),
                network=Architecture("fcnn", 3, 128),
                training=Training("softmax", 1e-2, 0.1, 2000),
            ),
            replace(
                _CNN,
                data=Data("cifar10", (0, 1), 50, 50),
                network=Architecture("cnn", 3, 8),
                training=Training("squared", 1e-1, 0.1, 500, 0.9),
            ),
        ),
        percentages=SMOKE_PERCENTAGES,
        repeats=3,
        cg_steps=100,
    ),
    ("fig2", "paper"): _FIG2,
    ("fig2", "smoke"): replace(
        _FIG2,
        data=_SMALL_THREE_EIGHT,
        network=Architecture("fcnn", 2, 256),
        epochs=1000,
        record_every=None,
        seeds=(0, 1, 2),
    ),
    ("fig3", "paper"): Fig3(
        _THREE_EIGHT, Architecture("fcnn", 2, 2048), (1e-2, 1e-4), 0.1, 4000, 40
    ),
    ("fig3", "smoke"): Fig3(
        _SMALL_THREE_EIGHT,
        Architecture("fcnn", 2, 256),
        (1e-2, 1e-4),
        0.1,
        1000,
        50,
        percentages=SMOKE_PERCENTAGES,
        cg_steps=100,
    ),
    ("fig4", "paper"): _wide(
        Data("mnist", DIGITS, 1000, 100), Data("cifar10", (0, 1), 500, 500), epochs=5000
    ),
    ("fig4", "smoke"): _wide(
        Data("mnist-small", DIGITS, 40, 20), Data("cifar10", (0, 1), 12, 20), epochs=2000
    ),
    ("linear", "paper"): Linear(
        data=_THREE_EIGHT, num_features=20000, training=Training("squared", 1e-3, 1.0, 10000)
    ),
    ("linear", "smoke"): Linear(
        data=_SMALL_THREE_EIGHT,
        num_features=2000,
        training=Training("squared", 1e-3, 1.0, 10000),
        percentages=SMOKE_PERCENTAGES,
        repeats=2,
    ),
    ("linear-ten", "paper"): LinearTen(_MNIST, 20000, 1e-2),
    ("linear-ten", "smoke"): LinearTen(
        Data("mnist-small", DIGITS, 12, 20),
        2000,
        1e-2,
        percentages=SMOKE_PERCENTAGES,
        cg_steps=100,
    ),
}


def configure(name: str, scale: str, overrides: dict[str, Any] | None = None) -> Config:
    """The configuration of an experiment, with some fields replaced.

    `epochs` reaches every training in it, and `per_class` the training points of every class. A field
    that the experiment does not have is skipped, so that
    one set of overrides works for all experiments.
    """
    if name not in NAMES:
        raise ValueError(
            f"reproduce: no experiment {name!r}; there are {', '.join(NAMES)} and all."
        )
    if scale not in SCALES:
        raise ValueError(f"reproduce: scale must be one of {SCALES}, got {scale!r}.")
    config = CONFIGS[name, scale]
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    epochs, per_class = given.pop("epochs", None), given.pop("per_class", None)
    known = {field.name for field in fields(config)}
    config = replace(config, **{key: value for key, value in given.items() if key in known})
    percentages = getattr(config, "percentages", (50,))
    if not percentages or not all(0 < percent < 100 for percent in percentages):
        raise ValueError(f"reproduce: percentages must lie between 1 and 99, got {percentages}.")
    seeds = getattr(config, "seeds", ())
    if any(seed < 0 for seed in seeds):
        raise ValueError(f"reproduce: seeds must not be negative, got {seeds}.")
    if per_class is not None:
        config = _with_data(config, per_class)
    return config if epochs is None else _with_epochs(config, epochs)


def _with_data(config: Config, per_class: int) -> Config:
    """The configuration with that many training points of each class."""
    fewer = lambda data: replace(data, per_class_train=per_class)  # noqa: E731
    if isinstance(config, Fig1 | Fig4):
        rows = tuple(replace(row, data=fewer(row.data)) for row in config.rows)
        return replace(config, rows=rows)
    return replace(config, data=fewer(config.data))


def _with_epochs(config: Config, epochs: int) -> Config:
    """The configuration with that many epochs in every training."""
    if isinstance(config, Fig1 | Fig4):
        rows = tuple(replace(r, training=replace(r.training, epochs=epochs)) for r in config.rows)
        return replace(config, rows=rows)
    if isinstance(config, Linear):
        return replace(config, training=replace(config.training, epochs=epochs))
    if isinstance(config, LinearTen | Own):
        return config
    return replace(config, epochs=epochs)


def as_json(config: Config) -> dict[str, Any]:
    """The configuration as plain values."""
    return asdict(config)
