"""Errors that a caller may want to catch, and no others. Bad arguments raise the built-in types."""

from partitioners import format_bytes


class DeviceOutOfMemory(RuntimeError):
    """A unit asked a device for more bytes than are free of its budget."""

    def __init__(self, device: str, needed_bytes: int, free_bytes: int, memory_bytes: int) -> None:
        super().__init__(
            f"{device} is out of memory: {format_bytes(needed_bytes)} asked for, {format_bytes(free_bytes)} free of a "
            f"budget of {format_bytes(memory_bytes)}; use smaller shards (a smaller Presharded step, or Pilot), more "
            f"accumulation_steps, or a device with more memory"
        )
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class DeviceLost(RuntimeError):
    """A kernel has failed for good on a device, which this process cannot use any more.

    The commonest cause is an index out of range (a token or a class). On the CPU the layer raises an error for it.
    `train_models` saves the committed state of all tasks, and ends the process with exit code 75.
    """

    def __init__(self, device: str, error: BaseException) -> None:
        self.device = device
        self.task = ""  # of which the device was computing a unit: set by who knows
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        super().__init__(
            f"{device} is lost until this process ends: {first_line}; look for an index out of range (a token, a "
            f"class) in the data of the task that it struck; on an emulated device the layer says which"
        )


class DeviceFailed(RuntimeError):
    """A device has failed, and is taken out of the run; this process can go on without it.

    A kind of device raises it from its copies. What was computed there and is not in DRAM yet is computed again on
    another device. Past `ModelOrchestrator(max_failures=)` the run ends with it, once all tasks are saved.
    """

    task = ""  # it is no task's doing

    def __init__(self, device: str, error: BaseException | str, remedy: str = "train without it") -> None:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        super().__init__(f"{device} has failed: {first_line}; look after it, or {remedy}")
        self.device, self.reason = device, first_line


class DeviceGone(DeviceFailed):
    """A device was taken away before its unit was through: its time of grace is over. It counts as no failure."""


class ShardDoesNotFit(ValueError):
    """A shard cannot run within a device's budget, and the partitioner has no smaller one to offer."""


class StopTask(Exception):
    """A callback raises it to end its task at the last committed step, with the status "stopped"."""


class PauseTask(Exception):
    """A callback raises it to pause its task at the last committed step, as `ModelOrchestrator.pause_task` does."""


class HostOutOfMemory(RuntimeError):
    """The machine's DRAM cannot hold the training state of the tasks."""


class NonFiniteLoss(ArithmeticError):
    """The loss of a training step is infinite or not a number, and the task has nonfinite="raise"."""

    def __init__(self, task: str, step: int, loss: float) -> None:
        super().__init__(
            f"{task}: the loss of step {step} is {loss}, and nonfinite='raise'; the task keeps the weights of the step "
            f"before it: look at that step's batch, lower lr, set max_grad_norm, or leave such steps out with "
            f"nonfinite='skip'"
        )
        self.step = step
        self.loss = loss


class LoaderTimeout(TimeoutError):
    """A loader did not give a batch in time, or another thing that the task needed was not ready (`what`)."""

    def __init__(self, task: str, timeout_s: float, thread: str, what: str = "its loader gave no batch") -> None:
        super().__init__(
            f"{task}: {what} in {timeout_s:g} s (timeout_s); its thread {thread!r} was left "
            f"behind: look for what it waits on (a worker that died, a network share, a lock), or raise "
            f"timeout_s; None waits for ever"
        )
        self.timeout_s = timeout_s


class CallbackTimeout(TimeoutError):
    """A callback did not return in time."""

    def __init__(self, task: str, callback: str, timeout_s: float, thread: str) -> None:
        super().__init__(
            f"{task}: its callback {callback} did not return in {timeout_s:g} s (timeout_s); its thread "
            f"{thread!r} was left behind: look for what it waits on (a lock, a barrier, a task that has ended, a "
            f"network share), or raise timeout_s; None waits for ever"
        )
        self.timeout_s = timeout_s


class CheckpointError(RuntimeError):
    """A directory of checkpoints cannot be written to, belongs to another run, or holds no usable checkpoint.

    In a task's report it says why a resume did not train the task: a kernel of it had failed for good on a device.
    """


class SavedError(RuntimeError):
    """The failure of a task in a report that was loaded from a file: its type's name and its text are all there is."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text
