"""`hydra-engine devices`: what it prints, and every refusal in one line; without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_control import FakePool, steered

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pool(tmp_path):
    found = FakePool(**{"cuda:0": "in", "cuda:1": "out"})
    with steered(found, tmp_path):
        yield found


def test_places_are_listed_and_changed(pool, tmp_path, said):
    for order, *lines in (
        ("list {}", "cuda:0: in", "cuda:1: out"),
        ("add {} cuda:1", "cuda:1: in"),
        ("remove {} cuda:0", "cuda:0: leaving"),
        ("remove {} cuda:1 --grace 2.5", "cuda:1: leaving"),
        ("list {}", "cuda:0: leaving", "cuda:1: leaving"),
    ):
        assert said(f"devices {order.format(tmp_path)}") == (0, lines, [])
    assert pool.orders[1:] == [("remove", "cuda:0", None), ("remove", "cuda:1", 2.5)]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("add {} cuda:0", "add_device: 'cuda:0'"),
        ("remove {} cuda:7", "remove_device: 'cuda:7' 'cuda:1'"),
        ("list {} cuda:0", "NAME: 'cuda:0' list"),
        ("add {} cuda:1 --grace 3", "--grace: 3 add"),
        ("remove {} cuda:0 --grace=-1", "--grace: '-1'"),
        ("remove {} cuda:0 --grace inf", "--grace: 'inf'"),
    ],
)
def test_refusals_are_one_line(pool, tmp_path, refused, order, says):
    assert refused(f"devices {order.format(tmp_path)}", says).startswith("hydra-engine devices: ")
    assert pool.devices == {"cuda:0": "in", "cuda:1": "out"}


def test_it_needs_no_torch(tmp_path):
    """Nor does the parser."""
    script = "import sys; from hydra_engine.cli import command, main; command.parser()"
    script += f"; main(['devices', 'list', {str(tmp_path)!r}])"
    script += "; assert 'hydra_engine.cli.devices' in sys.modules; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, capture_output=True)
