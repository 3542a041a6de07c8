"""A command line that is refused."""

import pytest

from hydra_engine.cli import main


@pytest.fixture
def refused(capsys):
    """Runs the command and returns the one line it wrote."""

    def refused(*arguments):
        try:
            code = main(list(arguments))
        except SystemExit as ended:  # argparse's way
            code = ended.code
        out, err = capsys.readouterr()
        assert (code, out) == (2, ""), err
        assert err.startswith("hydra-engine")
        assert err.count("\n") == 1, err
        return err

    return refused
