"""A promise is kept or broken once, and whoever waits learns which."""

import threading

from hydra_engine.devices.lanes import Promise
from tests.refused import refused


def test_kept_promise_gives_its_value_to_everybody():
    promise = Promise()
    assert not promise.is_done
    promise.keep(None)
    assert promise.is_done
    assert promise.is_kept()
    assert promise.result() is None
    assert promise.result() is None


def test_broken_promise_raises_why():
    promise = Promise()
    promise.give_up(ZeroDivisionError("why"))
    assert promise.is_done
    assert not promise.is_kept()
    for _ in range(2):
        with refused(ZeroDivisionError, says="why"):
            promise.result()


def test_several_threads_wait_for_one_value():
    promise, found = Promise(), []
    threads = [threading.Thread(target=lambda: found.append(promise.result())) for _ in range(3)]
    for thread in threads:
        thread.start()
    promise.keep(7)
    for thread in threads:
        thread.join()
    assert found == [7, 7, 7]
