"""The step loop over a scripted model: order, chunks, several steps per call, ends of all kinds."""

import threading
from contextlib import contextmanager

import pytest

from flyspec.engine.loop import StepLoop
from flyspec.engine.model import Draw, Step
from flyspec.engine.pages import PageTable
from flyspec.engine.scheduler import StepBudget
from flyspec.engine.slots import SlotTable
from flyspec.errors import ModelFailureError, ModelLostError, UnavailableError
from flyspec.values.tokens import Drafted, SamplingParams
from tests.scripted import ScriptedModel

GREEDY = SamplingParams()
WAIT_S = 10.0


class Loop(StepLoop[Drafted]):
    """Waits at a gate before each forward, and fails if a step contains `poison`."""

    service = "test"

    def __init__(self, model, **options):
        self.told, self.spoiled_slots = [], []
        super().__init__(model, on_step=self.tell, **options)
        self.forward = model.forward
        self.gate, self.at_gate = threading.Semaphore(10**6), threading.Event()
        self.poison = None
        model.forward = self.gated

    def tell(self, _, sessions, tokens, count):
        self.told += [(sessions, tokens)] * count

    def gated(self, steps):
        self.at_gate.set()
        assert self.gate.acquire(timeout=WAIT_S)
        if any(self.poison in step.token_ids for step in steps):
            raise RuntimeError("poison")
        return self.forward(steps)

    def run_batch(self, wants):
        return self.model.draw(wants, self.arrival)

    def steps_of(self, want, result):
        return 1 + len(result.token_ids) - want.step.num_logits

    def spoiled(self, slot):
        self.spoiled_slots.append(slot)

    def shut(self):
        self.gate, self.at_gate = threading.Semaphore(0), threading.Event()


class Job:
    """Draws `count` tokens after a prompt, up to `most` per call; records what happens to it.

    If it is `ill`, what it draws is not finite.
    """

    def __init__(self, slot, prompt, count, most=1, ill=False):
        self.ill = ill
        self.slot, self.tokens, self.left, self.most = slot, list(prompt), count, most
        self.calls = []
        self.error = None
        self.done, self.closed = threading.Event(), False
        self.start = 0

    def work(self):
        start = self.start
        try:
            while self.left:
                step = Step(self.slot, start, self.tokens[start:])
                ran = yield Draw(step, GREEDY, max_tokens=min(self.most, self.left))
                if self.ill:
                    raise FloatingPointError("the logits are not finite")
                self.calls.append(len(ran.result.token_ids))
                self.tokens += ran.result.token_ids
                self.left -= len(ran.result.token_ids)
                start = len(self.tokens) - 1
            self.done.set()
        finally:
            self.closed = True

    def fail(self, error):
        self.error = error
        self.done.set()


def submit(loop, *jobs):
    for job in jobs:
        loop.add(job, job.work(), job.fail)


def ended(loop, job):
    """Submit a job alone; return what it failed with."""
    submit(loop, job)
    assert job.done.wait(WAIT_S)
    return job.error


@contextmanager
def running(budget=None, model=None, **options):
    loop = Loop(model or ScriptedModel(), budget=budget, **options)
    loop.start().result(WAIT_S)
    try:
        yield loop
    finally:
        loop.gate.release(10**6)
        loop.stop()


def test_a_job_alone_takes_all_its_steps_in_a_call():
    with running() as loop:
        job = Job(0, [3], 7, most=4)
        submit(loop, job)
        assert job.done.wait(WAIT_S)
    assert job.tokens == [3, 4, 5, 6, 7, 8, 9, 10]
    assert job.calls == [4, 3]
    assert loop.told == [(1, 1)] * 7


def test_in_company_all_take_as_many_steps_as_the_least():
    with running() as loop:
        loop.shut()
        first = Job(3, [1], 1)
        submit(loop, first)
        assert loop.at_gate.wait(WAIT_S)
        jobs = [Job(0, [3], 6, most=4), Job(1, [3], 6, most=2), Job(2, [9, 8], 2, most=4)]
        submit(loop, *jobs)
        loop.gate.release(10**6)
        assert all(job.done.wait(WAIT_S) for job in jobs)
    assert [job.calls for job in jobs] == [[2, 2, 2], [2, 2, 2], [2]]
    assert loop.told == [(1, 1), (3, 4), (3, 3), (2, 2), (2, 2), (2, 2), (2, 2)]


def test_who_comes_meanwhile_ends_a_call_of_several_steps():
    with running() as loop:
        loop.shut()
        long = Job(0, [3], 8, most=8)
        submit(loop, long)
        assert loop.at_gate.wait(WAIT_S)
        late = Job(1, [20], 1)
        submit(loop, late)
        loop.gate.release(10**6)
        assert long.done.wait(WAIT_S)
        assert late.done.wait(WAIT_S)
    assert long.calls == [1, 1, 6]
    assert late.tokens == [20, 21]


def test_a_prompt_goes_in_pieces_while_others_take_their_turns():
    with running(StepBudget(max_tokens=32, prefill_chunk=8)) as loop:
        loop.shut()
        long = Job(0, list(range(30)), 1)
        short = Job(1, [3], 6, most=4)
        submit(loop, Job(2, [1], 1))
        assert loop.at_gate.wait(WAIT_S)
        submit(loop, long, short)
        loop.gate.release(10**6)
        assert long.done.wait(WAIT_S)
        assert short.done.wait(WAIT_S)
    assert short.calls == [1, 1, 1, 1, 2]
    pieces = [len(s.token_ids) for steps in loop.model.calls for s in steps if s.slot == 0]
    assert pieces == [8, 8, 8, 6]
    assert long.calls == [1]


def run_crowd(cache):
    """Six long jobs at once, each with a slot of its own."""
    model = ScriptedModel(num_slots=6, context_length=60, cache=cache)
    jobs = [Job(model.cache.acquire().slot, [i] * (5 + 3 * i), 40 - i, most=3) for i in range(6)]
    with running(StepBudget(prefill_chunk=16), model) as loop:
        submit(loop, *jobs)
        assert all(job.done.wait(WAIT_S) for job in jobs)
        assert all(job.error is None for job in jobs)
    starts = [s.start for steps in model.calls for s in steps if s.slot == jobs[0].slot]
    assert starts == sorted(starts), "the oldest loses nothing"
    return jobs


def test_where_memory_is_short_the_youngest_are_computed_again():
    expected = [job.tokens for job in run_crowd(SlotTable(6, 60))]
    plenty, scarce, least = (PageTable(6, 60, count, 4) for count in (90, 22, 15))
    for cache in (plenty, scarce, least):
        assert [job.tokens for job in run_crowd(cache)] == expected
    assert plenty.preemptions == 0
    assert 0 < scarce.preemptions < 60
    assert 0 < least.preemptions < 60


def test_what_a_session_lost_between_its_steps_is_computed_first():
    cache = PageTable(2, 60, 15, 4)
    model = ScriptedModel(num_slots=2, context_length=60, cache=cache)
    first = Job(cache.acquire().slot, list(range(20)), 2)
    second = Job(cache.acquire().slot, [7], 45)
    with running(model=model) as loop:
        for job in (first, second):
            submit(loop, job)
            assert job.done.wait(WAIT_S)
        assert cache.length(first.slot) == 0
        again = Job(first.slot, first.tokens, 3)
        again.start = len(first.tokens) - 1
        submit(loop, again)
        assert again.done.wait(WAIT_S)
    assert again.tokens == list(range(25))
    assert model.calls[-3][0].start == 0


def test_a_step_that_fails_fails_one():
    with running() as loop:
        loop.shut()
        loop.poison = 13
        blocker = Job(3, [1], 1)
        submit(loop, blocker)
        assert loop.at_gate.wait(WAIT_S)
        good, bad = Job(0, [3], 5, most=5), Job(1, [11], 5, most=5)
        submit(loop, good, bad)
        loop.gate.release(10**6)
        assert good.done.wait(WAIT_S)
        assert bad.done.wait(WAIT_S)
        again = Job(1, [20], 2)
        submit(loop, again)
        assert again.done.wait(WAIT_S)
    assert good.tokens == [3, 4, 5, 6, 7, 8]
    assert good.error is None
    assert str(bad.error) == "the model of the test service failed: RuntimeError: poison"
    assert isinstance(bad.error, ModelFailureError)
    assert not loop.failures.lost.done()
    assert bad.closed
    assert again.tokens == [20, 21, 22]


def test_an_owner_that_leaves_ends_its_work_before_the_next_step():
    with running() as loop:
        loop.shut()
        leaving, staying = Job(0, [3], 50, most=50), Job(1, [7], 3)
        submit(loop, leaving)
        assert loop.at_gate.wait(WAIT_S)
        released = threading.Event()
        loop.drop(leaving, released.set)
        never = Job(2, [5], 1)
        submit(loop, staying, never)
        loop.drop(never, lambda: None)
        loop.gate.release(1)
        assert released.wait(WAIT_S)
        assert leaving.closed
        loop.gate.release(10**6)
        assert staying.done.wait(WAIT_S)
    assert leaving.calls == [1]
    assert not never.calls
    assert not never.closed, "it never began"


def test_the_end_is_told_to_all_that_wait():
    loop = Loop(ScriptedModel())
    loop.start().result(WAIT_S)
    loop.shut()
    jobs = [Job(i, [i], 9) for i in range(2)]
    submit(loop, jobs[0])
    assert loop.at_gate.wait(WAIT_S)
    submit(loop, jobs[1])
    stopping = threading.Thread(target=loop.stop)
    stopping.start()
    loop.gate.release(10**6)
    stopping.join(WAIT_S)
    assert all(isinstance(job.error, UnavailableError) for job in jobs)
    assert "the test service is shutting down" in str(jobs[0].error)


def test_what_preparing_raises_is_told_to_who_starts_it():
    def prepare():
        raise OSError("no memory")

    loop = Loop(ScriptedModel(), prepare=prepare)
    with pytest.raises(OSError, match="no memory"):
        loop.start().result(WAIT_S)
    loop.stop()


def test_a_call_that_hangs_loses_the_model():
    with running(step_timeout_s=0.2) as loop:
        assert ended(loop, Job(0, [3], 1)) is None
        loop.shut()
        jobs = [Job(slot, [3], 1) for slot in range(3)]
        submit(loop, jobs[0])
        assert loop.at_gate.wait(WAIT_S)
        assert loop.step_running_ns > 0
        submit(loop, *jobs[1:])
        for job in jobs:
            assert job.done.wait(WAIT_S)
            assert isinstance(job.error, ModelLostError)
            assert "a step of 1 tokens has been running for" in str(job.error)
        assert "has been running" in loop.failures.lost.result(WAIT_S)
        assert isinstance(ended(loop, Job(3, [3], 1)), ModelLostError), "nothing is begun any more"
        loop.stop()  # waits for nobody


def test_a_slow_start_is_no_hang():
    never = threading.Event()
    with running(prepare=lambda: never.wait(1.0), step_timeout_s=0.1) as loop:
        assert ended(loop, Job(0, [3], 1)) is None
        assert loop.step_running_ns == 0


def test_results_that_are_no_numbers_are_failures_of_the_model():
    with running() as loop:
        error = ended(loop, Job(2, [3], 1, ill=True))
        assert isinstance(error, ModelFailureError)
        assert "the logits are not finite" in str(error)
        assert loop.spoiled_slots == [2]
        assert ended(loop, Job(0, [3], 1)) is None
        for _ in range(3):
            assert ended(loop, Job(0, [3], 1, ill=True))
            assert ended(loop, Job(0, [3], 1, ill=True))
            assert not loop.failures.lost.done()
            assert ended(loop, Job(1, [3], 1)) is None
        for _ in range(3):
            assert ended(loop, Job(0, [3], 1, ill=True))
        assert "3 steps in a row failed" in loop.failures.lost.result(WAIT_S)


@pytest.mark.parametrize("error", [FloatingPointError("x"), ZeroDivisionError("x")])
def test_work_that_fails_before_its_first_step_ends_alone(error):
    with running() as loop:

        def work():
            raise error
            yield

        broken = threading.Event()
        loop.add(object(), work(), lambda _: broken.set())
        assert broken.wait(WAIT_S)
        assert ended(loop, Job(0, [3], 1)) is None
