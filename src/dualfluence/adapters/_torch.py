"""Adapter for PyTorch, by torchax."""

import copy
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ._adapted import Adapted, Trainable, adapt, check_kind_of_model, need


def from_torch(model: Any, *, trainable: Trainable = None, **call: Any) -> Adapted:
    """Adapt a PyTorch module: its own forward pass, run on JAX by torchax.

    Parameters that require a gradient are trained; the others and all buffers are held as `"state"`.

    **Arguments:**

    - `model`: the module; it is copied, and the copy put in evaluation mode. A model of Hugging Face is
      called with a dict of inputs as keywords, such as `input_ids` and `attention_mask`, and its `logits`
      are the outputs. With LoRA of `peft`, only LoRA's own parameters require a gradient.
    - `trainable`: which parameters are trained, all by default. Frozen ones keep their bfloat16 or
      float16; trained ones of that kind are held in float32.
    - `call`: arguments of `model(x, ...)`.

    **Returns:** `Adapted`; `restore` gives an `nn.Module` in evaluation mode.
    """
    torch, torchax = (need(name, "from_torch", "torch") for name in ("torch", "torchax"))
    check_kind_of_model("from_torch", model, torch.nn.Module, "a torch.nn.Module")
    env = torchax.default_env()
    # A twin of its own, so that training the user's module further changes nothing here.
    twin = copy.deepcopy(model).cpu().eval()
    learned = {name for name, p in model.named_parameters() if p.requires_grad}

    def read(other: Any) -> PyTree:
        check_kind_of_model("read", other, torch.nn.Module, "a torch.nn.Module")
        held = dict(other.named_parameters()) | dict(other.named_buffers())
        arrays = {name: _to_array(name, value, name in learned) for name, value in held.items()}
        return {
            "params": {name: a for name, a in arrays.items() if name in learned},
            "state": {name: a for name, a in arrays.items() if name not in learned},
        }

    def rebuild(tree: PyTree) -> Any:
        served = copy.deepcopy(twin)
        own = dict(served.named_parameters()) | dict(served.named_buffers())
        with torch.no_grad():
            for name, value in _merged(tree).items():
                wide = value.astype(jnp.float32) if value.dtype.itemsize == 2 else value
                own[name].copy_(torch.from_numpy(np.array(wide)))
        return served

    # A cache of keys and values is for generating text.
    accepted = inspect.signature(type(model).forward).parameters
    options = ({"use_cache": False} if "use_cache" in accepted else {}) | call

    def apply(tree: PyTree, x: Any) -> Any:
        values, points = env.j2t_iso((_merged(tree), x))
        args, named = ((), points | options) if isinstance(x, dict) else ((points,), options)
        with env:
            out = torch.func.functional_call(twin, values, args, named)
            return env.t2j_iso(getattr(out, "logits", out))

    return adapt("PyTorch", apply, read(model), trainable, read, rebuild)


def _merged(tree: Any) -> dict[str, Any]:
    """Parameters and buffers by name, in the form that the call of a module takes."""
    return {**tree["params"], **tree["state"]}


def _to_array(name: str, value: Any, learned: bool) -> Array:
    value = value.detach().cpu()
    if value.is_floating_point() and value.element_size() < 4:  # NumPy has no bfloat16
        narrow = jnp.dtype(str(value.dtype).removeprefix("torch."))
        return jnp.array(value.float().numpy(), jnp.float32 if learned else narrow)
    array = value.numpy()
    if array.dtype == np.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"from_torch: {name} is float64, but JAX is set to float32. Call "
            "jax.config.update('jax_enable_x64', True) first, or give model.float()."
        )
    return jnp.array(array)  # a copy: PyTorch writes its weights in place
