"""What the page cannot say, in sentences that are true of the model on it."""

from ...fitted._fitted import Fitted


def limits(fitted: Fitted) -> list[str]:
    """One sentence each; what holds for this model comes first."""
    return [
        *_about_the_model(fitted),
        "An edit takes one step, the influence function, and further ones where its bound exceeds 1 %. It is "
        "an estimate, unless the loss is squared error; the certificate bounds its distance to retraining, "
        "and more steps close it.",
        "Rounding is part of the bound as an estimate, not as a proof.",
        "The strips and the colours leave out one point at a time. Points that are alike stand in "
        "for each other: leaving out several is not the sum of leaving out each.",
        "The map shows two of many directions. Points that are close on it may be far apart.",
        "A point that was removed here is still in the data, in its copies, and in whatever was chosen "
        "with it in view: the network, the ridge, the start of training.",
        "A harmful point is one whose absence helps these queries. It need not be wrong.",
    ]


def _about_the_model(fitted: Fitted) -> list[str]:
    if fitted.source.network is None:
        return [
            "This model is a kernel. The bound is on the distance in its function space, and says "
            "nothing about a network of finite width."
        ]
    if not fitted.certificate.certified:
        return [
            "This network is not linear in its parameters, so there is no certificate: every effect "
            "here is an estimate made with its linearisation."
        ]
    return [
        "The model is linear in its parameters: a network linearised at its start, or one that is linear "
        "by itself. The bound is on the distance to retraining this model. How a nonlinear network would "
        "have trained without the points is another question."
    ]
