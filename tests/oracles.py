"""Naive truths in NumPy, float64, written from the mathematics alone.

Nothing here imports the library under test or JAX, and nothing is made fast: a reader should be
able to check each function against one equation. Equation numbers are those of Sun and Valaee,
"Extending Kernel Trick to Influence Functions".

The objective, for weights `w` and `δ = θ − θ₀`:

    L_w(δ) = Σᵢ wᵢ ℓ(fᵢ, yᵢ) + (λ/2)‖δ‖²,      f = f0 + Jδ

Axes: `n` training points, `q` queries, `c` outputs, `p` parameters. Arrays of shape `(n, c)` are
flattened with the outputs fastest, as the paper's `vec` does. A loss is a function of outputs and
targets, both `(n, c)`, that returns values `(n,)`, gradients `(n, c)` and Hessians `(n, c, c)`.
"""

import numpy as np

MAX_NEWTON_STEPS = 500
MAX_HALVINGS = 60
FLOOR = 100
ARMIJO = 1e-4


# Losses.


def squared(f, y):
    """½‖f − y‖²."""
    n, c = f.shape
    return 0.5 * ((f - y) ** 2).sum(1), f - y, np.tile(np.eye(c), (n, 1, 1))


def softmax_ce(f, p):
    """−Σₐ pₐ log softmax(f)ₐ, for class probabilities `p` that sum to one."""
    shifted = f - f.max(1, keepdims=True)
    log_s = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    s = np.exp(log_s)
    hess = np.stack([np.diag(row) - np.outer(row, row) for row in s])
    return -(p * log_s).sum(1), s - p, hess


def logistic(f, y):
    """Σₐ log(1 + e^{fₐ}) − yₐfₐ: independent Bernoulli outputs, targets in [0, 1]."""
    sigma = 0.5 * (1 + np.tanh(0.5 * f))
    value = (np.logaddexp(0, f) - y * f).sum(1)
    return value, sigma - y, np.stack([np.diag(row) for row in sigma * (1 - sigma)])


LOSSES = {"squared": squared, "softmax": softmax_ce, "logistic": logistic}


# The objective and its derivatives.


def normalise(sample_weights):
    """wᵢ = sᵢ/Σs: mean loss, so that a removal (s = 0) raises the weight of what stays."""
    return sample_weights / sample_weights.sum()


def outputs(theta_delta, J, f0):
    """f = f0 + Jδ, shape `(n, c)`."""
    return f0 + J @ theta_delta


def objective(theta_delta, J, f0, y, w, ridge, loss):
    """L_w(δ)."""
    value, _, _ = loss(outputs(theta_delta, J, f0), y)
    return w @ value + 0.5 * ridge * theta_delta @ theta_delta


def gradient(theta_delta, J, f0, y, w, ridge, loss):
    """∇L_w = Σᵢ wᵢ Jᵢᵀ∇ℓᵢ + λδ, shape `(p,)`."""
    _, grad, _ = loss(outputs(theta_delta, J, f0), y)
    return np.einsum("i,iap,ia->p", w, J, grad) + ridge * theta_delta


def hessian(theta_delta, J, f0, y, w, ridge, loss):
    """∇²L_w = Σᵢ wᵢ Jᵢᵀ∇²ℓᵢ Jᵢ + λI, shape `(p, p)`."""
    _, _, hess = loss(outputs(theta_delta, J, f0), y)
    total = ridge * np.eye(J.shape[-1])
    for w_i, J_i, hess_i in zip(w, J, hess, strict=True):
        total += w_i * J_i.T @ hess_i @ J_i
    return total


# Retraining.


def is_small(norm, last, tol):
    """Whether a residual is within `tol`, or near it and held up by rounding."""
    return norm <= tol or (norm <= FLOOR * tol and norm > 0.5 * last)


def retrain(J, f0, y, w, ridge, loss, tol=1e-13):
    """The exact minimiser δ of L_w, by damped Newton in parameter space.

    Stops when ‖∇L_w‖ ≤ tol·(1 + ‖∇L_w at 0‖), or at most 100 times that where rounding lets a
    step no longer halve it; L_w is λ-strongly convex, so the distance to the minimiser is then at
    most that over λ. Raises if it gets stuck above.
    """
    args = (J, f0, y, w, ridge, loss)
    delta = np.zeros(J.shape[-1])
    scale, norm = 1 + np.linalg.norm(gradient(delta, *args)), np.inf
    for _ in range(MAX_NEWTON_STEPS):
        grad, last = gradient(delta, *args), norm
        norm = np.linalg.norm(grad)
        if is_small(norm, last, tol * scale):
            return delta
        step = -np.linalg.solve(hessian(delta, *args), grad)
        here, slope = objective(delta, *args), grad @ step
        # Rounding hides the decrease near the end: allow the objective that much.
        noise = 8 * np.finfo(float).eps * abs(here)
        for halvings in range(MAX_HALVINGS):
            t = 0.5**halvings
            if objective(delta + t * step, *args) <= here + ARMIJO * t * slope + noise:
                break
        delta = delta + t * step
    raise RuntimeError(f"retrain: ‖∇L‖ = {norm:.1e} after {MAX_NEWTON_STEPS} steps")


def as_matrix(K):
    """`(n, c, m, c)` to `(n·c, m·c)`; a matrix stays as it is."""
    return K if K.ndim == 2 else K.reshape(K.shape[0] * K.shape[1], -1)


def block_diagonal(blocks):
    """`(n, c, c)` to `(n·c, n·c)`."""
    n, c, _ = blocks.shape
    W = np.zeros((n, c, n, c))
    W[np.arange(n), :, np.arange(n), :] = blocks
    return W.reshape(n * c, n * c)


def retrain_dual(K, f0, y, w, ridge, loss, tol=1e-13):
    """The dual variables α at the minimiser, shape `(n, c)`, from the kernel alone.

    The unknowns are the outputs: at the minimiser `f = f0 + Kα` with `α = −g(f)/λ`, so f is the
    root of `F(f) = f − f0 + K g(f)/λ`. Newton on F, with Jacobian `I + KW/λ` (never singular, as
    `KW` has no negative eigenvalue) and backtracking on ‖F‖. No objective, no symmetric system,
    no full rank of K: as unlike the library's solver as it can be.
    """
    K, shape = as_matrix(K), f0.shape

    def residual(f):
        _, grad, hess = loss(f, y)
        F = f - f0 + (K @ (w[:, None] * grad).ravel()).reshape(shape) / ridge
        return F, w[:, None, None] * hess

    f = f0.copy()
    F, W = residual(f)
    scale, norm = 1 + np.linalg.norm(F), np.inf
    for _ in range(MAX_NEWTON_STEPS):
        norm, last = np.linalg.norm(F), norm
        if is_small(norm, last, tol * scale):
            return -w[:, None] * loss(f, y)[1] / ridge
        step = -np.linalg.solve(np.eye(f.size) + K @ block_diagonal(W) / ridge, F.ravel())
        for halvings in range(MAX_HALVINGS):
            t = 0.5**halvings
            F, W = residual(f + t * step.reshape(shape))
            if np.linalg.norm(F) <= (1 - ARMIJO * t) * norm + 8 * np.finfo(float).eps * scale:
                break
        f = f + t * step.reshape(shape)
    raise RuntimeError(f"retrain_dual: ‖F‖ = {norm:.1e} after {MAX_NEWTON_STEPS} steps")


def kernel_gradient_descent(K, f0, y, w, ridge, loss, rate, steps):
    """Outputs at the training points after `steps` steps of eq. 14, started at f0.

    f ← f − η(K g(f) + λ(f − f0))
    """
    K, f = as_matrix(K), f0
    for _ in range(steps):
        g = w[:, None] * loss(f, y)[1]
        f = f - rate * ((K @ g.ravel()).reshape(f.shape) + ridge * (f - f0))
    return f


def leave_one_out(J, f0, y, sample_weights, ridge, loss):
    """The minimisers δ without each point in turn, shape `(n, p)`, by n retrainings."""
    without = sample_weights * (1 - np.eye(len(y)))
    return np.stack([retrain(J, f0, y, normalise(s), ridge, loss) for s in without])


def leave_one_out_loss(J, f0, y, sample_weights, ridge, loss, J_q, f0_q, y_q):
    """Change of each query's loss by leaving each point out, shape `(q, n)`, ridge term not in."""
    before = retrain(J, f0, y, normalise(sample_weights), ridge, loss)
    after = leave_one_out(J, f0, y, sample_weights, ridge, loss)
    value = loss(outputs(before, J_q, f0_q), y_q)[0]
    return np.stack([loss(outputs(delta, J_q, f0_q), y_q)[0] - value for delta in after], axis=1)


# One step, in parameters and in dual variables.


def one_step_theta(J, f0, theta_delta, y, w_new, ridge, loss):
    """Change of δ by one Newton step on L with the new weights: −(∇²L_w')⁻¹∇L_w', shape `(p,)`.

    For a removal from a minimiser this is eq. 1; see `paper_eq1` for what differs elsewhere.
    """
    args = (J, f0, y, w_new, ridge, loss)
    return -np.linalg.solve(hessian(theta_delta, *args), gradient(theta_delta, *args))


def paper_eq1(J, f0, theta_delta, y, keep_mask, ridge, loss):
    """Eq. 1 as printed, shape `(p,)`: (|D_f|/|D|) H⁻¹ ∇L_{D_f}, with H = (|D_r|/|D|) ∇²L_{D_r}.

    It leaves out ∇L_D, zero at a minimiser. Elsewhere it is off the Newton step by
    (|D|/|D_r|)(∇²L_{D_r})⁻¹∇L_D.
    """
    n, n_r = len(y), int(keep_mask.sum())
    w_r, w_f = normalise(keep_mask.astype(float)), normalise((~keep_mask).astype(float))
    H = n_r / n * hessian(theta_delta, J, f0, y, w_r, ridge, loss)
    return (n - n_r) / n * np.linalg.solve(H, gradient(theta_delta, J, f0, y, w_f, ridge, loss))


def one_step_alpha(K, alpha, f, y, w_new, ridge, loss):
    """Change of α by the same Newton step in data space, shape `(n, c)`, for any K.

    (λI + W'K)Δα = −(g' + λα), with g' and W' the weighted loss terms at the outputs f. Equal to
    `one_step_theta` through Jᵀ where δ = Jᵀα.
    """
    K = as_matrix(K)
    _, grad, hess = loss(f, y)
    g, W = (w_new[:, None] * grad).ravel(), block_diagonal(w_new[:, None, None] * hess)
    A = ridge * np.eye(f.size) + W @ K
    return -np.linalg.solve(A, g + ridge * alpha.ravel()).reshape(f.shape)


def _paper_blocks(K, alpha, f, y, keep_mask, ridge, loss):
    """H and (|D_f|/|D|)∇L̃_{D_f}(0) of eqs. 6, 7 (and by blocks 10, 11), and the mask, flat."""
    K, (n, c) = as_matrix(K), f.shape
    _, grad, hess = loss(f, y)
    keep = np.repeat(keep_mask, c)
    n_r, n_f = int(keep_mask.sum()), int((~keep_mask).sum())
    W_r = block_diagonal(hess[keep_mask] / n_r)
    g_f = (grad[~keep_mask] / n_f).ravel()
    K_r, K_f = K[keep], K[~keep]
    H = n_r / n * (K_r.T @ W_r @ K_r + ridge * K)
    rhs = n_f / n * (K_f.T @ g_f + ridge * K @ alpha.ravel())
    return H, rhs, keep


def paper_eq5(K, alpha, f, y, keep_mask, ridge, loss):
    """Δα of eq. 5, shape `(n, c)`: the full, unreduced system. Needs K of full rank.

    `alpha` is the paper's α* = −∇_f L_D/λ, `f` the outputs at all points, kept and removed.
    """
    H, rhs, _ = _paper_blocks(K, alpha, f, y, keep_mask, ridge, loss)
    return np.linalg.solve(H, rhs).reshape(f.shape)


def paper_eq12(K, alpha, f, y, keep_mask, ridge, loss):
    """Δα of eq. 12, shape `(n, c)`: Δα_f = ∇_{f_f} L_D/λ is known, the kept rows are solved for.

    Needs the kept block of K to have full rank.
    """
    H, rhs, keep = _paper_blocks(K, alpha, f, y, keep_mask, ridge, loss)
    delta = np.zeros(f.size)
    delta[~keep] = loss(f, y)[1][~keep_mask].ravel() / len(y) / ridge
    reduced = rhs[keep] - H[np.ix_(keep, ~keep)] @ delta[~keep]
    delta[keep] = np.linalg.solve(H[np.ix_(keep, keep)], reduced)
    return delta.reshape(f.shape)


# Read-out.


def paper_eq8(K_qn, delta_alpha):
    """Change of outputs at the queries, shape `(q, c)`: K_t Δα."""
    return np.einsum("qajb,jb->qa", K_qn, delta_alpha)


def paper_eq9_delta_loss(K_tn, K, alpha, f_t, y_t, delta_alpha, ridge, loss, *, with_ridge=True):
    """First-order change of loss at one query, a number: ∇L̃_{z_t}(0)ᵀΔα.

    ∇L̃_{z_t}(0) = K(x_t, X)ᵀ∇ℓ_t + λKα; the second term is the change of (λ/2)‖θ − θ₀‖², which
    the paper counts into the loss of every single point. `K_tn` is `(c, n, c)`.
    """
    _, grad, _ = loss(f_t[None], y_t[None])
    direction = K_tn.reshape(len(f_t), -1).T @ grad[0]
    if with_ridge:
        direction = direction + ridge * as_matrix(K) @ alpha.ravel()
    return direction @ delta_alpha.ravel()


def paper_eq13(K_qn, K, alpha, f_q, y_q, delta_alpha, ridge, loss, *, with_ridge=True):
    """Eq. 13 with its footnote for vector outputs, shape `(q,)`.

    |D_t|∇L_{D_t} ⊙ (K_t Δα), summed over each point's outputs, plus λαᵀKΔα for every point.
    """
    q = len(y_q)
    grad_mean = loss(f_q, y_q)[1].ravel() / q
    product = q * grad_mean * (as_matrix(K_qn) @ delta_alpha.ravel())
    change = product.reshape(f_q.shape).sum(1)
    if with_ridge:
        change = change + ridge * alpha.ravel() @ as_matrix(K) @ delta_alpha.ravel() * np.ones(q)
    return change
