"""Values of the paper, read from its figures (two RTX 3080 Ti), by quantity."""

SOURCE = "Sun and Valaee, Extending Kernel Trick to Influence Functions; two NVIDIA RTX 3080 Ti"
PERCENTAGES = (10, 30, 50, 70, 90)

# A pair (first, last) stands for a range over the percentages of which only the ends are given.
Ends = tuple[float, float]
Series = tuple[float, float, float, float, float]

FIG1: dict[str, dict[str, Series | Ends]] = {
    "fcnn": {
        "warm parameter space": (4.2, 3.6),
        "warm dual": (4.8, 3.4, 2.2, 1.5, 1.2),
        "cold dual": (9.3, 5.8),
        "distance dual": (7e-5, 3e-5, 1e-4, 9e-5, 5e-4),
        "forget accuracy": (0.756, 0.745, 0.729, 0.701, 0.622),
    },
    "cnn": {
        "warm parameter space": (2.9, 2.5),
        "warm dual": (0.5, 0.5),
        "cold dual": (2.9, 2.7),
        "distance dual": (4e-5, 1.5e-4),
        "distance parameter space": (5e-7, 1e-5),
    },
}

FIG2: dict[str, dict[float, float]] = {
    "distance": {1e-1: 2.5e-5, 1e-2: 2.2e-4, 1e-4: 6e-4},
    "accuracy": {1e-1: 0.82, 1e-2: 0.925, 1e-3: 0.96, 1e-4: 0.97},
}

FIG3: dict[float, Ends] = {1e-2: (4e-5, 2.5e-4)}


def at_percentages(values: Series | Ends) -> dict[int, float]:
    """Published values by percentage; for a range, only its ends."""
    if len(values) == 2:
        return {PERCENTAGES[0]: values[0], PERCENTAGES[-1]: values[1]}
    return dict(zip(PERCENTAGES, values, strict=True))


AUTHORS_LINEAR: dict[str, Series] = {
    "warm parameter space": (0.5161, 0.5125, 0.4813, 0.4508, 0.4165),
    "warm dual": (1.3064, 1.0441, 0.9277, 0.6093, 0.3726),
    "distance parameter space": (1.268e-4, 4.088e-4, 9.305e-4, 2.084e-3, 7.600e-3),
    "distance dual": (2.506e-3, 5.642e-3, 1.104e-1, 8.246e-3, 2.097e-3),
    "forget accuracy": (0.9700, 0.9703, 0.9676, 0.9696, 0.9631),
}
"""The linear model is not in the paper; these are the results file of the authors' repository
(`results_mnist_linear.json`, commit 788780b)."""
