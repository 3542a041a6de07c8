"""A sweep on many machines, by Ray: the study stays with the caller, and each node trains trials in one engine.

    caller                            Ray                                 process on a node
    ClusterSearch                     train.remote(settings)  --------->  NodeEngine.train: a thread runs Search
      Handout.answer     <---------   Request, as it is yielded  -------  NodeTrials, NodeTrial: "next", "prunes", ...
      Trials, the study  --------->   answer.remote(number, ...)  ----->  NodeEngine.answer: who asked goes on

Ray places the processes, carries messages, and says who is gone. A node's process is thrown away with its node; what it
has saved is in a directory of its own, from which any other goes on.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, cast
from uuid import uuid4

import torch

from hydra_engine.sweep.folder import NODE
from hydra_engine.sweep.live import name_of
from hydra_engine.sweep.search import Search, SearchSettings
from hydra_engine.sweep.study import Trials, is_of_space, load_optuna, say_progress

# A head that does not take a connection is given up after this.
CONNECT_TIMEOUT_S = 5.0
# Nodes that have joined are looked for this often.
POLL_S = 1.0
# A sweep without any node waits for one this long.
JOIN_TIMEOUT_S = 600.0
# A trial that was lost more often than this, with a node or a process, has failed: it may be what ends them.
MOST_LOSSES = 10
# A node on which so many processes ended before they asked for a trial ends the sweep.
MOST_STARTS = 3


def load_ray() -> Any:
    """Import Ray, which everything but clusters does without."""
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "cluster: ray is not installed, limit: a sweep on many machines needs it, on each of them; "
            "`pip install hydra_engine[ray]`, or `pip install ray`"
        ) from error
    return ray


@contextmanager
def connected(cluster: str) -> Iterator[Any]:
    """Be connected to a cluster, by the program's own connection if it has one; ConnectionError within seconds."""
    ray = load_ray()
    if ray.is_initialized():
        address = ray.get_runtime_context().gcs_address
        if cluster not in ("auto", address):
            raise ValueError(
                f"cluster: {cluster!r}, limit: {address!r}, to which this program is connected; give 'auto', or call "
                f"ray.shutdown() before"
            )
        yield ray
        return
    remedy = "give 'auto' on a machine of a cluster that `ray start` has begun, or HOST:PORT of its head"
    address = os.environ.get("RAY_ADDRESS", cluster) if cluster == "auto" else cluster
    try:
        if address != "auto":  # Ray itself would try for two minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(address=address)
    except (OSError, ValueError, RuntimeError, SystemExit) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConnectionError(f"cluster: {address!r} cannot be reached: {said}; {remedy}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


# -- on a node


class Request(NamedTuple):
    """A question of a node to the caller; the answer is of the same number."""

    number: int
    method: str
    args: tuple[Any, ...]


class NodeObject:
    """An object of Optuna's that the caller has: what it is asked for, and what is called, goes there."""

    def __init__(self, kind: type, ask: Callable[..., Any]) -> None:
        """`ask`: with the name of an attribute, and the arguments of one that is a method."""
        self._kind = kind
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also what copying and pickling look for
            raise AttributeError(f"{type(self).__name__} has no {name}: it is with the caller")
        if not callable(getattr(self._kind, name, None)):
            return self._ask(name)
        return lambda *args, **kwargs: self._ask(name, args, kwargs)


class NodeTrial(NodeObject):
    """An Optuna trial that the caller has."""

    def __init__(self, number: int, ask: Callable[..., Any]) -> None:
        optuna = load_optuna()
        super().__init__(optuna.trial.Trial, partial(ask, "of_trial", number))
        self.number = number
        self.study = NodeObject(optuna.Study, partial(ask, "of_study"))


class NodeTrials:
    """`Trials` that the caller has, for the `Search` of a node."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask
        self.has_pruning = ask("has_pruning")

    @property
    def progress(self) -> Any:
        return self._ask("progress")

    def next(self) -> NodeTrial | None:
        number = self._ask("next")
        return None if number is None else NodeTrial(number, self._ask)

    def interrupt(self, error: BaseException, *, go_on: bool) -> list[Any]:
        """The caller knows which trials a node has, and is told of its error."""
        return []

    def climb(self) -> list[Any]:
        """The caller decides about rungs, before it gives a trial out."""
        return []

    def __getattr__(self, method: str) -> Any:
        return lambda trial, *args: self._ask(method, trial.number, *args)


class NodeEngine:
    """The engine of one node, in a process of Ray's."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._numbers = count()
        self._answers: dict[int, Future[Any]] = {}
        self._search: Search | None = None
        self._error: BaseException | None = None

    def train(self, make: Callable[[Trials], Search], num_threads: int) -> Iterator[Request]:
        """Train trials until the caller has no more, by the search that `make` gives; yield what is asked meanwhile."""
        thread = threading.Thread(target=self._train, args=(make, num_threads), name="sweep-node", daemon=True)
        thread.start()
        while (request := self._requests.get()) is not None:
            yield request
        thread.join()
        if self._error is not None:
            raise self._error

    def answer(self, number: int, result: Any, error: BaseException | None) -> None:
        """Let who asked go on, with a result or an error."""
        future = self._answers.pop(number)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def look_again(self) -> None:
        """Trials were given back, for which there may be room."""
        if self._search is not None:
            self._search.look_again()

    def _train(self, make: Callable[[Trials], Search], num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # the caller's, on which bits depend
        try:
            self._search = make(cast(Trials, NodeTrials(self._ask)))
            self._search.run()
        except SystemExit as end:  # a device is lost, and with it this process; the trials go on in another
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):  # a pipe that is closed must not keep the process
                    stream.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        except BaseException as error:
            self._error = error
        finally:
            self._requests.put(None)

    def _ask(self, method: str, *args: Any) -> Any:
        number, future = next(self._numbers), Future[Any]()
        self._answers[number] = future
        self._requests.put(Request(number, method, args))
        return future.result()


# -- with the caller


class Handout:
    """Answers the nodes' requests by the study, and knows which node has which trial."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._given: dict[int, Any] = {}  # all that were ever given out, by number
        self._holders: dict[int, str] = {}  # names of the nodes that train them
        self._losses: Counter[int] = Counter()
        self.first_failure: str | None = None
        self.num_well = 0  # trials that did not fail

    def answer(self, node: str, method: str, *args: Any) -> Any:
        """Do what a node has asked for; raises what Optuna or its storage raises."""
        if method in ("has_pruning", "progress"):
            return getattr(self._trials, method)
        if method == "of_study":
            return _asked(self._trials.study, *args)
        if method == "next":
            self.climb()
            trial = self._trials.next()
            if trial is None:
                return None
            self._given[trial.number], self._holders[trial.number] = trial, node
            return trial.number
        number, *rest = args
        if method == "of_trial":
            return _asked(self._given[number], *rest)
        result = getattr(self._trials, method)(self._given[number], *rest)
        self.num_well += method in ("complete", "prune") or (method == "prunes" and result)
        if method == "fail":
            self.first_failure = self.first_failure or f"{name_of(self._given[number])}: {rest[0]}"
        if method in ("complete", "prune", "fail", "rest", "put_back") or (method == "prunes" and result):
            self._holders.pop(number, None)
        return result

    def climb(self) -> None:
        for trial in self._trials.climb():
            self.num_well += 1
            say_progress(f"{self._trials.progress}; trial {trial.number}: pruned at its rung")

    def give_back(self, node: str) -> list[int]:
        """Let the trials of a node that is gone be the next ones, and return their numbers."""
        numbers = sorted(number for number, holder in self._holders.items() if holder == node)
        for number in reversed(numbers):
            del self._holders[number]
            self._losses[number] += 1
            if self._losses[number] > MOST_LOSSES:
                error = f"lost with {self._losses[number]} nodes, limit: {MOST_LOSSES}; see their logs"
                self._trials.fail(self._given[number], error)
                self.first_failure = self.first_failure or f"trial-{number}: {error}"
            else:
                self._trials.put_back(self._given[number])
        return numbers


def _asked(thing: Any, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    found = getattr(thing, name)
    return found(*args, **(kwargs or {})) if callable(found) else found


@dataclass(eq=False)
class Member:
    """A node that has an engine."""

    node_id: str
    shown: str
    actor: Any
    name: str  # of its process: of its directory, too
    requests: Any = None  # what `train` yields; None: there was no trial for it
    has_asked: bool = False


class ClusterSearch:
    """Trains the trials of one call on the nodes of a cluster; thrown away after it."""

    def __init__(
        self, cluster: str, settings: SearchSettings, trials: Trials, checkpoints: Path | None, verbose: int
    ) -> None:
        """`checkpoints`: folder of the trials' checkpoints; None: they are not saved."""
        self._cluster = cluster
        self._trials = trials
        self._handout = Handout(trials)
        self._settings = settings
        self._checkpoints = checkpoints
        self._verbose = verbose
        self._ray: Any = None
        self._members: list[Member] = []
        self._failed_starts: Counter[str] = Counter()  # of nodes, whose processes ended before they asked
        self._looked_s = self._had_nodes_s = time.monotonic()

    def run(self) -> None:
        with connected(self._cluster) as self._ray:
            try:
                self._meet()
                if not self._members:
                    raise ConnectionError(
                        f"cluster: {self._cluster!r} has no node with a CPU, limit: 1; start one with `ray start "
                        f"--address={self._ray.get_runtime_context().gcs_address}`"
                    )
                while self._go_on():
                    pass
            except BaseException as error:
                self._trials.interrupt(error, go_on=self._checkpoints is not None)
                raise
            finally:
                for member in self._members:
                    self._ray.kill(member.actor)

    def check(self) -> None:
        if self._handout.first_failure is not None and not self._handout.num_well:
            raise RuntimeError(self._handout.first_failure)

    def _go_on(self) -> bool:
        """Hear one node, or look for new ones; False where no trial is left to train."""
        if time.monotonic() - self._looked_s >= POLL_S:
            self._meet()
        if self._trials.has_more:
            for member in self._members:
                if member.requests is None:
                    self._begin(member)
        busy = [member for member in self._members if member.requests is not None]
        if not any(member.has_asked for member in busy) and not self._trials.has_more:
            self._handout.climb()
            if not self._trials.has_more:
                return False  # processes that Ray has not placed yet are not needed
        if not busy:
            self._wait_for_nodes()
            return True
        ready, _ = self._ray.wait([member.requests for member in busy], timeout=POLL_S)
        for member in busy:
            if member.requests in ready:
                before = self._trials.num_waiting
                self._hear(member)
                if self._trials.num_waiting > before:
                    for other in self._members:
                        if other is not member and other.requests is not None:
                            other.actor.look_again.remote()
        return True

    def _wait_for_nodes(self) -> None:
        """All nodes are gone, and trials are left."""
        if self._members:
            return
        if time.monotonic() - self._had_nodes_s > JOIN_TIMEOUT_S:
            raise ConnectionError(
                f"cluster: {self._cluster!r} had no node for {JOIN_TIMEOUT_S:g} s; start nodes, and run the sweep again"
            )
        time.sleep(POLL_S)

    def _meet(self) -> None:
        """Begin a process on each node that has none."""
        self._looked_s = time.monotonic()
        known = {member.node_id for member in self._members}
        for node in self._ray.nodes():
            if node["Alive"] and node["Resources"].get("CPU", 0) >= 1 and node["NodeID"] not in known:
                self._add(node)
        if self._members:
            self._had_nodes_s = self._looked_s

    def _add(self, node: dict[str, Any]) -> None:
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        # All GPUs of the node are the engine's. One thread trains, others answer.
        options = {"num_cpus": 1, "num_gpus": node["Resources"].get("GPU", 0), "max_concurrency": 4}
        actor = self._ray.remote(NodeEngine).options(**options, scheduling_strategy=strategy).remote()
        shown = f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"
        self._members.append(Member(node["NodeID"], shown, actor, f"{NODE}{uuid4().hex[:12]}"))
        self._tell(f"node {shown} joins")

    def _begin(self, member: Member) -> None:
        train = member.actor.train.options(num_returns="streaming")
        make = partial(Search, self._settings, checkpoints=self._checkpoints, verbose=self._verbose, node=member.name)
        member.requests = train.remote(make, torch.get_num_threads())

    def _hear(self, member: Member) -> None:
        """Answer a node's request, or note that it has no more, or is gone. Raises what ends the sweep."""
        errors = self._ray.exceptions
        try:
            request = self._ray.get(next(member.requests))
        except StopIteration:
            member.requests = None
            return
        except errors.RayTaskError as error:  # which shows where it was raised on the node
            raise error.cause from error
        except errors.RayError as error:
            self._lose(member, error)
            return
        member.has_asked = True
        result = raised = None
        try:
            result = self._handout.answer(member.name, request.method, *request.args)
        except Exception as error:
            error.is_of_space = is_of_space(error)  # type: ignore[attr-defined]  # its traceback stays here
            raised = error
        member.actor.answer.remote(request.number, result, raised)

    def _lose(self, member: Member, error: Exception) -> None:
        self._members.remove(member)
        self._ray.kill(member.actor)  # if it only could not be reached
        trials = ", ".join(f"trial-{number}" for number in self._handout.give_back(member.name)) or "no trial"
        self._tell(f"node {member.shown} is gone, and gives back {trials}")
        self._failed_starts[member.node_id] += not member.has_asked
        if self._failed_starts[member.node_id] >= MOST_STARTS:
            raise RuntimeError(
                f"cluster: no process begins on node {member.shown}, limit: {MOST_STARTS} attempts: {error}; see its "
                f"logs"
            ) from error

    def _tell(self, text: str) -> None:
        if self._verbose:
            say_progress(text)
