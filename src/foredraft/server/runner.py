"""The engine in a thread of its own, fed by an event loop."""

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from foredraft.engine.engine import Engine
from foredraft.engine.sequence import RoundTrace
from foredraft.engine.sequence import Sequence as Running
from foredraft.errors import UserError
from foredraft.llm import Progress, StreamUpdate
from foredraft.sampling_params import SamplingParams
from foredraft.server.metrics import Metrics

LOG = logging.getLogger("foredraft.server")


class Overloaded(RuntimeError):
    """The queue is full. retry_after: seconds after which a place may be free."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("the server has as many requests waiting as it takes; try again later")
        self.retry_after = retry_after


class RequestTimeout(RuntimeError):
    """A deadline has passed."""


class EngineFailure(RuntimeError):
    """A request could not be finished through no fault of its own."""


@dataclass(frozen=True)
class Submission:
    """One prompt. draft_limit: the most draft tokens of a round, None for what the server does. trace: whether updates
    tell of rounds."""

    prompt: Sequence[int]
    params: SamplingParams
    draft_limit: int | None = None
    trace: bool = False


@dataclass(frozen=True)
class Update:
    """What is new of one sequence. rounds: where the submission asked for them. sequence: to be read once it has
    finished, which is when ``finished`` says so."""

    prompt: int
    index: int
    new: StreamUpdate
    rounds: list[RoundTrace]
    logprobs_from: int
    finished: bool
    sequence: Running


@dataclass(eq=False)
class _Follower:
    """A sequence and what its job has heard of it. Belongs to the engine's thread."""

    job: "Job"
    prompt: int
    progress: Progress
    rounds: int = 0

    def update(self) -> Update | None:
        sequence, tokens = self.progress.sequence, self.progress.tokens
        new = self.progress.update()
        if new is None:
            return None
        rounds = sequence.rounds[self.rounds :] if sequence.rounds else []
        self.rounds += len(rounds)
        return Update(self.prompt, self.progress.index, new, rounds, tokens, sequence.finished, sequence)


@dataclass(eq=False)
class Job:
    """The sequences of one request. ``news`` belongs to the event loop."""

    submissions: Sequence[Submission]
    arrived: float
    news: deque[Update | Exception] = field(default_factory=deque)
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    followers: list[_Follower] = field(default_factory=list)
    unfinished: int = 0
    cancelled: bool = False

    @property
    def size(self) -> int:
        return sum(submission.params.n for submission in self.submissions)


class Runner:
    """Jobs in, updates out.

    max_queue: sequences that may wait beyond those that run at once; more are refused.
    """

    def __init__(self, engine: Engine, max_num_seqs: int, max_queue: int, metrics: Metrics) -> None:
        self._engine = engine
        self._room = max_num_seqs + max_queue
        self._max_num_seqs = max_num_seqs
        self._metrics = metrics
        self._inbox: deque[tuple[str, Job]] = deque()
        self._wake = threading.Condition()
        self._followers: dict[Running, _Follower] = {}
        self._active = 0
        self._pace = 1.0
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; sequences that have not finished are aborted."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def check_room(self, size: int) -> None:
        """Raise Overloaded unless ``size`` more sequences have a place, UserError if they never will."""
        if self._stopping or not self.alive:
            raise EngineFailure("the server is shutting down")
        if size > self._room:
            raise UserError(
                f"the request asks for {size} sequences (prompts times n), but this server takes at most {self._room}"
            )
        if self._active + size > self._room:
            waiting = self._active + size - self._room
            self._metrics.refused.inc()
            raise Overloaded(min(60, max(1, math.ceil(waiting * self._pace / self._max_num_seqs))))

    @contextmanager
    def reserved(self, size: int) -> Iterator[None]:
        """``size`` sequences have a place while their request is made ready; raises as ``check_room`` does."""
        self.check_room(size)
        self._active += size
        try:
            yield
        finally:
            self._active -= size

    async def run(self, submissions: Sequence[Submission], seconds: float, arrived: float) -> AsyncGenerator[Update]:
        """The updates of all sequences, as they come; leaving the iterator cancels what has not finished.

        arrived: when the request came, by ``perf_counter``. Raises Overloaded, UserError for a prompt or parameters
        that do not fit, EngineFailure, and RequestTimeout once ``seconds`` have passed since then.
        """
        job = Job(submissions, arrived)
        self.check_room(job.size)
        self._active += job.size
        job.unfinished = job.size
        late = {job: [RequestTimeout("the request's deadline has passed")]}
        timer = asyncio.get_running_loop().call_later(arrived + seconds - perf_counter(), _hear, late)
        self._send("add", job)
        try:
            while job.unfinished:
                await job.heard.wait()
                job.heard.clear()
                while job.news:
                    news = job.news.popleft()
                    if isinstance(news, Exception):
                        raise news
                    if news.finished:
                        job.unfinished -= 1
                        self._active -= 1
                        self._pace += 0.1 * (perf_counter() - job.arrived - self._pace)
                        if news.sequence.error is not None:
                            raise EngineFailure(news.sequence.error)
                    yield news
        finally:
            timer.cancel()
            if job.unfinished:
                self._active -= job.unfinished
                job.unfinished = 0
                self._send("cancel", job)

    def _send(self, what: str, job: Job) -> None:
        with self._wake:
            self._inbox.append((what, job))
            self._wake.notify()

    # The engine's thread.

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            with self._wake:
                self._stopping = True
                unread = {job for what, job in self._inbox if what == "add"}
            self._fail(list(self._followers), EngineFailure("the server is shutting down"), unread)

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._engine.has_work or self._stopping):
                    self._wake.wait()
                if self._stopping:
                    return
                orders = list(self._inbox)
                self._inbox.clear()
            for what, job in orders:
                if what == "add":
                    self._add(job)
                else:
                    self._cancel(job)
            if self._engine.has_work:
                self._step()

    def _add(self, job: Job) -> None:
        if job.cancelled:
            return
        added: list[_Follower] = []
        try:
            for number, submission in enumerate(job.submissions):
                for index, sequence in enumerate(self._engine.add(submission.prompt, submission.params)):
                    if submission.draft_limit is not None:
                        sequence.draft_limit = submission.draft_limit
                    if submission.trace:
                        sequence.rounds = []
                    sequence.arrived = job.arrived
                    added.append(_Follower(job, number, Progress(number, index, sequence)))
        except Exception as error:
            for follower in added:
                self._engine.abort(follower.progress.sequence)
            if not isinstance(error, UserError):
                LOG.exception("a request could not be added")
                error = EngineFailure("the request could not be started; the server's log says why")
            self._tell({job: [error]})
            return
        job.followers = added
        self._followers.update((follower.progress.sequence, follower) for follower in added)

    def _cancel(self, job: Job) -> None:
        job.cancelled = True
        for follower in job.followers:
            sequence = follower.progress.sequence
            if not sequence.finished:
                self._engine.abort(sequence)
                self._metrics.finished(sequence)
            self._followers.pop(sequence, None)

    def _step(self) -> None:
        try:
            changed = self._engine.step()
        except Exception:
            LOG.exception("a pass failed; the requests in it are lost, those that wait are not")
            lost = [sequence for sequence in self._followers if sequence.slot >= 0 or sequence.finished]
            self._fail(lost, EngineFailure("a pass of the model failed; the server's log says why"))
            return
        news: dict[Job, list[Update | Exception]] = {}
        now = perf_counter()
        for sequence in changed:
            follower = self._followers[sequence]
            update = follower.update()
            if update is None:
                continue
            self._metrics.progressed(sequence, len(update.new.token_ids), now)
            if update.finished:
                self._metrics.finished(sequence)
                del self._followers[sequence]
            news.setdefault(follower.job, []).append(update)
        self._tell(news)

    def _fail(self, sequences: Sequence[Running], error: Exception, unread: Set[Job] = frozenset()) -> None:
        """End these sequences, and tell their jobs and those that have not been read."""
        jobs = {self._followers[sequence].job for sequence in sequences} | unread
        for sequence in sequences:
            self._engine.abort(sequence)
            self._metrics.finished(sequence)
            del self._followers[sequence]
        self._tell({job: [error] for job in jobs})

    def _tell(self, news: dict[Job, list[Update | Exception]]) -> None:
        """Hand the news to the event loop, with one wake-up for all."""
        assert self._loop is not None
        if news:
            try:
                self._loop.call_soon_threadsafe(_hear, news)
            except RuntimeError:  # the loop has been closed
                LOG.warning("the event loop is gone; %d requests are not told of their end", len(news))


def _hear(news: Mapping[Job, Sequence[Update | Exception]]) -> None:
    for job, own in news.items():
        job.news.extend(own)
        job.heard.set()
