"""Population-based training: from time to time the worst trials give way to forks of the best, with other settings.

https://arxiv.org/abs/1711.09846 (Jaderberg et al.), with truncation selection, and synchronous: all trials wait on disk
at an interval's end, as they do at a rung. So a population depends on its seed alone, and not on who was faster.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hydra_engine import ModelTask, stream_seed
from hydra_engine.sweep.rungs import Birth, Decision, full_rung
from partitioners.plain_numbers import make_plain, plain, whole_number

# User attribute of a trial that began as a fork: the trial in whose state, after how many validations, and instead of
# which one.
PARENT = "parent"


@dataclass(frozen=True, kw_only=True)
class Population:
    """Exploit and explore after every `interval` validations.

    settings: names of values that trials ask for, which may change while a model trains.
    quantile: share of the trials that are the best, and of those that are the worst; at most half. Each of the worst is
        pruned, and a new trial begins in the state of one of the best, drawn at random, with its values.
    resample_probability: for each of the settings, of a new value from its range. Else it is multiplied by one of
        `factors`, within its range; a categorical one moves to a neighbour in its list.
    """

    settings: Sequence[str]
    interval: int = 1
    quantile: float = 0.25
    resample_probability: float = 0.25
    factors: tuple[float, float] = (0.8, 1.2)

    def __post_init__(self) -> None:
        make_plain(self)
        object.__setattr__(self, "factors", tuple(map(plain, self.factors)))
        names = self.settings
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"settings: {names!r}, limit: a list of names; give for example ['lr']")
        if not names or len(set(names)) < len(names):
            raise ValueError(f"settings: {names!r}, limit: at least one name, each once; give those to be perturbed")
        whole_number("interval", self.interval)
        if not 0 < self.quantile <= 0.5:
            raise ValueError(f"quantile: {self.quantile!r}, limit: above 0, and at most 0.5")
        if not 0 <= self.resample_probability <= 1:
            raise ValueError(f"resample_probability: {self.resample_probability!r}, limit: 0 to 1")
        if not self.factors or not all(0 < factor < math.inf for factor in self.factors):
            raise ValueError(f"factors: {self.factors!r}, limit: numbers above 0; give for example (0.8, 1.2)")

    def num_validations(self, rung: int) -> int:
        """Return the number of validations after which trials wait for the decision of this number."""
        return self.interval * (rung + 1)

    def decide(self, trials: Sequence[Any], *, is_complete: bool, maximize: bool, seed: int) -> Decision:
        """Decide who goes on, who is pruned, and who is born; births that are in the study already are left out."""
        found = full_rung(trials, self.num_validations, is_complete=is_complete, maximize=maximize)
        if found is None:
            return Decision()
        num = min(math.ceil(len(found.ranked) * self.quantile), len(found.ranked) // 2)
        best = [each for each, value in found.ranked[:num] if value == value]
        worst = [each for each, _ in found.ranked[len(found.ranked) - num :]] if best else []
        known = {each.user_attrs[PARENT]["instead_of"] for each in trials if PARENT in each.user_attrs}
        births = [self._birth(each, found.rung, best, seed) for each in worst if each.number not in known]
        ends = [each.number for each in worst if each.number in found.here]
        return Decision([number for number in found.here if number not in ends], ends, births)

    def _birth(self, worse: Any, rung: int, best: Sequence[Any], seed: int) -> Birth:
        draws = random.Random(stream_seed(seed, worse.number, rung))
        parent = draws.choice(best)
        params = {
            name: self._explored(value, parent.distributions[name], draws) if name in self.settings else value
            for name, value in parent.params.items()
        }
        parentage = {"trial": parent.number, "validations": self.num_validations(rung), "instead_of": worse.number}
        return Birth(rung + 1, params, dict(parent.distributions), {PARENT: parentage})

    def _explored(self, value: Any, distribution: Any, draws: random.Random) -> Any:
        if draws.random() < self.resample_probability:
            import optuna

            sampler: Any = optuna.samplers.RandomSampler(seed=draws.getrandbits(32))
            return sampler.sample_independent(None, None, "value", distribution)
        factors = (0.5, 2.0) if hasattr(distribution, "choices") else self.factors
        return _moved(value, distribution, draws.choice(factors))

    # -- refused

    def check(self, task: ModelTask, name: str, params: Sequence[str]) -> None:
        """Raise ValueError for a trial's task that cannot be a member; `params`: values that the trial asked for."""
        missing = [each for each in self.settings if each not in params]
        if missing:
            raise ValueError(
                f"population: settings {missing[0]!r}, known of {name}: {', '.join(map(repr, params))}; name values "
                f"that every trial asks for"
            )
        if task.keep_best is not None:
            raise ValueError(
                f"population: {name} has keep_best {task.keep_best.by!r}, limit: none, since members are ranked by "
                f"their last validation; leave it out"
            )
        if task.early_release:
            raise ValueError(
                f"population: {name} has early_release {task.early_release!r}, limit: False, since a fork begins at "
                f"the step of a validation, and a pause may come one step later with it; leave it out"
            )
        if task.optimizer_scope != "shard":
            raise ValueError(
                f"population: {name} has optimizer_scope {task.optimizer_scope!r}, limit: 'shard', whose state can be "
                f"taken over with other options; use an optimizer that needs no other"
            )

    def check_settings(self, task: ModelTask, trial: Any, build: Callable[[dict[str, Any]], Any]) -> None:
        """Raise ValueError for a setting that changes the model or the loader; `build` makes a task of values."""
        params, distributions = trial.params, trial.distributions
        expected = _structure(task)
        for name in self.settings:
            value, distribution = params[name], distributions[name]
            others = [other for factor in (2.0, 0.5) if (other := _moved(value, distribution, factor)) != value]
            for other in others[:1]:
                try:
                    found = _structure(build({**params, name: other}))
                except Exception:  # what build_task makes of such values, trials will tell
                    continue
                changed = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
                if changed:
                    raise ValueError(
                        f"population: settings {name!r} changes {changed[0]}: {expected.get(changed[0])} with {value}, "
                        f"{found.get(changed[0])} with {other}, limit: settings that leave the model and the number of "
                        f"batches as they are; take it out of settings, and each trial keeps the value that it has"
                    )


def _moved(value: Any, distribution: Any, factor: float) -> Any:
    """Return a value times a factor, in its range and on its grid; of a list, the neighbour in this direction."""
    if hasattr(distribution, "choices"):
        choices = distribution.choices
        return choices[min(max(choices.index(value) + (1 if factor > 1 else -1), 0), len(choices) - 1)]
    new, step, low = value * factor, distribution.step, distribution.low
    if step is not None:
        new = low + round((new - low) / step) * step
        if new == value:  # a small int, which a factor would leave as it is for ever
            new += step if factor > 1 else -step
    return type(value)(min(max(new, low), distribution.high))


def _structure(task: Any) -> dict[str, Any]:
    """Return what a fork must have in common: shapes by name, and the number of batches of a loader that knows it."""
    tensors = (*task.model.named_parameters(), *task.model.named_buffers())
    found: dict[str, Any] = {name: (list(each.shape), each.dtype, each.requires_grad) for name, each in tensors}
    with suppress(TypeError, NotImplementedError):
        found["the number of batches"] = len(task.dataloader)
    return found
