"""State dictionaries: this rank's shard, or torch's own format whole, at any world size."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import construction, norms, presence
from .fused import MEMBERS, FusedSpec
from .layout import flat_copy, shard_dtype
from .shard import FusedShard
from .transports.control import Action

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer

# State entries of torch.optim that are one number, whatever the parameter's shape; those of other
# classes are found when the class is tried out.
NUMBERS = ("step", "mu_product", "mu", "eta")
# Entries that a parameter may be without although it has been updated.
OPTIONAL = ("momentum_buffer",)
OURS = ("absent", "average")
MOST_STEPS = 1 << 53  # counters are float64 on the device


def entries(opt: ZeroOptimizer, i: int, steps: list[float]) -> dict[str, Any]:
    """State of parameter i with its master; empty if it was never updated."""
    never = isinstance(opt._shard, FusedShard) and steps[i] == 0
    state = {} if never else opt._shard.entries(i)
    # A master without the state that a first update makes is that of a step that was skipped.
    updated = bool(state) or set(opt._state_keys) <= set(OPTIONAL)
    if updated and i in opt._shard.masters:
        state["master"] = opt._shard.masters[i]
    return state


def tag(opt: ZeroOptimizer, form: str) -> dict[str, Any]:
    return {
        "format": form,
        "iteration": opt._iteration,
        "loss_scale": opt._scale.state_dict(),
        "groups": [{key: group[key] for key in OURS} for group in opt.param_groups],
    }


def torch_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies: what the caller does to a saved dictionary must not reach the optimizer."""
    return [{k: copy.deepcopy(v) for k, v in group.items() if k not in OURS} for group in groups]


def tagged(packed: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Torch's dictionary as the user's hooks have left it, as ours."""
    return {**packed, "param_groups": torch_groups(packed["param_groups"]), "dynzero": own}


def shard_state_dict(opt: ZeroOptimizer, base: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    opt.state.clear()
    steps = opt._shard.steps.tolist()
    for i, p in enumerate(opt._params):
        own = entries(opt, i, steps)
        if own:
            opt.state[p] = own
    place = {"world": opt._control.world, "rank": opt._control.rank, "stage": opt._options.stage}
    return tagged(base(), tag(opt, "shard") | place)


def full_state_dict(opt: ZeroOptimizer, rank0_only: bool) -> dict[str, Any]:
    wrong = None
    if not isinstance(rank0_only, bool):
        wrong = TypeError(f"rank0_only: expected True or False, got {rank0_only!r}")
    presence.agree(opt, Action.STATE, wrong=wrong)
    keep = not rank0_only or opt._control.rank == 0
    state = gather_whole(opt, keep=keep, to_cpu=rank0_only)
    if not keep:
        return {}
    shown = opt.state
    opt.state = defaultdict(dict, {opt._params[i]: whole for i, whole in state.items()})
    try:
        return tagged(torch.optim.Optimizer.state_dict(opt), tag(opt, "full"))
    finally:
        opt.state = shown


def gather_whole(
    opt: ZeroOptimizer, *, keep: bool, to_cpu: bool = False
) -> dict[int, dict[str, Any]]:
    """Collective: the state of all parameters in their shapes, empty unless `keep`."""
    steps = opt._shard.steps.tolist()
    state: dict[int, dict[str, Any]] = {}
    for i in range(opt._layout.size):
        whole = {}
        for key, value in entries(opt, i, steps).items():
            piece = isinstance(value, Tensor) and value.dim() > 0
            value = norms.whole_tensor(opt, i, value) if piece else detached(value)
            if keep:
                whole[key] = value.cpu() if to_cpu and piece else value
        if whole:
            state[i] = whole
    return state


def detached(value: Any) -> Any:
    """One number of the state; torch keeps step counts on the CPU."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


# Loading.


def load(opt: ZeroOptimizer, state_dict: dict[str, Any]) -> None:
    presence.agree(opt, Action.LOAD)
    error: Exception | None = None
    loaded: dict[int, tuple[dict[str, Any], Tensor | None]] = {}
    try:
        state_dict = run_pre_hooks(opt, state_dict)
        order = match_params(opt, state_dict)
        own = state_dict.get("dynzero") or {}
        groups = loaded_groups(opt, state_dict["param_groups"], own)
        spec = checked_options(opt, groups)
        form = check_tag(opt, own)
        for saved, state in state_dict["state"].items():
            if saved not in order:
                raise ValueError(f"load_state_dict: state {saved!r} belongs to no parameter")
            i = order[saved]
            check_entries(opt, i, state)
            pieces = {k: piece_of(opt, i, k, v, form) for k, v in state.items()}
            master = pieces.pop("master", None)
            loaded[i] = (pieces, master)
        spec = with_buffers(spec, loaded)
        lines = summary(opt, state_dict, loaded)
    except (KeyError, AttributeError, IndexError, TypeError) as caught:
        error = ValueError(f"load_state_dict: expected a state dict of an optimizer: {caught!r}")
    except Exception as caught:  # whatever it is, the others must not wait for this rank
        error = caught
    opt._control.raise_together(error)
    construction.agree_on_setup(opt._control, lines, "Load states of the same run on every rank")
    commit(opt, own, groups, loaded, spec)


def summary(
    opt: ZeroOptimizer,
    state_dict: dict[str, Any],
    loaded: dict[int, tuple[dict[str, Any], Tensor | None]],
) -> list[str]:
    """What must be the same on all ranks of what they load, a line each."""
    own = state_dict.get("dynzero") or {}
    lines = [f"loaded state of iteration {own.get('iteration')}, {own.get('format', 'plain')}"]
    for i, (state, _) in sorted(loaded.items()):
        step = state.get("step")
        number = step.item() if isinstance(step, Tensor) else step
        lines.append(f"loaded state of '{opt._layout.names[i]}': {sorted(state)}, step {number}")
    groups = torch_groups(state_dict["param_groups"])
    return lines + [f"loaded {line}" for line in construction.hyperparameter_lines(groups)]


def run_pre_hooks(opt: ZeroOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict = dict(state_dict)
    for hook in opt._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(opt, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def check_tag(opt: ZeroOptimizer, own: dict[str, Any]) -> str:
    """ "shard" or "full"; ValueError for a shard of another place, KeyError for half a tag."""
    if own:
        if type(own["iteration"]) is not int or not 0 <= own["iteration"] < MOST_STEPS:
            raise ValueError(
                "load_state_dict: 'dynzero' 'iteration': expected a number of steps, got "
                f"{own['iteration']!r}"
            )
        opt._scale.checked(own["loss_scale"])
    if own.get("format") != "shard":
        return "full"
    here = {
        "world": opt._control.world,
        "rank": opt._control.rank,
        "stage": opt._options.stage,
    }
    for key, value in here.items():
        whole_both = key == "stage" and 0 not in (own["stage"], value)
        if own[key] != value and not whole_both:
            raise ValueError(
                f"load_state_dict: this shard was saved at {key} {own[key]}, expected {key} "
                f"{value}; save with full_state_dict(), which loads at any world size and stage"
            )
    return "shard"


def match_params(opt: ZeroOptimizer, state_dict: dict[str, Any]) -> dict[int, int]:
    """Our parameter index for each saved one: by name where both have names, else by order."""
    saved = state_dict["param_groups"]
    if len(saved) != len(opt.param_groups):
        raise ValueError(
            f"load_state_dict: expected {len(opt.param_groups)} parameter groups, got {len(saved)}"
        )
    order: dict[int, int] = {}
    index = {name: i for i, name in enumerate(opt._layout.names)}
    first = 0
    for g, (theirs, ours) in enumerate(zip(saved, opt.param_groups, strict=True)):
        if len(theirs["params"]) != len(ours["params"]):
            raise ValueError(
                f"load_state_dict: expected {len(ours['params'])} parameters in group {g}, got "
                f"{len(theirs['params'])}"
            )
        by_name = "param_names" in theirs and "param_names" in ours
        if by_name and set(theirs["param_names"]) != set(ours["param_names"]):
            unknown = sorted(set(theirs["param_names"]) ^ set(ours["param_names"]))
            raise ValueError(
                f"load_state_dict: group {g}: parameter names differ, for example '{unknown[0]}'"
            )
        for k, saved_index in enumerate(theirs["params"]):
            order[saved_index] = index[theirs["param_names"][k]] if by_name else first + k
        first += len(ours["params"])
    return order


def check_entries(opt: ZeroOptimizer, i: int, state: dict[str, Any]) -> None:
    """All entries that the optimizer keeps must be there; a first momentum may be missing."""
    missing = [k for k in opt._state_keys if state.get(k) is None and k not in OPTIONAL]
    if set(state) - {"master"} and missing:
        raise ValueError(
            f"load_state_dict: the state of parameter '{opt._layout.names[i]}' has no "
            f"'{missing[0]}', expected {list(opt._state_keys)} of {opt._class.__name__}, got "
            f"{list(state)}"
        )


def checked_options(opt: ZeroOptimizer, groups: list[dict[str, Any]]) -> FusedSpec | None:
    """The kernel that covers the options that are loaded, as one did those at construction."""
    try:
        return construction.checked_spec(opt, groups, opt._may_zero)
    except ValueError as wrong:
        raise ValueError(f"load_state_dict: {wrong}") from wrong


def with_buffers(
    spec: FusedSpec | None, loaded: dict[int, tuple[dict[str, Any], Tensor | None]]
) -> FusedSpec | None:
    """SGD keeps buffers that are loaded also while momentum is 0: it may come back."""
    buffers = any(state.get("momentum_buffer") is not None for state, _ in loaded.values())
    if spec is not None and not spec.keys and buffers:
        return replace(spec, keys=("momentum_buffer",))
    return spec


def loaded_groups(
    opt: ZeroOptimizer, groups: list[dict[str, Any]], own: dict[str, Any]
) -> list[dict[str, Any]]:
    """The groups as loading leaves them, of copies; `own` is what we have added to torch's."""
    ours: list[dict[str, Any]] = [{}] * len(groups)
    if own:
        ours = [{key: group[key] for key in OURS} for group in own["groups"]]
    if len(ours) != len(groups):
        raise ValueError(
            f"load_state_dict: expected {len(groups)} entries in 'dynzero' 'groups', got "
            f"{len(ours)}"
        )
    return [
        {**group, **copy.deepcopy({k: v for k, v in theirs.items() if k not in MEMBERS}), **more}
        for group, theirs, more in zip(opt.param_groups, groups, ours, strict=True)
    ]


def is_number(opt: ZeroOptimizer, i: int, key: str, value: Any) -> bool:
    """If a loaded state entry is one number, whatever the shape of parameter i."""
    if key in opt._state_keys:
        known = opt._state_keys[key]
        return not (isinstance(known, Tensor) and known.dim() > 0)
    bare = isinstance(value, Tensor) and value.dim() == 0 and opt._params[i].dim() > 0
    return key in NUMBERS or (bare and key not in ("master", *OPTIONAL))


def number_of(opt: ZeroOptimizer, i: int, key: str, value: Any) -> Any:
    name = opt._layout.names[i]
    # A copy: it may be a view of our own counts, which are cleared before anything is loaded.
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"load_state_dict: '{key}' of parameter '{name}': expected one number, got a "
                f"tensor of shape {tuple(value.shape)}"
            )
        return value.detach().clone().reshape(())
    if key != "step":
        return value
    if not isinstance(value, Real):
        raise ValueError(
            f"load_state_dict: 'step' of parameter '{name}': expected a number, got {value!r}"
        )
    # Dictionaries of old torch releases have plain numbers where the classes have tensors now.
    plain = isinstance(opt._state_keys.get(key), Real)
    return value if plain else torch.tensor(float(value), dtype=torch.float32, device="cpu")


def piece_of(opt: ZeroOptimizer, i: int, key: str, value: Any, form: str) -> Any:
    """This rank's piece of one loaded state entry, in the update dtype; numbers as they are."""
    p, name = opt._params[i], opt._layout.names[i]
    if value is None:
        return value
    if is_number(opt, i, key, value):
        return number_of(opt, i, key, value)
    if not isinstance(value, Tensor):
        if key in opt._state_keys or key == "master":
            raise ValueError(
                f"load_state_dict: '{key}' of parameter '{name}': expected a tensor, got {value!r}"
            )
        return value
    dtype = shard_dtype(opt._layout.dtypes[i])
    start, own = int(opt._shard.start[i]), int(opt._shard.own[i])
    if form == "shard":
        if value.numel() != own:
            raise ValueError(
                f"load_state_dict: '{key}' of parameter '{name}': expected a piece of {own} "
                f"elements, got {value.numel()}"
            )
        return value.to(opt._device, dtype)
    if value.shape != p.shape:
        raise ValueError(
            f"load_state_dict: '{key}' of parameter '{name}': expected shape {tuple(p.shape)}, got "
            f"{tuple(value.shape)}"
        )
    if p.is_complex() and not value.is_complex():
        value = value.to(p.dtype)
    # Cut where it is, and copied: the whole one is not to come to this device, nor to stay.
    return flat_copy(value, p)[start : start + own].to(opt._device, dtype, copy=True)


def commit(
    opt: ZeroOptimizer,
    own: dict[str, Any],
    groups: list[dict[str, Any]],
    loaded: dict[int, tuple[dict[str, Any], Tensor | None]],
    spec: FusedSpec | None,
) -> None:
    """own: what we have added to torch's dictionary. groups: as they are from now on."""
    for ours, theirs in zip(opt.param_groups, groups, strict=True):
        ours.update(theirs)
    opt.state.clear()  # what state_dict() has shown there, and what would keep it in memory
    opt._shard.clear()
    construction.extend_spec(opt, spec)
    for i, (state, master) in loaded.items():
        opt._shard.load(i, state, master, opt.param_groups)
    if own:
        opt._iteration = own["iteration"]
        opt._outcomes.poll(wait=True)
        before = opt._scale.value.clone()
        opt._scale.load_state_dict(own["loss_scale"])
        if opt._scale.scaling:
            with torch.no_grad():  # gradients that wait for their step
                norms.multiply(opt, opt._scale.value / before)
        opt._outcomes.exhausted = opt._scale.told
    for hook in opt._optimizer_load_state_dict_post_hooks.values():
        hook(opt)
