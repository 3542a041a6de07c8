"""Coverings: few cases of a product of factors that still have every pair of values.

    @covering(shards=[[5], [1, 3, 5]], steps=[1, 3], chaos=[None, 7])
    def test_something(shards, steps, chaos): ...

`make test` runs the covering. The other cases of the product carry the marker `rest`, and `make test-all` runs them.
"""

import random
from itertools import combinations, product

import pytest


def covering(*, strength=2, ids=None, **factors):
    """Parametrize a test over the product of `factors`; cases outside a covering are marked `rest`.

    A covering of `strength` 2 has every pair of values of every two factors; one of strength 1 has every value.
    `ids` turns a value into its text, as in pytest.
    """
    names = list(factors)
    indices = {name: range(len(values)) for name, values in factors.items()}  # values need not be hashable
    covered = {tuple(case.values()) for case in cover(indices, strength=strength)}
    cases = []
    for chosen in product(*indices.values()):
        values = [factors[name][k] for name, k in zip(names, chosen, strict=True)]
        cases.append(pytest.param(*values, marks=() if chosen in covered else pytest.mark.rest))
    return pytest.mark.parametrize(",".join(names), cases, ids=ids)


def chosen(values, net):
    """Parametrize over `values`; those that are not in `net` are marked `rest`."""
    return [pytest.param(each, marks=() if each in net else pytest.mark.rest) for each in values]


def cover(factors, *, strength=2, num_cases=0, num_candidates=60, seed=0):
    """Return cases (a dict each) that have every combination of values of every `strength` factors.

    Deterministic for a seed. The choice is greedy; random cases follow until there are `num_cases` different ones.
    """
    rng = random.Random(seed)
    strength = min(strength, len(factors))
    missing = {
        tuple(zip(names, values, strict=True))
        for names in combinations(factors, strength)
        for values in product(*(factors[name] for name in names))
    }
    cases = []
    while missing:
        forced = min(missing, key=repr)  # each case covers at least one missing combination, so this ends
        candidates = [
            {factor: rng.choice(values) for factor, values in factors.items()} | dict(forced)
            for _ in range(num_candidates)
        ]
        best = max(candidates, key=lambda case: len(missing & parts(case, strength)))
        best = _improved(best, factors, forced, missing, strength)
        missing -= parts(best, strength)
        cases.append(best)
    while len(cases) < num_cases:
        case = {factor: rng.choice(values) for factor, values in factors.items()}
        if case not in cases:
            cases.append(case)
    return cases


def parts(case, strength=2):
    """Every combination of `strength` pairs (factor, value) of a case."""
    return set(combinations(case.items(), strength))


def _improved(case, factors, forced, missing, strength):
    """Change one factor at a time for as long as that covers more missing combinations."""
    while True:
        neighbours = [
            case | {factor: value} for factor in factors if factor not in dict(forced) for value in factors[factor]
        ]
        best = max(neighbours, key=lambda other: len(missing & parts(other, strength)), default=case)
        if len(missing & parts(best, strength)) <= len(missing & parts(case, strength)):
            return case
        case = best
