"""The thread that writes: whom it lets go on, and when."""

import threading

from hydra_engine.checkpoint_directory import CheckpointDirectory
from hydra_engine.saver import Every, Saver
from tests.checkpoints import FailingDisk, what_takes_room

PATIENCE_S = 60


class Taken:
    """Stands for a snapshot whose task waits for the disk."""

    def __init__(self, name):
        self.name, self.steps, self.over, self.loss, self.error, self.files = name, 1, None, None, None, {}
        self.is_done = threading.Event()

    def done(self):
        self.is_done.set()


def test_where_a_round_fails_no_task_waits_for_another_one_to_be_captured(tmp_path):
    """Its update might wait in the very thread that is to capture the other one."""
    disk = FailingDisk(100, what_takes_room)
    with CheckpointDirectory(tmp_path, disk=disk) as directory:
        disk.num_left = 0
        saver = Saver(directory, Every.parse(1), dict, {})
        saver.begin(["a", "b", "c"])
        for name in "ab":
            taken = Taken(name)
            saver.give(name, taken)()
            assert taken.is_done.wait(PATIENCE_S), name
        saver.close()
    assert saver.report.num_failed == 1
