"""Calls a task's callbacks, in a thread of the task's own, one call at a time, and takes over what they change."""

from __future__ import annotations

import threading
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hydra_engine.data import GLOBAL_GENERATORS, Stream, UserDraws, copy_of, identical
from hydra_engine.errors import CallbackTimeout, PauseTask, StopTask
from hydra_engine.host import LentWeights, Slot, TaskState, has_hooks
from hydra_engine.run.ending import TaskEnd
from hydra_engine.schedule import Event, Failed, TaskStopped
from hydra_engine.tasks import Callback, ModelWatch, TaskReport, is_called
from partitioners.boundary import extent_bytes

# After Ctrl-C, SIGTERM or a lost device, no call is waited for any longer: what sends SIGTERM often kills after 30 s.
INTERRUPTED_S = 10.0


class _Call(NamedTuple):
    """One call of each of the task's callbacks."""

    hook: str  # the method's name
    arguments: tuple[Any, ...] = ()
    always: bool = False  # also once the task is stopped


class UsersModel:
    """A task's model between two steps, when it is its user's: has the last step's values, and may be changed.

    While a call has it, nothing of the task is under way. Devices load trainable weights anew with each step; those at
    home there are brought to DRAM as a call touches them. Devices have copies of modules, which are made anew where a
    call has changed one, and keep frozen weights: where there are some, or weights are cast, split or at home on
    devices, the functions of torch that a call makes show which of them it touches.
    """

    def __init__(
        self, state: TaskState, secure: Callable[[Iterable[int] | None], None], refresh: Callable[[TaskState], None]
    ) -> None:
        """`secure`: waits until parameters, by slot, may change. refresh: has devices copy modules anew."""
        self._state, self._secure, self._refresh = state, secure, refresh
        model, layout = state.task.model, state.layout
        roots = model.__dict__["source"], model, state.task.loss_fn
        self._watch = ModelWatch(*roots, is_recorded=model.is_converted)
        self._parameters = [slot.parameter for slot in layout.slots]
        self._trainable = [slot.index for slot in layout.trainable_slots()]
        self._buffers = [
            (layer.get_submodule(path), name, index)
            for layer, bindings in zip(layout.layers, layout.buffer_bindings, strict=True)
            for path, name, index in bindings
        ]
        self._shown: list[Tensor] = []  # values of buffers that the user's modules have
        self._is_followed = layout.narrow is not None or len(self._trainable) < len(layout.slots)
        self.is_changed = False  # by a call, ever
        self.is_over = False  # what calls do from now on is nobody's

    @contextmanager
    def lent(self, who: str) -> Iterator[None]:
        """Run the body, which calls `who`. Raises ValueError where that has changed what no run can take."""
        self._secure(self._trainable)
        self._show_buffers()
        weights = LentWeights(self._state.pool)
        is_followed = self._is_followed or self._state.homes.num_layers > 0
        touched = _Touched(self._state, self._secure) if is_followed else None
        try:
            with nullcontext() if touched is None else touched:
                yield
        except BaseException:
            with suppress(ValueError):  # it has ended the task
                self._take_over(touched, weights)
            raise
        try:
            self._take_over(touched, weights)
        except ValueError as error:
            raise ValueError(f"{who} {error}") from error

    def _show_buffers(self) -> None:
        values = self._state.pool.buffers
        changed = {k for k, value in enumerate(values) if k >= len(self._shown) or value is not self._shown[k]}
        if changed:
            self._state.layout.put_buffers(values, changed)
            self._shown[:] = values
        self._watch.take_buffers()

    def _take_over(self, touched: _Touched | None, weights: LentWeights) -> None:
        if self.is_over:
            return
        slots = {} if touched is None else touched.end()
        for parameter in self._parameters:
            parameter.grad = None  # of a backward of the call's own, as the next step's zero_grad has it
        state, has_buffers = self._state, self._take_buffers()
        is_other = self._watch.has_changed()
        with state.homes.lock:
            weights.take_over(slots)
        state.num_commits += 1  # what devices hold of trained shards is of no more use
        self.is_changed |= is_other or has_buffers or weights.are_written_to
        if state.homes.num_layers and has_hooks(state.layout):  # which act on what DRAM has
            state.homes.num_layers = 0
            state.homes.close_all()
        if is_other:
            thawed = next((s for s in state.layout.slots if s.parameter.requires_grad and not s.trainable), None)
            if thawed is not None:
                raise ValueError(
                    f"set requires_grad of parameter {thawed.name!r}, which was frozen as the task was made; let it "
                    f"require gradients then, and freeze it in on_epoch_begin for the first epoch"
                )
            state.task.model.record_anew()
            self._refresh(state)

    def _take_buffers(self) -> bool:
        """Take over buffers of the user's modules that are others than those of the last step."""
        layout, values, is_changed = self._state.layout, self._state.pool.buffers, False
        for module, name, index in self._buffers:
            own, value = layout.buffers[index], module._buffers.get(name)
            if value is not None and value is not own and (value.shape, value.dtype) == (own.shape, own.dtype):
                module._buffers[name] = own  # which devices' copies are made around
                own.copy_(value)
            if not identical(own, values[index]):
                values[index] = self._shown[index] = copy_of(own, 0)
                is_changed = True
        return is_changed


class _Touched(TorchFunctionMode):
    """Notes the parameters that functions of torch's take, before they read or write them.

    Those that are split are shown, and those that are at home on a device are brought.

    What a function may return is of the same memory, and found by its address.
    """

    def __init__(self, state: TaskState, secure: Callable[[Iterable[int] | None], None]) -> None:
        super().__init__()
        self._pool, self._masters, self._secure = state.pool, state.pool.masters, secure
        self._homes = state.homes
        places = ((slot.parameter.data_ptr(), extent_bytes(slot.parameter), slot) for slot in state.layout.slots)
        self._spans: list[tuple[int, int, Slot]] = sorted(places, key=lambda span: span[0])
        self._found: dict[int, int | None] = {}  # checksums before that

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # What is traced to be compiled is not looked at: dynamo would trace this, too.
        for each in () if torch.compiler.is_compiling() else pytree.arg_tree_leaves(*args, **(kwargs or {})):
            if isinstance(each, Tensor) and each.layout == torch.strided and each.device.type == "cpu":
                self._touch(each)
        return func(*args, **(kwargs or {}))

    def _touch(self, tensor: Tensor) -> None:
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return  # of a class that may have no memory, as fake tensors have none
        place = tensor.data_ptr()
        k = bisect(self._spans, place, key=lambda span: span[0]) - 1
        while k >= 0 and place < self._spans[k][0] + self._spans[k][1]:
            index = self._spans[k][2].index
            if index not in self._found:
                self._secure([index])
                self._found[index] = self._pool.checksum(index)
                self._homes.show(index)
                if index in self._masters:
                    self._masters[index].show()
            k -= 1  # an empty one, or another name of the same memory

    def end(self) -> Mapping[int, int | None]:
        """Take over split weights that were shown, and hide them; return the slots touched, with checksums before."""
        for master in (self._masters[index] for index in self._found if index in self._masters):
            master.keep()
            master.hide()
        return self._found


class Recipients(NamedTuple):
    """A task's callbacks, and what they are called with."""

    callbacks: Sequence[Callback]
    report: TaskReport
    draws: UserDraws
    stream: Stream  # the task's, which the calls' random draws move


class Lending(NamedTuple):
    """What callbacks have of a task while it trains."""

    model: UsersModel | None = None  # if calls read it
    after_step: Callable[[], None] = lambda: None  # called once the calls of a step have returned


class Notifier:
    """Tells one task's callbacks what happened, until one of them ends the task; the task's end is told all the same.

    The thread is made for the first call. It is a daemon: a callback that does not return in time is left behind in it,
    nothing more is told, and what waited for it goes on. What a callback raises goes to `put` as an event.
    """

    def __init__(
        self,
        recipients: Recipients,
        end: TaskEnd,
        put: Callable[[Event], None],
        *,
        timeout_s: float | None = None,
        num_threads: int = 1,
    ) -> None:
        """`timeout_s`: of one call of one callback; None: for ever. `num_threads`: intra-op, of the thread."""
        callbacks = recipients.callbacks
        self.timeout_s = timeout_s if callbacks else None  # of a call; None also where there is nobody to call
        self.waits = is_called(callbacks, "on_step")  # the next batch is read once its calls have returned
        self.reads_model = any(each.reads_model for each in callbacks)
        self._recipients = recipients
        self._end = end
        self._put = put
        self._num_threads = num_threads
        self._lock = threading.Lock()  # of all below
        # Calls, and jobs to be run once the calls before them were told.
        self._queue: SimpleQueue[_Call | Callable[[], None] | None] = SimpleQueue()
        self._held: list[_Call | Callable[[], None]] | None = None  # for `let_go`; None: none has to wait
        self._num_untold = 0  # calls, the one in progress too
        self._thread: threading.Thread | None = None
        self._now: tuple[str, float] | None = None  # what is being called, and since when, by time.monotonic()
        self._is_left = False  # the thread, to itself
        self.lending = Lending()  # while the task trains

    def end_lending(self) -> None:
        """The model is its user's for good: nothing refers to the task any more."""
        self.lending = Lending()

    def epoch_begin(self, epoch: int) -> None:
        """An epoch's iterator is about to be opened."""
        self._submit(_Call("on_epoch_begin", (epoch,)))

    def step(self, *, is_updated: bool = True) -> None:
        """A step was committed. Where updates go on, calls that read the model come at `let_go`."""
        if not is_updated and self.reads_model:
            with self._lock:
                self._held = self._held or []
        if self.waits:
            self._submit(_Call("on_step"))

    def validation(self) -> None:
        """A validation is over."""
        self._submit(_Call("on_validation"))

    def epoch(self, epoch: int) -> None:
        """An epoch is over."""
        self._submit(_Call("on_epoch", (epoch,)))

    def end(self, *, is_paused: bool = False) -> None:
        """The task is over; is_paused: for now."""
        self._submit(_Call("on_task_pause" if is_paused else "on_task_end", always=True))

    def let_go(self) -> None:
        """The updates of the last step are through: call what waited for them."""
        with self._lock:
            held, self._held = self._held or [], None
            for each in held:
                self._enter(each)

    @property
    def is_told(self) -> bool:
        """True once the callbacks have seen everything so far, or if they never will."""
        with self._lock:
            return self._is_left or not self._num_untold

    @property
    def is_left(self) -> bool:
        """True if a callback did not return, and its thread was left to itself."""
        with self._lock:
            return self._is_left

    def when_told(self, job: Callable[[], None]) -> None:
        """Run `job`, short, once the callbacks have seen everything so far: until then the report stays as it is."""
        with self._lock:
            if not self._is_left and self._num_untold:
                self._enter(job)
                return
        job()

    def hurry(self) -> None:
        """The run is interrupted: from now on a call has no more than `INTERRUPTED_S`."""
        with self._lock:
            self.timeout_s = INTERRUPTED_S
            if self._now is not None:
                self._now = (self._now[0], time.monotonic())

    def leave_behind(self, *, fails: bool = True) -> float | None:
        """Leave the thread to itself if a call is late; else seconds until one could be.

        `fails`: so does the task then. What waits for its callbacks goes on. A lock on the process-wide generators that
        the thread holds, planning another task, is taken away from it.
        """
        with self._lock:
            assert self.timeout_s is not None
            late_s = 0.0 if self._now is None else time.monotonic() - self._now[1]
            if self._now is None or late_s < self.timeout_s:
                return self.timeout_s - late_s
            self._leave()
            failed = None
            if fails:
                error = CallbackTimeout(self._recipients.report.name, self._now[0], self.timeout_s, self.thread_name)
                failed = Failed(self._recipients.report.name, error, "its callback")
                self._end.fail(failed, commits=False)
            waiting = []
            while not self._queue.empty():
                waiting.append(self._queue.get())
            waiting += self._held or ()
        if failed is not None:
            self._put(failed)
        for each in waiting:
            if each is not None and not isinstance(each, _Call):
                each()
        return None

    def _leave(self) -> None:
        assert self._thread is not None
        self._is_left = True
        if self.lending.model is not None:
            self.lending.model.is_over = True
        GLOBAL_GENERATORS.take_from(self._thread.ident)

    @property
    def thread_name(self) -> str:
        """Name of the thread that calls."""
        return f"{self._recipients.report.name}-callbacks"

    def close(self) -> str | None:
        """End the thread; where a callback does not return, its name: the thread is left behind."""
        self._queue.put(None)
        if self._thread is None:
            return None
        self._thread.join(0.0 if self._is_left else INTERRUPTED_S)  # who is late already is not waited for again
        with self._lock:
            if not self._thread.is_alive() or self._now is None:
                return None
            self._leave()
            return self._now[0]

    def _submit(self, call: _Call) -> None:
        with self._lock:
            if not self._recipients.callbacks or self._is_left:
                return
            self._num_untold += 1
            self._enter(call)

    def _enter(self, each: _Call | Callable[[], None]) -> None:
        if self._held is not None:
            self._held.append(each)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self.thread_name, daemon=True)
            self._thread.start()
        self._queue.put(each)

    def _serve(self) -> None:
        torch.set_num_threads(self._num_threads)
        while (each := self._queue.get()) is not None:
            if not isinstance(each, _Call):
                each()
                continue
            self._tell(each)
            with self._lock:
                if self._is_left:
                    return
                self._num_untold -= 1

    def _tell(self, call: _Call) -> None:
        if self._end.is_stopped and not (self._end.is_early or call.always):
            return  # its user, a callback or a failure has ended the task at once: they are told its end alone
        callbacks, report, draws, stream = self._recipients
        model = self.lending.model
        try:
            kinds = " or ".join(type(callback).__name__ for callback in callbacks)
            who = f"{report.name}: its callback {kinds}, in {call.hook},"
            lent = nullcontext() if model is None else model.lent(who)
            with draws.drawing(stream, call.hook, is_call=True, is_last=call.always), lent:
                for callback in callbacks:
                    if not self._begins(f"{type(callback).__name__}.{call.hook}"):
                        return
                    getattr(callback, call.hook)(report, *call.arguments)
            self._note_step(call)
        except BaseException as error:  # SystemExit, too: it is this task's, and not the run's
            if isinstance(error, (StopTask, PauseTask)):  # what the call did before holds
                self._note_step(call)
            self._stop(error)
        finally:
            model = None  # the report keeps what a callback raises, and with it this frame
            with self._lock:
                self._now = None

    def _note_step(self, call: _Call) -> None:
        if call.hook == "on_step" and not self._is_left:
            self.lending.after_step()

    def _begins(self, what: str) -> bool:
        """Note what is called now; False where the thread was left behind."""
        with self._lock:
            self._now = (what, time.monotonic())
            return not self._is_left

    def _stop(self, error: BaseException) -> None:
        """What a callback raises ends the task, unless it came too late for that."""
        name = self._recipients.report.name
        event: TaskStopped | Failed
        with self._lock:
            if self._is_left:
                return
            if isinstance(error, (StopTask, PauseTask)):
                event = TaskStopped(name, is_paused=isinstance(error, PauseTask))
                self._end.obey(error, "a callback" if self._now is None else self._now[0])
            else:
                event = Failed(name, error, "its callback")
                self._end.fail(event, commits=False)
        self._put(event)
