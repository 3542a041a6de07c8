"""What the engine costs beside the plain loop, and what interleaving brings. All on the CPU; see README.md.

python benchmarks/overhead/main.py                  # every experiment
python benchmarks/overhead/main.py shards units     # some of them
python benchmarks/overhead/main.py --pairs 5        # fewer repetitions
"""

import argparse
import queue
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from unittest import mock

import torch
from torch import nn

from hydra_engine import Callback, EmulatedDevice, Model, ModelOrchestrator, ModelTask
from hydra_engine.data import reader
from hydra_engine.devices import Promise, lanes
from hydra_engine.run.signals import Inbox
from partitioners import Presharded

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from clocked import Clocked
from figures import Figures, add_arguments
from gpt import gpt, token_batches

LR = 1e-3
# Room for two slabs and a unit, and for no forward's graph: all shards but the last are then computed twice.
LITTLE = "64MiB"
FIGURES = Figures("overhead")


def plain_s(batches, model=None, loss_fn=None):
    """Seconds per step of the plain loop, from the second step on."""
    model = model or gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loss_fn = loss_fn or nn.CrossEntropyLoss()
    losses = []
    loader = Clocked(batches)
    for inputs, target in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(inputs), target)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return (loader.asked_s[-2] - loader.asked_s[1]) / (len(batches) - 2)


def streamed_s(batches, boundaries, memory="1GiB", model=None, loss_fn=None):
    """The same through the engine: it asks for a batch when it begins the one before, so its steps are one later."""
    loader = Clocked(batches)
    engine_s([task(loader, boundaries, model=model, loss_fn=loss_fn)], memory=memory)
    return (loader.asked_s[-1] - loader.asked_s[2]) / (len(batches) - 2)


def task(batches, boundaries, seed=0, model=None, loss_fn=None, callbacks=()):
    """The same training as a task."""
    return ModelTask(
        model or gpt(),
        loss_fn or nn.CrossEntropyLoss(),
        batches,
        LR,
        optimizer=torch.optim.AdamW,
        partitioner=Presharded(boundaries),
        callbacks=callbacks,
        seed=seed,
    )


def planned(tasks, num_devices=1, memory="1GiB"):
    """An orchestrator of these tasks that is through with planning."""
    orchestra = ModelOrchestrator(tasks, devices=[EmulatedDevice(memory) for _ in range(num_devices)])
    orchestra.verbose = 0
    orchestra.generate()
    return orchestra


def engine_s(tasks, num_devices=1, memory="1GiB"):
    """Seconds of train_models() from call to return, planning aside, and its report."""
    orchestra = planned(tasks, num_devices, memory)
    start_s = time.perf_counter()
    report = orchestra.train_models()
    seconds = time.perf_counter() - start_s
    report.raise_failures()
    return seconds, report


class Reads(Callback):
    """Has the model after each step, and does nothing."""

    def on_step(self, report):
        pass


class ReadsNothing(Reads):
    reads_model = False


def called_s(batches, num_tasks, kinds):
    """Seconds of tasks with callbacks of these classes."""
    return engine_s([task(batches, [6], k, callbacks=[kind() for kind in kinds]) for k in range(num_tasks)])[0]


def callbacks(pairs):
    """What waiting for a callback costs a lone task, and one beside another, to the same without callbacks."""
    batches = token_batches(12, 4, 64)
    for num_tasks in (1, 2):
        for name, kinds in {"none": (), "reads nothing": (ReadsNothing,), "reads the model": (Reads,)}.items():
            ratios = []
            for _ in range(pairs):
                before = called_s(batches, num_tasks, ())
                ratios.append(called_s(batches, num_tasks, kinds) / before)
            print(f"callback of {num_tasks} task{'s' * (num_tasks > 1)}  {name:16} {spread(ratios)}", flush=True)
            FIGURES.add(f"a callback that {name}, {num_tasks} tasks", ratios, better="less")


def spread(ratios):
    """Median and range of ratios."""
    return f"{median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})"


def shards(pairs):
    """Ratio to the plain loop, one task on one device, alternating."""
    for num_tokens, batch_size, length in ((1024, 8, 128), (64, 1, 64)):
        num_steps = 7 if num_tokens == 1024 else 42
        batches = token_batches(num_steps, batch_size, length)
        limits = (1.06, 1.40) if num_tokens == 1024 else (None, None)
        rows = {
            "plain against plain": (lambda batches=batches: plain_s(batches), None),
            "one shard": (lambda batches=batches: streamed_s(batches, [6]), limits[0]),
            "four shards": (lambda batches=batches: streamed_s(batches, [2, 3, 4, 6]), limits[1]),
            f"four, {LITTLE}": (lambda batches=batches: streamed_s(batches, [2, 3, 4, 6], LITTLE), limits[1]),
        }
        plain_s(batches)
        for name, (measure, limit) in rows.items():
            ratios = []
            for _ in range(pairs):
                before = plain_s(batches)
                ratios.append(measure() / before)
            judged = "" if limit is None else f"at most {limit:.2f}"
            print(f"{num_tokens:5} tokens per step  {name:20} {spread(ratios)}  {judged}", flush=True)
            if name != "plain against plain":
                FIGURES.add(f"{name}, {num_tokens} tokens", ratios, better="less", limit=limit)


class Nothing(nn.Module):
    """An empty layer."""

    def forward(self, x):
        return x


NUM_LAYERS, NUM_STEPS = 10, 100
NUM_UNITS = NUM_STEPS * (2 * NUM_LAYERS - 1)


def empty(width=4, accumulation_steps=1):
    """A task of which only the first of ten layers has anything to compute."""
    batches = [(torch.zeros(8, width), torch.zeros(8, width))] * NUM_STEPS
    return ModelTask(
        [nn.Linear(width, width), *(Nothing() for _ in range(NUM_LAYERS - 1))],
        nn.MSELoss(),
        batches,
        partitioner=Presharded(list(range(1, NUM_LAYERS + 1))),
        accumulation_steps=accumulation_steps,
        seed=0,
    )


def in_us(costs):
    """Median and range of seconds, in microseconds."""
    low, middle, high = (each * 1e6 for each in (min(costs), median(costs), max(costs)))
    return f"{middle:.0f} us  ({low:.0f} to {high:.0f})"


def units(pairs):
    """Seconds per unit where there is nothing to compute, and per micro-batch of a unit beyond its first."""
    costs, micro = [], []
    for _ in range(pairs):
        costs.append(engine_s([empty()])[0] / NUM_UNITS)
        micro.append((engine_s([empty(accumulation_steps=8)])[0] / NUM_UNITS - costs[-1]) / 7)
    print(f"fixed cost per unit  {in_us(costs)}  at most 500", flush=True)
    print(f"per micro-batch more {in_us(micro)}", flush=True)
    FIGURES.add("fixed cost per unit, us", [1e6 * each for each in costs], better="less", limit=500)
    FIGURES.add("per micro-batch more, us", [1e6 * each for each in micro], better="less")


def calls(_):
    """Calls of Python functions and of C functions per unit where there is nothing to compute: no noise moves them."""
    found = Counter()

    def note(frame, event, _):
        if event == "call":
            found[frame.f_code.co_filename.rpartition("/hydra_engine/")[2]] += 1
        elif event == "c_call":
            found["in C"] += 1

    orchestra = planned([empty()])
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        orchestra.train_models().raise_failures()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    in_c = found.pop("in C") / NUM_UNITS
    most = ", ".join(f"{Path(name).name} {number / NUM_UNITS:.0f}" for name, number in found.most_common(6))
    print(f"calls per unit       {sum(found.values()) / NUM_UNITS:.0f} of Python ({most}), {in_c:.0f} of C", flush=True)


def processor(pairs):
    """Processor time per unit where there is nothing to compute."""
    costs = [in_processor_s(trains(planned([empty()]))) / NUM_UNITS for _ in range(pairs)]
    print(f"processor per unit   {in_us(costs)}", flush=True)


class Sums(nn.Module):
    """Adds its parameters, which are many and small, to its input."""

    def __init__(self, number):
        super().__init__()
        self.summands = nn.ParameterList(nn.Parameter(torch.zeros(4)) for _ in range(number))

    def forward(self, x):
        for each in self.summands:
            x = x + each
        return x


FEW, MANY, SUM_STEPS, SUM_SHARDS = 2, 102, 50, 4


def parameters(pairs):
    """Processor time that each parameter of a shard adds to its units, beside the same in the plain loop."""
    num_units = SUM_STEPS * (2 * SUM_SHARDS - 1)
    batches = [(torch.zeros(2, 4), torch.zeros(2, 4))] * SUM_STEPS

    def spent_s(number, through):
        return in_processor_s(through(nn.Sequential(*(Sums(number) for _ in range(SUM_SHARDS))))) / num_units

    def engine(model):
        ends = list(range(1, SUM_SHARDS + 1))
        return trains(planned([task(batches, ends, model=model, loss_fn=nn.MSELoss())]))

    def plain(model):
        return lambda: plain_s(batches, model, nn.MSELoss())

    found = {"engine": [], "plain loop": []}
    for _ in range(pairs):
        for costs, through in zip(found.values(), (engine, plain), strict=True):
            costs.append((spent_s(MANY, through) - spent_s(FEW, through)) / (MANY - FEW))
    for name, costs in found.items():
        print(f"per parameter of a unit, {name:10} {in_us(costs)}", flush=True)
    FIGURES.add("per parameter of a unit, us", [1e6 * each for each in found["engine"]], better="less")


def trains(orchestra):
    """Return a function that trains an orchestrator's tasks."""
    return lambda: orchestra.train_models().raise_failures()


def in_processor_s(function):
    """Processor seconds of a call."""
    start_s = time.process_time()
    function()
    return time.process_time() - start_s


WAKES = Counter()  # by who was waiting


class Counted(SimpleQueue):
    """A queue that counts how often a thread finds it empty, and has to be woken."""

    def get(self, block=True, timeout=None):
        if block and self.empty():
            note_wake()
        return super().get(block, timeout)


def note_wake():
    """Count that this thread has to be woken."""
    name = threading.current_thread().name
    WAKES[next((what for what in WAITERS if what in name), "decides")] += 1


WAITERS = ("compute", "load", "input", "store", "optimizer", "reader")


@contextmanager
def counted():
    """Count the hand-overs of the body: a thread that has nothing to do is woken by another one."""

    def counting(method, waits):
        def call(waiter):
            if waits(waiter):
                note_wake()
            return method(waiter)

        return call

    WAKES.clear()
    with ExitStack() as stack:
        for module in (lanes, reader, queue):  # the last for pools of threads
            stack.enter_context(mock.patch.object(module, "SimpleQueue", Counted))
        for name in ("result", "is_kept"):
            counts = counting(getattr(Promise, name), lambda promise: not promise.is_done)
            stack.enter_context(mock.patch.object(Promise, name, counts))
        stack.enter_context(mock.patch.object(Inbox, "_wait", counting(Inbox._wait, lambda _: True)))
        yield


def handover_s(number=20_000):
    """Seconds that it takes to wake a thread which waits for a queue."""
    there, back = SimpleQueue(), SimpleQueue()

    def answer():
        while there.get() is not None:
            back.put(True)

    thread = threading.Thread(target=answer)
    thread.start()
    start_s = time.perf_counter()
    for _ in range(number):
        there.put(True)
        back.get()
    seconds = time.perf_counter() - start_s
    there.put(None)
    thread.join()
    return seconds / number / 2


def handovers(pairs):
    """Threads that are woken per unit, by who was waiting, and what waking one costs."""
    print(f"one hand-over        {in_us([handover_s() for _ in range(pairs)])}", flush=True)
    rows = {
        "small units": empty(),
        "small, 8 micro-batches": empty(accumulation_steps=8),
        "copies in lanes": empty(width=256),  # 256 KiB of weights
        "4 shards of a GPT": task(token_batches(12, 8, 128), [2, 3, 4, 6]),
    }
    for name, each in rows.items():
        with counted():
            report = engine_s([each])[1]
        num_units = sum(span.lane == "compute" for span in report.spans)
        total = sum(WAKES.values()) / num_units
        waiters = ", ".join(f"{what} {number / num_units:.2f}" for what, number in WAKES.most_common())
        print(f"hand-overs per unit  {name:22} {total:5.2f}  ({waiters})", flush=True)
        FIGURES.add(f"hand-overs per unit, {name}", total, better="less")


def together(pairs):
    """Four tasks on two devices against the same four one after the other, where each fits a device."""
    interleave("each fits", [6], "1GiB", 1.6, max(1, pairs // 3))


def spilled(pairs):
    """The same, where none fits."""
    interleave("none fits", [1, 2, 3, 4, 5, 6], "48MiB", None, max(1, pairs // 3))


def interleave(name, boundaries, memory, limit, pairs):
    """How much shorter four tasks together are, and how busy they keep two devices."""
    batches = token_batches(4, 8, 128)
    ratios, busy = [], []
    for _ in range(pairs):
        alone = sum(engine_s([task(batches, boundaries, seed)], 1, memory)[0] for seed in range(4))
        seconds, report = engine_s([task(batches, boundaries, seed) for seed in range(4)], 2, memory)
        ratios.append(alone / seconds)
        busy.append(sum(device.busy_s for device in report.devices) / 2 / report.makespan_s)
    shares = f"devices busy {median(busy):.0%}"
    judged = "not judged" if limit is None else f"at least {limit}"
    print(f"4 tasks, 2 devices, {name}: {spread(ratios)} times shorter, {judged}; {shares}", flush=True)
    FIGURES.add(f"4 tasks, 2 devices, {name}: times shorter", ratios, better="more", limit=limit)


def converted(pairs):
    """A Llama's layers by hand, and those made of its own forward, in turn with the plain loop and in the same cuts."""
    # Only here: the library is an extra.
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.loss.loss_utils import ForCausalLMLoss

    from hydra_engine.integrations.huggingface import causal_lm_loss, sequential

    ids = torch.randint(0, 512, (12, 2, 64), generator=torch.Generator().manual_seed(0))
    batches = [(each, each) for each in ids]

    def llama(use_cache=False):
        sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 6}
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=512, use_cache=use_cache, **sizes)).train()

    def its_loss(output, labels):
        return ForCausalLMLoss(output.logits, labels, vocab_size=512)

    def made(**options):
        return Model(llama(**options), example=batches[0][0])

    def hand_s(ends):
        return lambda: streamed_s(batches, ends, model=sequential(llama()), loss_fn=causal_lm_loss)

    def own_s(ends, **options):
        return lambda: streamed_s(batches, ends, model=made(**options), loss_fn=its_loss)

    by_hand = [1, *range(2, 10), 11]  # after the embedding, after each block, and all that stands after these
    own = ends_of(made(), sequential(llama()), by_hand)
    num_layers = own[-1]
    rows = {
        "plain": lambda: plain_s(batches, llama(), its_loss),
        "plain again": lambda: plain_s(batches, llama(), its_loss),
        "1 shard, by hand": hand_s([11]),
        "1 shard, converted": own_s([num_layers]),
        "1 shard, converted, use_cache=True": own_s([num_layers], use_cache=True),
        "10 shards, by hand": hand_s(by_hand),
        "10 shards, converted": own_s(own),
    }
    seconds = {name: [] for name in rows}
    rows["plain"]()
    for _ in range(pairs):
        for name, measure in rows.items():
            seconds[name].append(measure())
    print(f"Llama of 8 blocks: 11 layers by hand, {num_layers} converted", flush=True)
    for name, found in seconds.items():
        ratios = [a / b for a, b in zip(found, seconds["plain"], strict=True)]
        print(f"{name:34} {median(found) * 1e3:6.1f} ms, to plain {spread(ratios)}", flush=True)
    for cut in ("1 shard", "10 shards"):
        pair = zip(seconds[f"{cut}, converted"], seconds[f"{cut}, by hand"], strict=True)
        name, ratios = f"{cut}, converted to by hand", [a / b for a, b in pair]
        print(f"{name:34} {spread(ratios)}  at most 1.03", flush=True)
        FIGURES.add(name, ratios, better="less", limit=1.03)


def ends_of(layers, others, ends):
    """Ends of shards that hold as many weights as those of other layers, with these ends."""
    known = {weights_below(layers, end): end for end in range(1, len(layers) + 1)}
    return [known[weights_below(others, end)] for end in ends]


def weights_below(layers, end):
    return sum(parameter.numel() for layer in list(layers)[:end] for parameter in layer.parameters())


EXPERIMENTS = {
    "shards": shards,
    "units": units,
    "callbacks": callbacks,
    "calls": calls,
    "processor": processor,
    "parameters": parameters,
    "handovers": handovers,
    "converted": converted,
    "together": together,
    "spilled": spilled,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help=f"of {', '.join(EXPERIMENTS)}; default: all")
    parser.add_argument("--pairs", type=int, default=15, help="alternating repetitions (default 15)")
    add_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.experiments or EXPERIMENTS:
        EXPERIMENTS[name](arguments.pairs)
    FIGURES.save(arguments.json)


if __name__ == "__main__":
    main()
