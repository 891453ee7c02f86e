"""Names of the methods in tables, figures and recorded results. Imports nothing."""

ONE_STEP = "ours, one step"
TWO_STEPS = "ours, two steps"
ITERATED = "ours, iterated"
TANGENT = "ours, tangent at θ*"
HELD = "ours, one step, J held"
PAPER = "paper's dual form"
SHARDED = "paper's dual form, sharded"
FULL_HESSIAN = "dual form, Hessian of all points"
PAPER_RELEASED = "paper's dual form, as released"
PARAMETER = "parameter space"
PARAMETER_RELEASED = "parameter space, as released"
RANDOM = "random perturbation"
RETRAINED = "retraining"
ASCENT = "gradient ascent"
FINE_TUNED = "fine-tuning"
UNTOUCHED = "no unlearning"

COMPARED = (PARAMETER, PAPER, SHARDED, ONE_STEP, ITERATED)
"""Methods in the paper's figures."""

RELEASED = (PARAMETER_RELEASED, PAPER_RELEASED)
"""The published methods, run as their authors run them."""
