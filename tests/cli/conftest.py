"""A command line, run in this process."""

import shlex

import pytest

from hydra_engine.cli import main
from tests.refused import names


@pytest.fixture
def said(capsys):
    """Runs a line; returns its exit code, its lines and those on stderr. The last of these names the command."""

    def said(line):
        try:
            code = main(shlex.split(line))
        except SystemExit as ended:  # argparse's way
            code = ended.code
        out, err = capsys.readouterr()
        errors = err.splitlines()
        assert bool(errors) == (code != 0), err
        assert not errors or errors[-1].startswith("hydra-engine"), err
        return code, out.splitlines(), errors

    return said


@pytest.fixture
def refused(said):
    """Runs a line that is refused, before any output and in one line, which names what `says` says; returns it."""

    def refused(line, says, **named):
        code, lines, errors = said(line)
        assert (code, lines, len(errors)) == (2, [], 1), errors
        names(errors[0], says=says, **named)
        return errors[0]

    return refused
