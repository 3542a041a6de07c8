"""Processes of tests: forked from one server that has loaded torch and the engine, in a tenth of a second each."""

import multiprocessing
import os
import sys
import traceback

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "hydra_engine", "tests.zoo", "tests.exact", "tests.reference"])


def start(function, *args):
    """Start `function(*args)` in a process of its own and return that process. What it prints is not captured.

    The function and its arguments are pickled, so a function is one of a module's top level.
    """
    process = _CONTEXT.Process(target=_call, args=(os.environ.get("PYTEST_CURRENT_TEST", ""), None, function, args))
    process.start()
    return process


def run(function, *args, timeout_s=100):
    """Return what `function(*args)` returns in a process of its own. What it raises is an AssertionError here.

    A process that ends without a result, because something kills it, raises ProcessEnded.
    """
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_call, args=(os.environ.get("PYTEST_CURRENT_TEST", ""), sender, function, args))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            raise AssertionError(f"{function.__name__} did not end within {timeout_s} s")
        succeeded, result = receiver.recv()
    except EOFError:
        process.join()
        raise ProcessEnded(process.exitcode) from None
    finally:
        process.kill()
        process.join()
        receiver.close()
    assert succeeded, result
    return result


class ProcessEnded(Exception):
    """A process ended without a result; `exitcode` is negative for a signal."""

    def __init__(self, exitcode):
        super().__init__(f"exit code {exitcode}")
        self.exitcode = exitcode


def _call(test, sender, function, args):
    import torch

    os.environ["PYTEST_CURRENT_TEST"] = test
    if "coverage" in sys.modules and (current := sys.modules["coverage"].Coverage.current()):  # see tests/mutants.py
        current.switch_context(test)
    torch.set_num_threads(1)
    if sender is None:
        function(*args)
        return
    try:
        sender.send((True, function(*args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
