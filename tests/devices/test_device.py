"""Devices: the ledger grants in order, the arena holds two slabs of any sizes, lanes work in order and end."""

import random
import threading
import weakref
from functools import partial
from typing import NamedTuple

import pytest
import torch

from hydra_engine.devices.arena import Arena
from hydra_engine.devices.budget import SLABS, WORK, Ledger, Ticket
from hydra_engine.devices.device import DeviceSpec
from hydra_engine.devices.emulated import EmulatedDevice
from hydra_engine.devices.lanes import COMPUTE, LANES, LOAD, STORE, Lane
from hydra_engine.devices.pool import resolve_devices
from hydra_engine.devices.rates import STATED, Ceilings
from hydra_engine.errors import DeviceOutOfMemory
from hydra_engine.trace import Trace
from tests import exact
from tests.refused import names, refused

# Far above anything these tests wait for: a thread that should have come is then a failure, not a hang.
PATIENCE_S = 30


class Asked(NamedTuple):
    """A request and what became of it."""

    ticket: Ticket
    grants: list
    refusals: list


def ask(ledger, num_bytes, *, activates=False):
    grants, refusals = [], []
    ticket = Ticket(num_bytes=num_bytes, granted=grants.append, refused=refusals.append, activates=activates)
    ledger.request(ticket)
    return Asked(ticket, grants, refusals)


def busy(ledger, num_bytes):
    """A unit of so many bytes at work: it will release them by itself."""
    running = ask(ledger, num_bytes, activates=True)
    assert running.grants == [num_bytes]
    return running


class TestLedger:
    @pytest.fixture
    def ledger(self):
        return Ledger("device", 100)

    def test_request_that_fits_is_granted_at_once(self, ledger):
        assert ask(ledger, 60).grants == [60]
        assert ask(ledger, 40).grants == [40]
        assert (ledger.used_bytes, ledger.free_bytes()) == (100, 0)

    def test_what_a_unit_of_unknown_size_is_granted_for_a_while_is_no_peak(self, ledger):
        told = []
        ledger.noted = told.append
        ask(ledger, 10)
        metered = ask(ledger, None, activates=True)
        assert metered.grants == [90]
        ledger.release(10)  # of another unit, meanwhile
        assert (ledger.used_bytes, ledger.peak_bytes, told) == (90, 10, [10])
        ledger.settle(90, 40)
        assert (ledger.peak_bytes, told) == (40, [10, 40])

    def test_request_waits_until_a_release_makes_room(self, ledger):
        busy(ledger, 80)
        waiting = ask(ledger, 30)
        assert waiting.grants == waiting.refusals == []
        ledger.release(9)
        assert waiting.grants == []
        ledger.release(1)
        assert waiting.grants == [30]
        assert ledger.used_bytes == 100

    def test_every_change_of_the_bytes_in_use_is_told(self, ledger):
        told = []
        ledger.noted = told.append
        busy(ledger, 60)
        assert ledger.take(30, SLABS)
        ledger.release(30, kind=SLABS)
        ledger.release(60, deactivates=True)
        assert told == [60, 90, 60, 0]

    def test_bytes_of_a_unit_that_was_granted_all_are_told_once_they_are_known(self, ledger):
        told = []
        busy(ledger, 10)
        ledger.noted = told.append
        whole = ask(ledger, None, activates=True)
        ledger.release(10, deactivates=True)
        assert whole.grants == [100]
        ledger.settle(100, 70)
        assert told == [0, 70]
        assert ledger.peak_bytes == 70
        ledger.release(70, deactivates=True)
        ask(ledger, None, activates=True)
        ledger.release(100, deactivates=True)  # it failed, and never told
        assert told == [0, 70, 0, 0]

    def test_requests_are_granted_in_the_order_they_were_asked(self, ledger):
        busy(ledger, 90)
        order = []
        for num_bytes in (50, 5, 20):
            ledger.request(Ticket(num_bytes=num_bytes, granted=order.append, refused=pytest.fail))
        assert order == [], "the small one fits, and must not overtake the large one in front of it"
        ledger.release(90, deactivates=True)
        assert order == [50, 5, 20]

    def test_request_that_cannot_fit_is_refused_when_nothing_will_be_released(self, ledger):
        ask(ledger, 70)  # a slab: held until somebody gives it back, which nobody has announced
        turned_away = ask(ledger, 40)
        assert turned_away.grants == []
        [error] = turned_away.refusals
        assert isinstance(error, DeviceOutOfMemory)
        assert (error.needed_bytes, error.free_bytes) == (40, 30)
        assert ledger.used_bytes == 70

    def test_request_that_cannot_fit_waits_for_what_is_at_work_and_then_lets_the_next_one_through(self, ledger):
        running = busy(ledger, 50)
        too_large, small = ask(ledger, 101), ask(ledger, 10)
        assert too_large.refusals == small.grants == []
        ledger.release(running.grants[0], deactivates=True)
        assert len(too_large.refusals) == 1
        assert small.grants == [10]
        assert ledger.used_bytes == 10

    def test_announced_release_keeps_requests_waiting(self, ledger):
        ask(ledger, 70)
        ledger.activate()
        waiting = ask(ledger, 40)
        assert waiting.refusals == []
        ledger.release(70, deactivates=True)
        assert waiting.grants == [40]

    def test_cancelled_request_is_neither_granted_nor_refused(self, ledger):
        running = busy(ledger, 100)
        cancelled = ask(ledger, 50)
        assert ledger.cancel(cancelled.ticket)
        ledger.release(running.grants[0], deactivates=True)
        assert cancelled.grants == cancelled.refusals == []
        assert ledger.used_bytes == 0

    def test_cancelling_the_first_lets_the_next_one_through(self, ledger):
        busy(ledger, 60)
        large, small = ask(ledger, 50), ask(ledger, 40)
        assert ledger.cancel(large.ticket)
        assert small.grants == [40]

    def test_request_is_cancelled_only_while_it_waits(self, ledger):
        granted, turned_away = ask(ledger, 100), ask(ledger, 1)
        assert not ledger.cancel(granted.ticket)
        assert not ledger.cancel(turned_away.ticket)
        assert ledger.used_bytes == 100

    def test_request_for_everything_waits_until_nothing_is_at_work(self, ledger):
        ask(ledger, 30)  # its slab
        running = busy(ledger, 20)
        everything = ask(ledger, None, activates=True)
        assert everything.grants == []
        ledger.release(running.grants[0], deactivates=True)
        assert everything.grants == [70]
        assert ledger.free_bytes() == 0
        ledger.settle(70, 35)
        ledger.release(35, deactivates=True)
        assert ledger.peak_bytes == 30 + 35, "only what was needed of everything counts"

    def test_settling_gives_back_what_was_not_needed(self, ledger):
        everything = ask(ledger, None, activates=True)
        behind = ask(ledger, 60)
        assert behind.grants == []
        ledger.settle(everything.grants[0], 40)
        assert behind.grants == [60]
        assert ledger.used_bytes == 100

    def test_settling_on_more_than_was_granted_grows(self, ledger):
        busy(ledger, 30)
        ledger.settle(30, 50)
        assert ledger.used_bytes == 50
        with pytest.raises(DeviceOutOfMemory):
            ledger.settle(50, 101)
        assert ledger.used_bytes == 50

    def test_growing_takes_what_is_free_and_no_more(self, ledger):
        busy(ledger, 90)
        ledger.grow(10)
        assert ledger.free_bytes() == 0
        with refused(DeviceOutOfMemory, says="device") as error:
            ledger.grow(1)
        assert (error.value.needed_bytes, error.value.free_bytes) == (1, 0)
        assert ledger.used_bytes == 100

    def test_peak_is_the_most_that_was_used(self, ledger):
        busy(ledger, 30)
        ask(ledger, 25)
        ledger.release(30, deactivates=True)
        assert ledger.peak_bytes == 55
        busy(ledger, 20)
        assert ledger.peak_bytes == 55
        ledger.grow(40)
        assert ledger.peak_bytes == 85

    def test_closed_ledger_grants_and_refuses_nothing_more(self, ledger):
        running = busy(ledger, 80)
        waiting = ask(ledger, 50)
        ledger.close()
        late = ask(ledger, 10)
        ledger.release(running.grants[0], deactivates=True)
        assert waiting.grants == waiting.refusals == late.grants == late.refusals == []
        assert ledger.used_bytes == 0
        assert not ledger.cancel(waiting.ticket)

    def test_callback_may_ask_and_release(self, ledger):
        order = []

        def granted(num_bytes):
            order.append(num_bytes)
            ledger.release(num_bytes)
            ledger.request(Ticket(num_bytes=7, granted=order.append, refused=pytest.fail))

        ledger.request(Ticket(num_bytes=100, granted=granted, refused=pytest.fail))
        assert order == [100, 7]
        assert ledger.used_bytes == 7

    def test_random_walk_never_exceeds_the_budget_and_grants_in_order(self):
        for seed in range(20):
            self.walk(Ledger("device", 100), random.Random(seed))

    def walk(self, ledger, rng):
        held, expected_order, settled = [], [], []
        peak_bytes = 0
        for number in range(200):
            if held and rng.random() < 0.5:
                ledger.release(held.pop(rng.randrange(len(held))), deactivates=True)
            else:
                num_bytes = rng.choice([0, 1, 10, 40, 100, 130])
                expected_order.append(number)
                ledger.request(
                    Ticket(
                        num_bytes=num_bytes,
                        granted=lambda granted, number=number: (settled.append(number), held.append(granted)),
                        refused=lambda _, number=number: settled.append(number),
                        activates=True,
                    )
                )
            peak_bytes = max(peak_bytes, sum(held))
            assert ledger.used_bytes == sum(held) <= 100
            assert settled == expected_order[: len(settled)]
        while held:
            ledger.release(held.pop(), deactivates=True)
        assert settled == expected_order, "once all is released nobody waits"
        assert ledger.used_bytes == 0
        assert peak_bytes <= ledger.peak_bytes <= 100

    def test_requests_from_many_threads_are_all_granted(self, ledger):
        num_granted = []

        def work(seed):
            rng = random.Random(seed)
            for _ in range(50):
                event = threading.Event()
                num_bytes = rng.randint(1, 60)
                ticket = Ticket(
                    num_bytes=num_bytes, granted=lambda _, event=event: event.set(), refused=pytest.fail, activates=True
                )
                ledger.request(ticket)
                assert event.wait(PATIENCE_S)
                assert 0 <= ledger.used_bytes <= 100
                num_granted.append(num_bytes)
                ledger.release(num_bytes, deactivates=True)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(num_granted) == 200
        assert ledger.used_bytes == 0


def arena_of(num_bytes, alignment=64):
    return Arena(torch.UntypedStorage(num_bytes), alignment)


def region(slab):
    return slab.offset, slab.offset + slab.num_bytes


class TestArena:
    def test_slabs_lie_at_both_ends(self):
        # |AAA|.............|BBBB|   free A   |.................|BBBB|   take C   |CCCCC|...........|BBBB|
        arena = arena_of(1024)
        a, b = arena.take(192), arena.take(256)
        assert (region(a), region(b)) == ((0, 192), (768, 1024))
        arena.give_back(a)
        c = arena.take(320)
        assert region(c) == (0, 320)
        # |CCCCC|...........|BBBB|   free B   |CCCCC|................|   take D   |CCCCC|.........|DDDDDD|
        arena.give_back(b)
        assert region(arena.take(384)) == (640, 1024)

    def test_sizes_are_rounded_up_to_the_alignment(self):
        arena = arena_of(1024)
        assert [region(arena.take(1)), region(arena.take(65))] == [(0, 64), (896, 1024)]

    def test_end_of_an_odd_storage_is_not_used(self):
        arena = arena_of(1000)
        arena.take(64)
        assert region(arena.take(64)) == (896, 960)

    def test_whole_storage_can_be_taken_again_and_again(self):
        arena = arena_of(1024)
        for _ in range(3):
            slab = arena.take(1024)
            assert region(slab) == (0, 1024)
            arena.give_back(slab)

    def test_slab_that_does_not_fit_is_out_of_memory(self):
        arena = arena_of(1024)
        arena.take(512)
        with pytest.raises(DeviceOutOfMemory) as error:
            arena.take(576)
        assert error.value.needed_bytes == 576
        assert region(arena.take(512)) == (512, 1024)

    def test_room_in_pieces_is_room_all_the_same(self):
        arena = arena_of(640)
        low, high, middle = arena.take(192), arena.take(128), arena.take(192)
        assert [region(slab) for slab in (low, high, middle)] == [(0, 192), (512, 640), (320, 512)]
        arena.give_back(low)
        arena.give_back(high)
        arena.take(320)
        elsewhere = arena.take(128)
        arena.give_back(middle)
        apart = arena.take(192)
        assert region(apart) == (320, 512)
        arena.give_back(elsewhere)
        with pytest.raises(DeviceOutOfMemory):
            arena.take(192)

    def test_empty_slabs_take_nothing(self):
        arena = arena_of(128)
        empty = [arena.take(0) for _ in range(3)]
        assert [slab.num_bytes for slab in empty] == [0, 0, 0]
        whole = arena.take(128)
        arena.give_back(empty[0])
        assert arena.take(0).num_bytes == 0
        arena.give_back(whole)
        assert region(arena.take(128)) == (0, 128)

    def test_two_slabs_of_any_sizes_alternate_without_fragmentation(self):
        for seed in range(20):
            self.alternate(random.Random(seed))

    def alternate(self, rng):
        size = 64 * rng.randint(4, 40)
        arena, alive = arena_of(size), []
        for _ in range(300):
            free_bytes = size - sum(slab.num_bytes for slab in alive)
            if len(alive) == 2 or (alive and rng.random() < 0.4):
                arena.give_back(alive.pop(rng.randrange(len(alive))))
                continue
            # All that is free can be had in one piece, however the two before it came and went.
            num_bytes = rng.choice([free_bytes, rng.randint(1, free_bytes) if free_bytes else 0])
            slab = arena.take(num_bytes)
            first, last = region(slab)
            assert first % 64 == 0
            assert 0 <= first <= last <= size
            assert slab.num_bytes == -(-num_bytes // 64) * 64
            for other in alive:
                low, high = region(other)
                assert last <= low or high <= first, "slabs overlap"
            alive.append(slab)

    def test_bytes_of_a_slab_are_the_storages(self):
        storage = torch.UntypedStorage(1024)
        arena = Arena(storage, 64)
        arena.take(64)
        slab = arena.take(256)
        view = slab.bytes(64, 128)
        assert view.dtype == torch.uint8
        assert view.data_ptr() == storage.data_ptr() + slab.offset + 64
        assert view.numel() == 128

    def test_writing_a_slab_is_no_change_to_what_autograd_saved_of_another(self):
        arena = arena_of(1024)
        a, b = arena.take(256), arena.take(256)
        weight = a.bytes(0, 16).fill_(0).view(torch.float32).requires_grad_()
        out = (weight * weight).sum()
        b.bytes(0, 256).fill_(1)
        out.backward()
        assert torch.equal(weight.grad, torch.zeros(4))


class TestLane:
    def test_close_finishes_what_is_queued_and_joins(self):
        lane, gate, done = Lane("lane-that-closes", 1), threading.Event(), []
        lane.submit(lambda: gate.wait(PATIENCE_S))
        lane.submit(lambda: done.append(True))
        threading.Thread(target=gate.set).start()
        lane.close()
        assert done == [True]
        assert "lane-that-closes" not in [thread.name for thread in threading.enumerate()]

    def test_jobs_run_with_the_lanes_thread_count(self):
        before = torch.get_num_threads()
        lane, seen = Lane("lane", 3), []
        try:
            lane.submit(lambda: seen.append((torch.get_num_threads(), threading.current_thread().name)))
            lane.close()
        finally:
            torch.set_num_threads(before)
        assert seen == [(3, "lane")]

    def test_finished_job_is_let_go(self):
        gone, lane, held = threading.Event(), Lane("lane", 1), {"held by the job alone"}
        weakref.finalize(held, gone.set)
        lane.submit(partial(id, held))
        del held
        assert gone.wait(PATIENCE_S), "the lane waits for its next job with the last one in its hands"
        lane.close()


class DeviceContract:
    """What every device holds to. A subclass says how to make one; `make(memory, **options)` returns its description.

    Written for any device: tensors are made on `opened.torch_device`, and read back after the copies are through.
    Where slabs have an arena of their own, `ARENA_BYTES` of the memory are for them.
    """

    MEMORY = 4096
    ARENA_BYTES = None

    def make(self, memory, **options):
        raise NotImplementedError

    @pytest.fixture
    def trace(self):
        return Trace()

    @pytest.fixture
    def opened(self, trace):
        device = self.open(0, trace)
        yield device
        device.close()

    def open(self, index, trace):
        return self.make(self.MEMORY).open(index, trace, 1, self.ARENA_BYTES)

    def finish(self, opened, lane, job):
        """Run a job in a lane and wait for it; its result."""
        done, results = threading.Event(), []

        def run():
            try:
                results.append(job())
                opened.finish()
            finally:
                done.set()

        opened.submit(lane, "job", run)
        assert done.wait(PATIENCE_S)
        return results[0]

    def test_budget_is_the_one_asked_for(self, opened):
        assert opened.ledger.memory_bytes == self.MEMORY
        assert opened.ledger.used_bytes == opened.ledger.peak_bytes == 0

    def test_two_devices_have_two_names(self, trace):
        first, second = self.open(0, trace), self.open(1, trace)
        first.close()
        second.close()
        assert first.name != second.name

    def test_jobs_of_a_lane_run_in_order(self, opened):
        for lane in LANES:
            order = []
            for number in range(20):
                opened.submit(lane, f"job {number}", lambda number=number, order=order: order.append(number))
            self.finish(opened, lane, lambda: None)
            assert order == list(range(20))

    def test_lanes_run_at_the_same_time(self, opened):
        meeting = threading.Barrier(len(LANES) + 1)
        for lane in LANES:
            opened.submit(lane, "meets the others", lambda: meeting.wait(PATIENCE_S))
        meeting.wait(PATIENCE_S)  # would break if one lane had to finish before another began

    def test_close_finishes_what_is_queued_and_leaves_no_thread(self, trace):
        before = set(threading.enumerate())
        device, done = self.open(0, trace), []
        for lane in LANES:
            for _ in range(5):
                device.submit(lane, "job", lambda lane=lane: done.append(lane))
        device.close()
        assert sorted(done) == sorted(lane for lane in LANES for _ in range(5))
        assert set(threading.enumerate()) == before

    def test_what_is_copied_in_comes_back_out(self, opened):
        source, target = torch.randn(64), torch.empty(64)
        slab = opened.take_slab(256)
        view = slab.bytes(0, 256).view(torch.float32)
        assert view.device.type == opened.torch_device.type
        self.finish(opened, LOAD, lambda: opened.copy(LOAD, [(view, source)]))
        self.finish(opened, STORE, lambda: opened.copy(STORE, [(target, view)]))
        assert torch.equal(target, source)

    def test_copies_are_counted_in_bytes_by_lane(self, opened, trace):
        pairs = [(torch.empty(3), torch.zeros(3)), (torch.empty(5, dtype=torch.uint8), torch.zeros(5).byte())]
        self.finish(opened, LOAD, lambda: opened.copy(LOAD, pairs))
        self.finish(opened, STORE, lambda: opened.copy(STORE, pairs[:1]))
        assert trace.bytes_moved(opened.name, LOAD) == 3 * 4 + 5
        assert trace.bytes_moved(opened.name, STORE) == 3 * 4
        assert trace.bytes_moved(opened.name, COMPUTE) == 0

    def test_copies_are_traced_as_spans(self, opened, trace):
        self.finish(opened, LOAD, lambda: None)
        self.finish(opened, LOAD, lambda: None)
        span = trace.spans()[0]
        assert (span.device, span.lane, span.label) == (opened.name, LOAD, "job")

    def test_slab_of_all_that_slabs_may_have_can_be_had(self, opened):
        most = opened.ledger.limit_bytes(SLABS)
        assert most == (self.MEMORY if self.ARENA_BYTES is None else self.ARENA_BYTES)
        slab = opened.take_slab(most)
        assert slab.bytes(0, most).numel() == most
        opened.give_slab_back(slab)
        assert opened.take_slab(most).num_bytes == most

    def test_more_than_the_memory_is_out_of_memory(self, opened):
        with pytest.raises(DeviceOutOfMemory):
            opened.take_slab(opened.ledger.limit_bytes(SLABS) + 1)
        most = opened.ledger.limit_bytes(WORK)
        assert most == self.MEMORY - (self.ARENA_BYTES or 0)
        [error] = ask(opened.ledger, most + 1).refusals
        names(error, says=opened.name)
        assert (error.needed_bytes, error.free_bytes) == (most + 1, most)


class TestEmulatedDevice(DeviceContract):
    def make(self, memory, **options):
        return EmulatedDevice(memory, **options)

    def test_prints_its_size(self):
        assert repr(EmulatedDevice("64MiB")) == "EmulatedDevice(64 MiB)"
        assert EmulatedDevice("1KiB", bandwidth="2MiB").bandwidth == 2 * 2**20

    def test_copies_take_at_least_their_bytes_at_the_links_speed(self):
        trace = Trace()
        device = EmulatedDevice(self.MEMORY, bandwidth=400_000).open(0, trace, 1)
        pairs = [(torch.empty(500), torch.zeros(500)), (torch.empty(500), torch.zeros(500))]
        for lane in (LOAD, STORE):
            self.finish(device, lane, lambda lane=lane: device.copy(lane, pairs))
        device.close()
        for lane in (LOAD, STORE):
            assert trace.busy_s(device.name, lane) >= 4000 / 400_000

    def test_a_freed_slab_is_left_alone(self, opened):
        slab = opened.take_slab(256)
        values = slab.bytes(0, 256).zero_()
        opened.give_slab_back(slab)
        assert not values.any()


class TestEmulatedDeviceInChaos(DeviceContract):
    """The test mode keeps the same promises."""

    def make(self, memory, **options):
        return EmulatedDevice(memory, chaos=7, **options)

    def test_a_freed_slab_is_filled_with_nan(self, opened):
        slab, other = opened.take_slab(1024), opened.take_slab(512)
        values, others = slab.bytes(0, 1024).view(torch.float32), other.bytes(0, 512).view(torch.float32)
        values.zero_()
        others.zero_()
        opened.give_slab_back(slab)
        assert values.isnan().all()
        assert not others.isnan().any(), "only what is freed is filled"

    def test_an_empty_slab_is_taken_back(self, opened):
        opened.give_slab_back(opened.take_slab(0))


class TestEmulatedDeviceWithArena(DeviceContract):
    """Slabs and work have their shares, as on a GPU."""

    ARENA_BYTES = 1024

    def make(self, memory, **options):
        return EmulatedDevice(memory, has_arena=True, **options)


class Plainest(DeviceSpec):
    """A kind of device of somebody's own: all that `DeviceSpec` asks for, and nothing else."""

    has_arena = False
    has_room_for_planning = True
    alignment_bytes = 64
    torch_device = torch.device("cpu")
    ceilings_name = "plainest"
    memory_bytes = 2**23

    def ceilings(self):
        return Ceilings.of_link(self.ceilings_name, 1e9, STATED)

    def check_free(self):
        pass

    def open(self, index, trace, num_threads, arena_bytes=None):
        return EmulatedDevice(self.memory_bytes).open(index, trace, num_threads, arena_bytes)


def test_tasks_train_on_a_kind_of_ones_own_with_the_plain_bits():
    task, model = exact.task_of("mlp")
    report = exact.silent([task], devices=[Plainest()]).train_models()
    exact.assert_as_expected(report, "mlp", model, exact.expected("mlp"))


def test_devices_of_a_run_are_those_named_or_all_of_the_machine():
    given = EmulatedDevice("1MiB")
    assert resolve_devices([given]) == [given]
    assert all(isinstance(each, DeviceSpec) and each.memory_bytes > 0 for each in resolve_devices())
    for devices, error in (([], ValueError), ("cpu", TypeError), ([3], TypeError), (["tpu"], ValueError)):
        with refused(error, says="devices:"):
            resolve_devices(devices)
