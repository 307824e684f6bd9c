"""A served model with its predictor, batches and limits, for all protocols."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Collection, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import sparsejax
from sparsejax.options.predicting import Serving
from sparsejax.predictors.files import load_predictor
from sparsejax.predictors.predictor import Predictor
from sparsejax.predictors.runtime import Programs
from sparsejax.predictors.similar import similar_programs
from sparsejax.serving.batcher import (
    Answer,
    Batcher,
    BusyError,
    ClosedError,
    DeviceError,
    Failures,
)
from sparsejax.serving.changes import Changing
from sparsejax.serving.engine import Engine, Shape, TooLargeError, shapes_of
from sparsejax.serving.excluded import Excluded
from sparsejax.serving.histories import Histories
from sparsejax.serving.metrics import Metrics
from sparsejax.serving.protocol import Asked, Limits, RefusedError, Tensor, wanted
from sparsejax.serving.questions import Form, Lists, Question, Similar, form_of

NAME, EXTENSIONS = "sparsejax", ["binary_tensor_data"]
SIMILAR = "similar"  # the name of the second model
# The device counts as broken if this many batches in a row failed.
_FAILURES = 3
# Requests of at least this many bytes are read in another thread. Reading takes at least .1 ms,
# mostly in NumPy without Python's lock. Several such threads wait for the lock at each step.
_MANY = 4096
_TOGETHER = 4  # most requests with fewer bytes that are batched together
# Answers with at least this many names are written in another thread. Shorter ones take less than
# 1 ms, and a change of threads would cost the loop up to a tenth of that.
_MANY_NAMES = 8192


class Settings(Serving):
    """The settings of a service.

    Attributes:
      shapes: shapes for which programs are compiled, as for `Engine`.
      max_rows: number of rows that may wait for a batch; further requests are refused.
      at_once: most requests that are processed concurrently.
      timeout: seconds in which a request is answered or refused.
      body_seconds: seconds for a client to send the head of a request, and for its body.
      limits: largest sizes of a request.
      held: most bytes of the bodies of all requests that are processed.
      titles: text that the page shows beside the names of items.
    """

    shapes: tuple[Shape, ...] = ()
    max_rows: int = 4096
    at_once: int = 1024
    timeout: float = 30.0
    body_seconds: float = 10.0
    limits: Limits = dataclasses.field(default_factory=Limits)
    held: int = 2**28
    titles: Mapping[str, str] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Version:
    """A loaded predictor that answers requests.

    Attributes:
      model: name of the model.
      name: name of the version.
      form: inputs and outputs of its requests.
      predictor: the predictor whose programs run.
      batcher: queue of requests that rank all items, or of clicks.
      of_candidates: queue of requests that name the items to rank; None if there are no
        such requests.
      similar: version of the model of similar items; None if there is none.
    """

    model: str
    name: str
    form: Form
    predictor: Predictor
    batcher: Batcher
    of_candidates: Batcher | None = None
    similar: Version | None = None

    @property
    def failures(self) -> int:
        """Number of successive batches that the device could not run, in both batchers."""
        return self.batcher.failures

    def close(self) -> None:
        """Refuses further requests, and returns when all queued requests are answered."""
        self.batcher.close()
        for other in (self.of_candidates, self.similar):
            if other is not None:
                other.close()


class Answered[Written](NamedTuple):
    """An answer to a request.

    Attributes:
      content: content of the answer, in the form of a protocol.
      rows: number of rows of the answer.
      model: name of the model that answered.
      version: version of the model.
    """

    content: Written
    rows: int
    model: str | None
    version: str | None


@dataclasses.dataclass(eq=False, slots=True)
class InHand:
    """A request that has not been answered yet.

    Attributes:
      held: bytes of its body that are in memory.
    """

    held: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class _Request:
    """A prediction request in progress; see `Service.predict`.

    Attributes:
      begun: time of arrival, on the clock of `time.monotonic`.
      seconds: seconds after which it fails.
      future: future that receives its answer.
      batcher: batcher that gets its rows; None until it is read.
      told: version that answers it, its tensors, and its rows; None until it is read.
    """

    model: str
    number: str | None
    read: Callable[[], Asked]
    begun: float
    seconds: float
    future: asyncio.Future[Answer]
    batcher: Any = None
    told: Any = None


class Service:
    """Answers requests for one model, whatever the protocol.

    Attributes:
      name: name of the model.
      settings: settings of the service.
      metrics: metrics of the service.
      draining: whether the service is about to end.
      excluded: items that are never recommended, set by `prepare`; None if there is
        no such file.
      changing: the source of changes to tables, or None.
    """

    def __init__(self, name: str, settings: Settings):
        """Makes a service without a version.

        Raises:
          ValueError: two models have the same name.
        """
        if settings.similar and name == SIMILAR:
            raise ValueError(
                f"{SIMILAR!r} is the name of the second model; choose another name for this one"
            )
        self.name, self.settings, self.metrics = name, settings, Metrics()
        self.draining = False
        self._version: Version | None = None
        self._older: list[Version] = []  # the most recent first
        self._histories: Histories | None = None
        self.excluded: Excluded | None = None
        self.changing: Changing | None = None
        if settings.changes is not None:
            self.changing = Changing(settings.changes, self.metrics)
        self._in_hand = self._held = 0
        self._others = ThreadPoolExecutor(1, thread_name_prefix="large requests")
        self._unread: collections.deque[_Request] = collections.deque()
        self.last_request = time.monotonic()

    def prepare(self) -> None:
        """Reads the earlier items of users and the excluded items, which all versions share.

        Raises:
          DataError: a file is missing or damaged, or it is no saved data set of rows.
          OSError: the file of excluded items cannot be read.
        """
        if self.settings.exclude_file is not None:
            self.excluded = Excluded(self.settings.exclude_file)
        if self.settings.histories is not None:
            self._histories = Histories(self.settings.histories)

    def made(self, path: str | os.PathLike[str], name: str) -> Version:
        """Loads, compiles and runs a predictor, which takes seconds.

        Raises:
          OSError: the file cannot be read.
          ValueError: the file is no predictor, or the predictor has no names, no vectors of
            items that `similar` needs, or no use for histories, excluded
            items or changes. All items are excluded. Or see `Engine`.
        """
        predictor = load_predictor(path)
        if self.excluded is not None:
            predictor = self.excluded.denying(predictor)
        if self.changing is not None:
            self.changing.check(predictor)
        shapes = shapes_of(predictor, self.settings.shapes)
        room = max(shape.entries for shape in shapes)
        people, failures = self.settings.user_features, Failures()
        form = form_of(predictor, self._histories, room, people)
        layer, own = predictor.signature.layer, predictor.model.programs
        if self.settings.similar and layer is None:
            raise ValueError(
                f"the model {SIMILAR!r} needs vectors of items, which this predictor does not "
                "have apart; export it again with this release, or serve without it"
            )

        def tell(programs: Programs) -> None:
            if self.excluded is not None:
                self.excluded.tell(programs, predictor.items)

        def engine(programs: Programs | None = None) -> Engine:
            return Engine(predictor, shapes, programs=programs)

        # Batchers are made last: after an error, their threads would keep the weights in memory.
        # `engine()` compares the file's answer, so it is called before the tables are changed.
        of_all, of_candidates, of_similar = engine(), None, None
        tell(own)
        if self.changing is not None:
            self.changing.take(predictor)
        if layer is not None:
            of_candidates = engine(own.only)
        if self.settings.similar:
            programs = similar_programs(predictor.signature, own)
            tell(programs)
            of_similar = engine(programs)

        with contextlib.ExitStack() as made:

            def batcher(engine: Engine) -> Batcher:
                found = Batcher(
                    engine,
                    failures=failures,
                    max_wait=self.settings.max_wait,
                    max_rows=self.settings.max_rows,
                    observe=self.metrics.batch,
                )
                made.callback(found.close)
                return found

            candidates = None if of_candidates is None else batcher(of_candidates)
            similar = None
            if of_similar is not None:
                assert isinstance(form, Lists)  # models of clicks have no layer
                like = Similar(predictor, form.names)
                similar = Version(SIMILAR, name, like, predictor, batcher(of_similar))
            version = Version(
                self.name, name, form, predictor, batcher(of_all), candidates, similar
            )
            made.pop_all()  # the version closes the batchers from now on
            return version

    def swap(self, version: Version) -> list[Version]:
        """Makes a version serve from now on; returns the versions that no longer answer.

        No request is lost if the caller runs in the thread of the requests, and closes the
        returned versions afterwards.
        """
        before = [] if self._version is None else [self._version]
        before += self._older
        others = [each for each in before if each.name != version.name]
        self._version, self._older = version, others[: self.settings.keep]
        self.metrics.serving(self.name, version.name)
        answer = version, *self._older
        return [each for each in before if each not in answer]

    def drop(self, versions: Collection[Version]) -> list[Version]:
        """Removes old versions and returns those it removed.

        The caller closes the returned versions, see `swap`. The version that serves stays.
        """
        gone = [each for each in self._older if each in versions]
        self._older = [each for each in self._older if each not in gone]
        return gone

    def unload(self) -> list[Version]:
        """Removes all versions and returns them. The caller closes them, see `swap`."""
        before, self._version, self._older = self._versions, None, []
        self.metrics.serving(self.name, None)
        return before

    def load(self, path: str | os.PathLike[str], name: str = "1") -> None:
        """Loads a first predictor and makes it serve; see `prepare` and `made`."""
        self.prepare()
        self.swap(self.made(path, name))

    def close(self) -> None:
        """Answers waiting requests, and refuses further ones."""
        self.draining = True
        for version in self._versions:
            version.close()
        self._others.shutdown()
        self.metrics.close()

    @property
    def _versions(self) -> list[Version]:
        """All versions that answer requests; the default version is first."""
        return [*([] if self._version is None else [self._version]), *self._older]

    @property
    def predictor(self) -> Predictor | None:
        """The predictor that serves, if there is one."""
        version = self._version
        return None if version is None else version.predictor

    @property
    def in_hand(self) -> int:
        """The number of requests that are not answered yet."""
        return self._in_hand

    @property
    def is_live(self) -> bool:
        """Whether the device can run batches."""
        version = self._version
        return version is None or version.failures < _FAILURES

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered, and clients should send more."""
        return self._version is not None and not self.draining and self.is_live

    @property
    def models(self) -> list[str]:
        """The names of the models; the first one is the service's own name."""
        return [self.name, *[SIMILAR] * self.settings.similar]

    def check_name(self, model: str) -> None:
        """Raises RefusedError unless the service has a model of this name."""
        if model not in self.models:
            shown = " and ".join(map(repr, self.models))
            raise RefusedError(
                404, f"unknown model {model!r:.80}; this service has {shown}"
            )

    def version(self, model: str, number: str | None) -> Version:
        """The version that answers requests for a model and version number.

        Raises:
          RefusedError: there is no such version.
        """
        self.check_name(model)
        if self._version is None:
            raise RefusedError(503, "the model is not loaded", retry_after=1)
        for version in self._versions:
            if number in (None, version.name):
                return version if model == self.name else version.similar or version
        known = ", ".join(repr(each.name) for each in self._versions)
        raise RefusedError(
            404,
            f"unknown version {number!r:.80} of the model {model!r}; this service has {known}",
        )

    def about(self) -> dict[str, Any]:
        """The metadata of the server, in the protocol's form."""
        version = sparsejax.__version__
        return {"name": NAME, "version": version, "extensions": EXTENSIONS}

    def about_model(self, version: Version) -> dict[str, Any]:
        """The metadata of a model, in the protocol's form."""
        both = {"inputs": version.form.inputs, "outputs": version.form.outputs}
        return {
            "name": version.model,
            "versions": [each.name for each in self._versions],
            "platform": NAME,
            **{
                what: [
                    {"name": t.name, "datatype": t.datatype, "shape": list(t.shape)}
                    for t in tensors
                ]
                for what, tensors in both.items()
            },
        }

    async def predict[Written](
        self,
        model: str,
        number: str | None,
        read: Callable[[], Asked],
        write: Callable[[Asked, str, str, list[Tensor]], Written],
        *,
        size: int = 0,
        seconds: float | None = None,
    ) -> Answered[Written]:
        """Answers a request in the form of a protocol.

        If the call is cancelled, the request's rows are not computed.

        Args:
          model: name of the requested model.
          number: number of the version, or None for the version that serves.
          read: function that reads the request.
          write: function that makes the answer from the request, the names of the model and the
            version, and the outputs.
          size: number of bytes of the request that NumPy reads.
          seconds: number of seconds after which the client does not use an
            answer any more.

        Raises:
          RefusedError: the request cannot be answered.
        """
        loop, begun = asyncio.get_running_loop(), time.monotonic()
        future: asyncio.Future[Answer] = loop.create_future()
        request = _Request(model, number, read, begun, self._allowed(seconds), future)
        late = loop.call_later(request.seconds, _expire, future)
        try:
            if size < _MANY:
                self._read(request)
                self._ask(request)
            else:
                self._unread.append(request)
                self._others.submit(self._ask_unread)
            answer = await future
        except TooLargeError as error:
            raise RefusedError(422, str(error)) from None
        except BusyError as error:
            raise RefusedError(429, str(error), retry_after=1) from None
        except ClosedError as error:
            raise RefusedError(503, str(error), retry_after=1) from None
        except DeviceError as error:
            raise RefusedError(503, str(error)) from None
        except FloatingPointError as error:
            raise RefusedError(422, str(error)) from None
        except TimeoutError:
            raise RefusedError(
                504, "the request was not answered within its time; ask for fewer rows"
            ) from None
        finally:
            late.cancel()
        version, asked, question = request.told

        rows = question.num_rows

        def written() -> Answered[Written]:
            found = wanted(asked, version.form.tensors(question, answer))
            content = write(asked, version.model, version.name, found)
            return Answered(content, rows, version.model, version.name)

        if rows * question.k < _MANY_NAMES:
            return written()
        return await loop.run_in_executor(self._others, written)

    def _ask_unread(self) -> None:
        """Reads small waiting requests in this thread, and queues them together.

        They then make one batch, which takes as many steps of Python as a single request.
        """
        read: list[_Request] = []
        while self._unread and len(read) < _TOGETHER:
            request = self._unread.popleft()
            with _to_its_future(request):
                if not request.future.done():  # otherwise the client has left
                    self._read(request)
                    read.append(request)
        if not read:
            return
        with read[0].batcher.together():
            for request in read:
                with _to_its_future(request):
                    self._ask(request)

    def _read(self, request: _Request) -> None:
        """Reads a request, and chooses its batcher.

        Raises:
          Exception: one of the errors that `predict` raises.
        """
        version = self.version(request.model, request.number)
        asked, question = self._question(version, request.read)
        request.seconds = self._seconds(asked, request)
        batcher = version.of_candidates if question.only else version.batcher
        assert batcher is not None  # otherwise the request was refused
        request.batcher, request.told = batcher, (version, asked, question)

    def _ask(self, request: _Request) -> None:
        """Queues the rows of a request that has been read. Its future will get the answer.

        Raises:
          Exception: one of the errors that `predict` or `Batcher.ask` raises.
        """
        while True:
            version, _, question = request.told
            deadline = request.begun + request.seconds
            try:
                request.batcher.ask(question.given, request.future, deadline=deadline)
            except ClosedError:
                # Another version may have replaced this one since the request was read.
                if self.version(request.model, request.number) is version:
                    raise
                self._read(request)
                continue
            if question.unknown is not None:
                self.metrics.unknown(int(question.unknown.sum()))
            if question.strangers is not None:
                self.metrics.strangers(int(question.strangers.sum()))
            return

    def _question(
        self, version: Version, read: Callable[[], Asked]
    ) -> tuple[Asked, Question]:
        """Reads a request, and converts it to rows."""
        asked = read()
        if asked.outputs is not None:
            known = [output.name for output in version.form.outputs]
            if unknown := [name for name in asked.outputs if name not in known]:
                raise RefusedError(
                    422,
                    f"unknown output {unknown[0]!r:.80}; this model has {', '.join(known)}",
                )
        return asked, version.form.question(asked, self.settings.limits)

    def _allowed(self, seconds: float | None) -> float:
        """The time limit of a request: the smaller of the client's and the service's limit."""
        allowed = self.settings.timeout
        return allowed if seconds is None else min(allowed, seconds)

    def _seconds(self, asked: Asked, request: _Request) -> float:
        """The time limit of a request after it was read: its parameters may set a smaller one."""
        timeout = asked.parameters.get("timeout", 0)
        if type(timeout) is not int or timeout < 0:
            raise RefusedError(
                422, f"timeout must be a number of microseconds, got {timeout!r:.40}"
            )
        own = timeout / 1e6
        if not 0 < own < request.seconds:
            return request.seconds
        left = request.begun + own - time.monotonic()
        loop, future = request.future.get_loop(), request.future
        loop.call_soon_threadsafe(loop.call_later, max(left, 0.0), _expire, future)
        return own

    def begin(self) -> InHand:
        """Counts a new request, until its `end`.

        Raises:
          RefusedError: too many requests are being processed.
        """
        self.last_request = time.monotonic()
        if self._in_hand >= self.settings.at_once:
            raise RefusedError(
                429,
                f"{self._in_hand} requests are in hand already; try again later",
                retry_after=1,
            )
        self._in_hand += 1
        return InHand()

    def hold(self, request: InHand, size: int) -> None:
        """Counts bytes of the body of a request that is being processed.

        Raises:
          RefusedError: the bodies of all requests would take too much memory.
        """
        if self._held + size > self.settings.held:
            raise RefusedError(
                503,
                f"the requests in hand have {self._held:,} bytes already, of "
                f"{self.settings.held:,} that may be held; try again later",
                retry_after=1,
            )
        self._held += size
        request.held += size

    def end(self, request: InHand) -> None:
        """Ends the count of a request that was answered."""
        self._in_hand -= 1
        self._held -= request.held


@contextlib.contextmanager
def _to_its_future(request: _Request) -> Generator[None]:
    """While this context is open, errors are passed to the request's future, in its loop."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the future raises it
        future = request.future
        future.get_loop().call_soon_threadsafe(_fail, future, error)


def _expire(future: asyncio.Future) -> None:
    """Sets TimeoutError on the future of a request whose time limit has passed."""
    _fail(future, TimeoutError())


def _fail(future: asyncio.Future, error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
