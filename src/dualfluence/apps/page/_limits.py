"""The limits of the page, in sentences that are true for its model."""

from ...fitted._fitted import Fitted


def limits(fitted: Fitted) -> list[str]:
    """One sentence for each limit; those specific to this model come first."""
    return [
        *_about_the_model(fitted),
        "An edit takes one step, the influence function, and more steps if its bound exceeds 1 "
        "%. It is an estimate, unless the loss is squared error; the certificate bounds its "
        "distance to retraining, and more steps reduce it.",
        "The bound includes rounding, which is estimated, not proved.",
        "The strips and the colours leave out one point at a time. Similar points can replace "
        "each other, so the effect of leaving out several is not the sum of the single effects.",
        "The map shows only two of many directions. Points that are close on the map may be far "
        "apart.",
        "A point that was removed here is still in the data, in its copies, and in choices that "
        "were made with it: the network, the ridge, the start of training.",
        "A harmful point is one whose absence helps these queries. It need not be wrong.",
    ]


def _about_the_model(fitted: Fitted) -> list[str]:
    if fitted.source.network is None:
        return [
            "This model is a kernel. The bound is about the distance in its function space. It "
            "says nothing about a network of finite width."
        ]
    if not fitted.certificate.certified:
        return [
            "This network is not linear in its parameters, so there is no certificate: every effect "
            "here is an estimate made with its linearisation."
        ]
    return [
        "The model is linear in its parameters: a network linearised at its start, or a linear "
        "model. The bound is about the distance to retraining this model. How a nonlinear "
        "network would have trained without the points is another question."
    ]
