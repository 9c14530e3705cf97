"""Policies: the scheme of a tensor at each step, by recipe, schedule, warm-up and rules."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from horovod_fftcomp.engine.recipe_text import SETTINGS, parse_recipe
from horovod_fftcomp.errors import UnsupportedError, check_whole, is_number
from horovod_fftcomp.recipes import RECIPES, get_recipe, get_scheme
from horovod_fftcomp.schedules import Constant, Schedule, as_schedule
from horovod_fftcomp.schemes import GRADIENT_UNITS, Scheme
from horovod_fftcomp.schemes.dense import Dense
from horovod_fftcomp.schemes.hierarchical import Hierarchical, NodeLayout
from horovod_fftcomp.schemes.momentum import WithMomentum
from horovod_fftcomp.schemes.options import check_names, checked
from horovod_fftcomp.schemes.uncompressed import Uncompressed
from horovod_fftcomp.types import Tensor, Tensors

# A rule: tensors (a shell pattern of names, or a function of name and shape) and an action:
# "dense", another density, or {"recipe": name, option: value, ...}.
Action = str | float | Mapping[str, Any]
Rule = tuple[str | Callable[[Tensor], bool], Action]
NodeSize = int | Literal["auto"]

# Keywords of ``make_policy`` besides a recipe's options.
KEYWORDS = ("warmup_steps", "density_schedule", "dense_every", "dense_by", "ranks_per_node")
# Dense steps before recipes with residuals compress, by default. Gradients fall by 10 to 100 times
# in the first steps of a training, and what is held back then outweighs those of later steps.
WARMUP_STEPS = 100


@dataclass(frozen=True)
class Scheduled:
    """Policy of a recipe, with an optional density schedule after ``warmup_steps`` dense steps.

    With ``ranks_per_node`` above 1 it compresses between nodes only; see ``Hierarchical``. "auto"
    is 1 until ``on_nodes`` has replaced it. Each ``dense_every``-th step after the warm-up is
    exchanged by ``dense``, a recipe without state; 0: none is. ``made``: a scheme in place of the
    recipe's; see ``always``.
    """

    recipe: str
    options: tuple[tuple[str, Any], ...] = ()
    schedule: Schedule | None = None
    warmup_steps: int = 0
    ranks_per_node: NodeSize = 1
    dense_every: int = 0
    dense: Scheduled | None = None
    is_warmup_given: bool = False
    made: Scheme | None = None

    def at(self, step: int) -> Scheme:
        """Return the scheme of exchange ``step``, counted from 0."""
        if self.dense is not None and self._n_dense(step) < self._n_dense(step + 1):
            scheme = Uncompressed(self._compressing(step), self.dense.at(step))
            return self._among_nodes(scheme)
        if step >= self.warmup_steps and self._lasting is not None:
            return self._lasting
        return self._among_nodes(self._compressing(step))

    @property
    def after_warmup(self) -> Scheme:
        """The scheme of the first step after the warm-up."""
        return self.at(self.warmup_steps)

    def _n_dense(self, step: int) -> int:
        """Return how many steps between the warm-up and ``step`` are exchanged dense."""
        return max(0, step - self.warmup_steps) // self.dense_every if self.dense_every else 0

    @functools.cached_property
    def _lasting(self) -> Scheme | None:
        """The scheme of all steps after the warm-up; None if it depends on the step."""
        scheme = self._scheme()
        varies = self.schedule is not None or scheme.at(0) is not scheme
        return None if varies else self._among_nodes(scheme)

    @property
    def node_size(self) -> int:
        """Number of ranks of a node; 1 as long as it is "auto"."""
        return 1 if self.ranks_per_node == "auto" else self.ranks_per_node

    def on_nodes(self, find: Callable[[], int]) -> Scheduled:
        """Return the policy with ``find()`` ranks per node, if that is "auto"."""
        return self if self.ranks_per_node != "auto" else replace(self, ranks_per_node=find())

    def _among_nodes(self, scheme: Scheme) -> Scheme:
        return scheme if self.node_size == 1 else Hierarchical(scheme, self.node_size)

    def _compressing(self, step: int) -> Scheme:
        if step < self.warmup_steps:
            scheme, dense = self._scheme(), Dense("float32")
            if scheme.traits.momentum and self.dense is not None:  # of gradients, not velocities
                return Uncompressed(scheme, dense)
            return scheme.in_warmup() or dense
        if self.schedule is None:
            n_compressed = step - self.warmup_steps - self._n_dense(step)
            return self._scheme().at(n_compressed)
        return self._scheme(density=self.density(step))

    def _scheme(self, **changed: Any) -> Scheme:
        """Return the recipe's scheme; with steps between that send gradients, of first moments."""
        if self.made is not None:
            return self.made
        options = {**dict(self.options), **changed}
        return _scheme(self.recipe, tuple(options.items()), self.dense is not None)

    def possible_rounds(self) -> frozenset[tuple[str, ...]]:
        """Return every list of collectives that an exchange may have, at any step.

        No schedule of the density changes them.
        """
        found = self.at(0).possible_rounds() | self.after_warmup.possible_rounds()
        if self.dense is None:
            return found
        return found | replace(self.dense, ranks_per_node=self.ranks_per_node).possible_rounds()

    def density(self, step: int) -> float | None:
        """Return the density at ``step``, 1 in the warm-up; None for a recipe without one."""
        if step < self.warmup_steps and "density" in RECIPES[self.recipe].options:
            return 1.0
        if self.schedule is not None:
            return self.schedule.at(max(0, step - self.warmup_steps))
        return self._all_options.get("density")

    @functools.cached_property
    def _all_options(self) -> dict[str, Any]:
        return {**RECIPES[self.recipe].options, **dict(self.options)}

    @property
    def scope(self) -> str:
        """The elements that share one k: "tensor", "bucket" or "model"."""
        return self._all_options.get("scope", "tensor")

    def in_force(self) -> dict[str, object]:
        """Return all options in effect, defaults included, as keywords of ``make_policy``."""
        options = dict(self._all_options)
        if isinstance(self.schedule, Constant):
            options["density"] = self.schedule.at(0)
        elif self.schedule is not None:
            del options["density"]
            options["density_schedule"] = self.schedule
        if self.is_warmup_given:
            options["warmup_steps"] = self.warmup_steps
        if self.ranks_per_node != 1:
            options["ranks_per_node"] = self.ranks_per_node
        if self.dense is not None:
            options |= {"dense_every": self.dense_every, "dense_by": self.dense._given()}
        return options

    def facts(self) -> dict[str, object]:
        """Return the settings that must be equal on all ranks: one entry per option."""
        settings = {"warmup_steps": self.warmup_steps, "ranks_per_node": self.ranks_per_node}
        facts = {"recipe": self.recipe, **settings, **self.in_force()}
        return {
            name: repr(value) if isinstance(value, Schedule) else value
            for name, value in facts.items()
        }

    def written(self) -> str:
        """Return recipe and options in effect as a call of a factory: ``fft(bits=4)``."""
        recipe = RECIPES[self.recipe]
        unsaid = {n: v for n, v in recipe.options.items() if n not in recipe.own_options}
        shown = [(n, v) for n, v in self.in_force().items() if n not in unsaid or v != unsaid[n]]
        return f"{self.recipe}({', '.join(f'{name}={value!r}' for name, value in shown)})"

    def _given(self) -> str:
        """Return the recipe of dense steps with its options, as ``dense_by`` takes it."""
        implied = ("error_feedback", "exchange")
        given = [f"{name}={value}" for name, value in self.options if name not in implied]
        return f"{self.recipe}({', '.join(given)})" if given else self.recipe

    def decided(self, tensors: Tensors, world_size: int) -> Scheduled:
        """Return the policy for a bucket: exchange "auto" becomes "gather" or "sharded"."""
        among = NodeLayout(self.node_size, world_size).n_nodes  # raises for unequal nodes
        if self.dense is not None:
            decided = replace(self, dense=None).decided(tensors, world_size)
            return replace(decided, dense=self.dense.decided(tensors, among))
        if self.in_force().get("exchange") != "auto":
            return self
        try:
            scheme = self.with_exchange("sharded")._compressing(self.warmup_steps)
        except UnsupportedError:  # with options that a sharded exchange does not have
            return self.with_exchange("gather")
        return self.with_exchange("sharded" if scheme.is_smaller(tensors, among) else "gather")

    def with_exchange(self, exchange: str) -> Scheduled:
        """Return the same policy with this value of the option ``exchange``."""
        options = {**dict(self.options), "exchange": exchange}
        return replace(self, options=tuple(sorted(options.items())))

    def as_decided(self, policy: Scheduled) -> Scheduled:
        """Return this policy with the exchange of ``policy``, of the same recipe."""
        exchange = dict(policy.options).get("exchange")
        decided = self if exchange is None else self.with_exchange(exchange)
        return replace(decided, dense=policy.dense)

    def with_density(self, density: float) -> Scheduled:
        """Return the same policy with a constant density."""
        _require_density(self.recipe, "density")
        changed = replace(self, schedule=as_schedule(density))
        changed.at(self.warmup_steps)
        return changed


def always(scheme: Scheme) -> Scheduled:
    """Return the policy of a scheme that is no recipe's, the same at every step."""
    return Scheduled("none", made=scheme)


@functools.lru_cache(1024)
def _scheme(recipe: str, options: tuple[tuple[str, Any], ...], averages: bool) -> Scheme:
    scheme = get_scheme(recipe, **dict(options))
    if averages and isinstance(scheme, WithMomentum):
        return replace(scheme, correction=replace(scheme.correction, averages=True))
    return scheme


def usual_warmup(scheme: Scheme) -> int:
    """Return how many dense steps come first by default: none for schemes without residuals."""
    arrays = scheme.state_arrays(Tensor("", (64, 64)), {})
    keeps = any(arrays[name].is_kept for name in GRADIENT_UNITS if name in arrays)
    return WARMUP_STEPS if keeps and not scheme.traits.sends_signs else 0


def _require_density(recipe: str, argument: str) -> None:
    if "density" not in RECIPES[recipe].options:
        having = ", ".join(name for name, r in RECIPES.items() if "density" in r.options)
        raise ValueError(
            f"{argument} was given, but recipe {recipe!r} has no density; these have: {having}"
        )


def make_policy(
    recipe: str,
    warmup_steps: int | None = None,
    density_schedule: Schedule | Mapping[int, float] | float | None = None,
    dense_every: int = 0,
    dense_by: str = "bf16",
    ranks_per_node: NodeSize = 1,
    **options: Any,
) -> Scheduled:
    """Return the policy of a recipe; ValueError or TypeError names the argument that is wrong.

    Parameters
    ----------
    recipe
        A name in ``RECIPES``.
    warmup_steps
        Steps that are sent dense before compression begins; by default 100 for recipes with error
        feedback, 0 for others.
    density_schedule
        Density over steps: one of ``schedules`` or a mapping {step: density}; 0 is the first
        compressed step.
    dense_every
        Exchange each so many-th step after the warm-up uncompressed, without the residual, which
        stays; 0: none. ``AdamW`` and ``Adam`` of this package take second moments from these steps.
    dense_by
        The recipe of these steps, with options: "bf16", "none" for float32, or one that rounds
        without bias, such as "qsgd".
    ranks_per_node
        Number of consecutive ranks that form a node: sums are dense within it, compressed between.
        "auto": the ranks of a host, or 1 if the launcher tells none, if all are on one host or if
        hosts have unequal numbers.
    **options
        Options of the recipe; see ``get_scheme``.
    """
    if not (isinstance(ranks_per_node, str) and ranks_per_node == "auto"):
        ranks_per_node = checked("ranks_per_node", ranks_per_node, int, 8)
    check_names(recipe, options, get_recipe(recipe).options, KEYWORDS)
    options = get_recipe(recipe).checked(options)
    scheme = get_scheme(recipe, **options)
    steps = _checked_warmup(recipe, scheme, warmup_steps)
    schedule = None
    if density_schedule is not None:
        _require_density(recipe, "density_schedule")
        if "density" in options:
            raise ValueError("give either density or density_schedule, not both")
        schedule = as_schedule(density_schedule)
    if ranks_per_node != 1:
        size = 2 if ranks_per_node == "auto" else ranks_per_node
        Hierarchical(scheme, size)  # refuses what it cannot do
    dense_every = checked("dense_every", dense_every, int, 10)
    _check_dense_every(recipe, scheme, bool(options.get("nesterov")), dense_every)
    dense = _dense_policy(checked("dense_by", dense_by, str, "bf16"))
    return Scheduled(
        recipe, tuple(sorted(options.items())), schedule, steps, ranks_per_node,
        dense_every, dense if dense_every else None, warmup_steps is not None,
    )  # fmt: skip


def _checked_warmup(recipe: str, scheme: Scheme, warmup_steps: int | None) -> int:
    """Return the number of dense steps before compression begins."""
    if warmup_steps is None:
        return usual_warmup(scheme)
    warmup_steps = checked("warmup_steps", warmup_steps, int, 0)
    check_whole("warmup_steps", warmup_steps, 0)
    if scheme.traits.sends_signs and warmup_steps:
        raise ValueError(
            f"recipe {recipe!r} sends signs, so there are no dense steps: their means would be far "
            'smaller than 1. Give warmup_steps=0; in a rule that names it, "warmup_steps": 0'
        )
    return warmup_steps


def _check_dense_every(recipe: str, scheme: Scheme, nesterov: bool, dense_every: int) -> None:
    """Raise ValueError unless each so many-th step of a recipe can be exchanged dense."""
    if dense_every < 0 or dense_every == 1:
        raise ValueError(
            "dense_every must be 0, for no dense steps, or a whole number from 2 up, got "
            f"{dense_every!r}"
        )
    traits = scheme.traits
    own = scheme.scheme.traits.momentum if isinstance(scheme, WithMomentum) else traits.momentum
    if dense_every and (traits.sends_signs or own or nesterov):
        raise ValueError(
            f"recipe {recipe!r} sends signs, or has a momentum of its own or Nesterov's, so no "
            'steps between are dense. Give dense_every=0; in a rule that names it, "dense_every": 0'
        )


def _dense_policy(text: str) -> Scheduled:
    """Return the policy of the recipe ``text``, which dense steps use."""
    name, options = parse_recipe(text)[1:]
    if "error_feedback" in get_recipe(name).options:
        options = {"error_feedback": False, **options}
    traits = get_scheme(name, **options).traits
    if traits.compresses or traits.is_noisy or traits.momentum:
        raise ValueError(
            "dense_by must be a recipe that sends all elements without bias or much noise, such as "
            f"bf16, none or qsgd; got {text!r}"
        )
    return Scheduled(name, tuple(sorted(options.items())))


def action_for(tensor: Tensor, rules: Sequence[Rule]) -> Action | None:
    """Return the action of the first rule that matches ``tensor``; None if none matches."""
    for which, action in rules:
        if fnmatch.fnmatchcase(tensor.name, which) if isinstance(which, str) else which(tensor):
            return action
    return None


def check_rules(rules: Sequence[Rule], policy: Scheduled) -> tuple[Rule, ...]:
    """Return ``rules`` as a tuple; ValueError or TypeError for an invalid rule."""
    for rule in rules:
        if not isinstance(rule, tuple) or len(rule) != 2:
            raise TypeError(f"a rule is a pair (names, action), got {rule!r}")
        which, action = rule
        if not isinstance(which, str) and not callable(which):
            raise TypeError(f"rule {rule!r}: names are a pattern or a function of the tensor")
        policy_of(action, policy)
    return tuple(rules)


def unmatched(rules: Sequence[Rule], tensors: Tensors) -> list[str]:
    """Return the patterns that match no tensor, most likely misspelt."""
    return [
        which
        for which, _ in rules
        if isinstance(which, str) and not fnmatch.filter([t.name for t in tensors], which)
    ]


def policy_of(action: Action, policy: Scheduled) -> Scheduled | None:
    """Return the compressor's policy as changed by a rule's action; None for dense."""
    if action == "dense":
        return None
    if isinstance(action, Mapping):
        if "ranks_per_node" in action:
            raise ValueError("ranks_per_node holds for all tensors: give it without a rule")
        inherited = {name: value for name, value in policy.in_force().items() if name in SETTINGS}
        return make_policy(**{"recipe": policy.recipe, **inherited, **action})
    if not is_number(action):
        raise ValueError(
            f"a rule's action is 'dense', a density or a dict with a recipe; got {action!r}"
        )
    return policy.with_density(float(action))
