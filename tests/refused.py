"""How tests check errors: by type, task, layer and value, and never by their sentences."""

from contextlib import contextmanager

import pytest


@contextmanager
def refused(error=ValueError, *, task=None, layer=None, says=""):
    """Expect the block to raise `error`, whose text is checked by `names`; gives pytest's ExceptionInfo."""
    with pytest.raises(error) as caught:
        yield caught
    try:
        names(caught.value, task=task, layer=layer, says=says)
    finally:
        del caught  # its traceback holds this frame: a cycle that would keep what the test waits to see freed


def names(error, *, task=None, layer=None, says=""):
    """Assert that an error, or its text, names the task, the layer and every word of `says`.

    `says` is at most three words, separated by spaces: names of options, values, files. Upper and lower case are alike.
    """
    words = str(says).split()
    assert len(words) <= 3, f"says={says!r}: at most three words; an error's sentence may be rewritten"
    text = str(error)
    for word in (task, layer, *words):
        assert word is None or str(word).lower() in text.lower(), f"no {word!r} in {type(error).__name__}: {text}"
