"""The HTTP application: routes, errors, limits."""

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.resources import files
from time import perf_counter, time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft import __version__
from foredraft.errors import UserError
from foredraft.llm import LLM
from foredraft.sampling_params import SamplingParams
from foredraft.server import protocol, tools
from foredraft.server.answers import Answer, Detail
from foredraft.server.metrics import Metrics
from foredraft.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    Unsupported,
)
from foredraft.server.runner import EngineFailure, Overloaded, RequestTimeout, Runner, Submission, Update

LOG = logging.getLogger("foredraft.server")
PAGE = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": ERROR_SCHEMA}}}
    for status, text in {
        400: "The request is not valid, or asks for what is not supported",
        401: "The API key is missing or wrong",
        404: "There is no such model",
        405: "The path has no such method",
        408: "The body did not come in time",
        413: "The body is too large",
        422: "The request is not valid",
        429: "The queue is full; Retry-After says when to come again",
        500: "The request failed through no fault of its own",
        504: "The deadline has passed",
    }.items()
}
OPEN_PATHS = frozenset({"/", "/health", "/version", *(f"/page/{name}" for name in PAGE)})
"""What needs no API key: the page asks for one."""


@dataclass(frozen=True)
class ServerConfig:
    """model_name: under which the model is served. api_keys: any of them lets a request in; none: no key is needed.

    max_queue: sequences that may wait. body_bytes: the largest body. body_seconds: in which it must have come.
    drain_seconds: for how long the rest of a refused one is read. deadline_seconds: for a whole request, unless it says
    less.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_queue: int = 128
    detail: Detail = "none"
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    drain_seconds: float = 2.0
    deadline_seconds: float = 3600.0


DRAINED = 8
"""Times the largest body: how much of a refused one is read."""
CLIENT_GONE = 499
"""nginx's status for a response that nobody waits for."""


class ClientGone(RuntimeError):
    """Nobody waits for the response."""


def create_app(llm: LLM, config: ServerConfig) -> FastAPI:
    """The application that serves ``llm``. Its lifespan runs the engine."""
    service = _Service(llm, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.runner.start()
        yield
        await service.runner.stop()
        service.compilers.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="foredraft",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        responses=ERRORS,
    )
    app.add_middleware(Guard, config=config)
    for kind in (UserError, Overloaded, EngineFailure, RequestTimeout, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    _add_routes(app, service)
    return app


COMPILERS = 2
"""Grammars that are compiled at the same time."""


@dataclass
class _Service:
    llm: LLM
    config: ServerConfig
    created: int = field(default_factory=lambda: int(time()))

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.config.model_name)
        # Of its own, so that what else is done beside the event loop need not wait for large grammars.
        self.compilers = ThreadPoolExecutor(COMPILERS, "grammars")
        self.metrics.watch(self.llm.engine)
        self.runner = Runner(self.llm.engine, self.llm.config.max_num_seqs, self.config.max_queue, self.metrics)
        self.template_knows_tools = tools.template_supports_tools(self.llm.tokenizer.chat_template)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.config.model_name:
            raise HTTPException(404, f"the model {name!r} is not served here; it is {self.config.model_name!r}")

    async def chat(self, request: ChatRequest) -> tuple[Answer, list[Submission]]:
        self.check_model(request.model)
        self.runner.check_room(request.n)
        messages = [message.plain() for message in request.messages]
        # Many long schemas take their time as well.
        choice = await asyncio.to_thread(
            tools.choice_of, request.tools, request.tool_choice, request.parallel_tool_calls
        )
        params = request.params(None if choice is None else choice.structured_outputs(self.llm.tokenizer))
        if choice is not None:
            # The tags of calls may be special tokens, and the parser wants to see them.
            params = replace(params, skip_special_tokens=False)
        variables = dict(request.chat_template_kwargs or {})
        listed = choice.tools if choice else ()
        messages = tools.tool_messages(messages, listed, self.template_knows_tools)
        if listed and self.template_knows_tools:
            variables["tools"] = listed
        encode = self.llm.tokenizer.encode_chat
        prompt = await asyncio.to_thread(
            encode, messages, add_generation_prompt=request.add_generation_prompt, **variables
        )
        await self._compile(params, request.n)
        return self._prepared(request, [prompt], params.logprobs, True, choice is not None), [
            self._submission(request, prompt, params)
        ]

    async def completion(self, request: CompletionRequest) -> tuple[Answer, list[Submission]]:
        self.check_model(request.model)
        params = request.params()
        encode, prompts = self.llm.tokenizer.encode, request.prompts()
        size = len(prompts) * request.n
        self.runner.check_room(size)
        encoded = [
            prompt if isinstance(prompt, list) else await asyncio.to_thread(encode, prompt, request.add_special_tokens)
            for prompt in prompts
        ]
        await self._compile(params, size)
        answer = self._prepared(request, encoded, params.logprobs, False, False, request.echo)
        return answer, [self._submission(request, prompt, params) for prompt in encoded]

    async def _compile(self, params: SamplingParams, size: int) -> None:
        """Grammars take their time, in which the engine's thread goes on. size: sequences that wait for it."""
        if params.structured_outputs is not None:
            with self.runner.reserved(size):
                await asyncio.get_running_loop().run_in_executor(self.compilers, self.llm.engine.prepare, params)

    def _submission(
        self, request: ChatRequest | CompletionRequest, prompt: Sequence[int], params: SamplingParams
    ) -> Submission:
        wants_rounds = request.return_rounds or self.config.detail != "none"
        return Submission(prompt, params, request.draft_limit, wants_rounds)

    def _prepared(
        self,
        request: ChatRequest | CompletionRequest,
        prompts: Sequence[Sequence[int]],
        logprobs: int | None,
        chat: bool,
        with_tools: bool,
        echo: bool = False,
    ) -> Answer:
        drafter = self.llm.drafter
        return Answer(
            chat=chat,
            model=self.config.model_name,
            tokenizer=self.llm.tokenizer,
            prompts=prompts,
            n=request.n,
            logprobs=logprobs,
            detail=self.config.detail,
            most_drafts=drafter.max_tokens if drafter else 0,
            trace=request.return_rounds,
            tools=with_tools,
            echo=echo,
        )

    async def respond(
        self,
        http: Request,
        request: ChatRequest | CompletionRequest,
        begin: float,
        answer: Answer,
        submissions: list[Submission],
    ) -> Response:
        seconds = min(request.deadline_seconds or self.config.deadline_seconds, self.config.deadline_seconds)
        updates = self.runner.run(submissions, seconds, begin)
        log = _RequestLog(answer.id, http, request, begin)
        first: list[Update] = []
        # A stream begins once the engine has taken the request, so that what it refuses has its status.
        work = _first(first, updates) if request.stream else _collect(answer, updates)
        try:
            if not await _unless_disconnected(http, work):
                raise ClientGone("the client has gone")
        except BaseException as error:
            await updates.aclose()
            log.ended(answer, error)
            if isinstance(error, ClientGone):
                return Response(status_code=CLIENT_GONE)
            raise
        if request.stream:
            stream = self._stream(request, answer, first[0], updates, log)
            return StreamingResponse(stream, media_type="text/event-stream", headers=STREAMING)
        log.ended(answer)
        return JSONResponse(answer.whole())

    async def _stream(
        self,
        request: ChatRequest | CompletionRequest,
        answer: Answer,
        first: Update,
        updates: AsyncGenerator[Update],
        log: "_RequestLog",
    ) -> AsyncIterator[bytes]:
        every = request.stream_options is not None and request.stream_options.continuous_usage_stats
        failure: BaseException | None = None
        try:
            if answer.chat:
                yield _event(answer.chunk(answer.opening()))
            update: Update | None = first
            while update is not None:
                part = answer.take(update)
                if _worth_telling(part):
                    yield _event(answer.chunk([part], **({"usage": answer.usage()} if every else {})))
                update = await anext(updates, None)
            if request.wants_usage:
                yield _event(answer.chunk([], usage=answer.usage(), **answer.metrics()))
            yield b"data: [DONE]\n\n"
        except (UserError, EngineFailure, RequestTimeout) as error:
            failure = error
            yield _event(_error_body(error)[1])
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            failure = ClientGone("the client has gone")
            raise
        finally:
            await updates.aclose()
            log.ended(answer, failure)


STREAMING = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def _add_routes(app: FastAPI, service: _Service) -> None:
    llm, config = service.llm, service.config

    @app.post("/v1/chat/completions", **_documented(ChatRequest))
    async def chat_completions(http: Request) -> Response:
        begin = perf_counter()
        request: ChatRequest = protocol.parse(ChatRequest, await http.body())
        return await service.respond(http, request, begin, *await service.chat(request))

    @app.post("/v1/completions", **_documented(CompletionRequest))
    async def completions(http: Request) -> Response:
        begin = perf_counter()
        request: CompletionRequest = protocol.parse(CompletionRequest, await http.body())
        return await service.respond(http, request, begin, *await service.completion(request))

    def card() -> dict[str, Any]:
        speculation = llm.speculation
        return {
            "id": config.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "foredraft",
            "root": llm.target.name,
            "max_model_len": llm.engine.max_model_len,
            "speculative_config": None
            if speculation is None
            else {"method": speculation.method, "num_speculative_tokens": speculation.num_speculative_tokens},
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return card()

    @app.post("/tokenize", **_documented(TokenizeRequest))
    async def tokenize(http: Request) -> dict[str, Any]:
        request: TokenizeRequest = protocol.parse(TokenizeRequest, await http.body())
        service.check_model(request.model)
        tokenizer = llm.tokenizer
        if request.messages is not None:
            messages = [message.plain() for message in request.messages]
            ids = await asyncio.to_thread(
                tokenizer.encode_chat, messages, add_generation_prompt=request.add_generation_prompt
            )
        else:
            ids = await asyncio.to_thread(tokenizer.encode, request.prompt or "", request.add_special_tokens)
        strings = [tokenizer.token_text(token) for token in ids] if request.return_token_strs else None
        return {"count": len(ids), "max_model_len": llm.engine.max_model_len, "tokens": ids, "token_strs": strings}

    @app.post("/detokenize", **_documented(DetokenizeRequest))
    async def detokenize(http: Request) -> dict[str, Any]:
        request: DetokenizeRequest = protocol.parse(DetokenizeRequest, await http.body())
        service.check_model(request.model)
        size = llm.target.model.config.vocab_size
        if any(not 0 <= token < size for token in request.tokens):
            raise Unsupported(f"tokens must be ids from 0 to {size - 1}", "tokens")
        return {"prompt": llm.tokenizer.decode(request.tokens, skip_special_tokens=False)}

    @app.get("/health", response_class=Response, responses={503: {"description": "The engine has stopped"}})
    async def health() -> Response:
        return Response(status_code=200 if service.runner.alive else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        text = await asyncio.to_thread(service.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def add_page(path: str, name: str) -> None:
        content = files("foredraft.server").joinpath("page", name).read_bytes()

        @app.get(path, include_in_schema=False)
        async def page() -> Response:
            return Response(content, media_type=PAGE[name], headers=PAGE_HEADERS)

    add_page("/", "index.html")
    for name in PAGE:
        add_page(f"/page/{name}", name)


def _documented(kind: type[Any]) -> dict[str, Any]:
    """The body's schema for the OpenAPI description; parsing is ours, for errors in OpenAI's shape."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    body = json.loads(json.dumps(schema))
    return {
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(body, definitions)}}},
        },
        "responses": {200: {"content": {"text/event-stream": {}}}},
    }


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(entry, definitions) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


async def _first(found: list[Update], updates: AsyncIterator[Update]) -> None:
    found.append(await anext(updates))


async def _collect(answer: Answer, updates: AsyncIterator[Update]) -> None:
    async for update in updates:
        answer.take(update)


async def _unless_disconnected(http: Request, work: Awaitable[None]) -> bool:
    """Do ``work``, but cancel it once the client has gone; whether it was done."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return True
        return False
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _worth_telling(part: Mapping[str, Any]) -> bool:
    said = part.get("text") or part.get("delta", {}).get("content") or part.get("delta", {}).get("tool_calls")
    return bool(said or part["logprobs"] or part["finish_reason"] or part.get("rounds"))


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


KINDS: Sequence[tuple[type[Exception], int, str]] = (
    (UserError, 400, "invalid_request_error"),
    (Overloaded, 429, "overloaded_error"),
    (EngineFailure, 500, "server_error"),
    (RequestTimeout, 504, "timeout_error"),
)


def _error_body(error: BaseException) -> tuple[int, dict[str, Any]]:
    """The status and OpenAI's description of an error; of one that was not foreseen, nothing but that it happened."""
    status, kind, text = 500, "server_error", "an internal error occurred; the server's log says more"
    for own, code, name in KINDS:
        if isinstance(error, own):
            status, kind, text = code, name, str(error)
    if isinstance(error, HTTPException):
        status, text = error.status_code, str(error.detail)
        kind = "invalid_request_error" if status < 500 else "server_error"
    param = error.param if isinstance(error, Unsupported) else None
    return status, {"error": {"message": text, "type": kind, "param": param, "code": status}}


async def _answer_error(_: Request, error: Exception) -> Response:
    status, body = _error_body(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(error.retry_after)
    return JSONResponse(body, status, headers)


@dataclass
class _RequestLog:
    """One structured line for each request."""

    id: str
    http: Request
    request: ChatRequest | CompletionRequest
    begin: float

    def ended(self, answer: Answer, error: BaseException | None = None) -> None:
        usage = answer.usage()
        sequences = [choice.sequence for choice in answer.choices if choice.sequence is not None]
        rounds = sum(sequence.acceptance.rounds for sequence in sequences)
        committed = sum(sequence.acceptance.committed for sequence in sequences)
        fields = {
            "event": "request",
            "id": self.id,
            "path": self.http.url.path,
            "user": self.request.user,
            "stream": self.request.stream,
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "seconds": round(perf_counter() - self.begin, 4),
            "acceptance_length": round(committed / rounds, 3) if rounds else None,
            "finish_reasons": [choice.finish_reason for choice in answer.choices],
            "error": None if error is None else str(error) or type(error).__name__,
        }
        LOG.info("request", extra={"fields": fields})


class Guard:
    """Around the application: API keys, the size of bodies, and clients too slow to send."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._keys = [key.encode() for key in config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None and b"expect" not in headers:
            await self._drain(receive)
        if refusal is None:
            body = await self._body(receive)
            refusal = body if isinstance(body, tuple) else None
        if refusal is not None:
            status, text = refusal
            # The body may not have been read to its end.
            more = {"Connection": "close"} | ({"WWW-Authenticate": "Bearer"} if status == 401 else {})
            response = await _answer_error(Request(scope), HTTPException(status, text, more))
            await response(scope, receive, send)
            return
        assert isinstance(body, bytes)
        await self._app(scope, _replaying(body, receive), send)

    def _refusal(self, path: str, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        if self._keys and path not in OPEN_PATHS:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            # All are compared, each in constant time.
            matches = [hmac.compare_digest(key, own) for own in self._keys]
            if scheme.lower() != b"bearer" or not any(matches):
                return 401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._config.body_bytes:
            return 413, self._too_large
        return None

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._config.body_bytes} bytes"

    async def _body(self, receive: Receive) -> bytes | tuple[int, str]:
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._config.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return b"".join(parts)
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._config.body_bytes:
                        if message.get("more_body"):
                            await self._drain(receive)
                        return 413, self._too_large
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            return 408, f"the body did not come within {self._config.body_seconds:g} seconds"

    async def _drain(self, receive: Receive) -> None:
        """Take in some more of a refused body and drop it: many clients do not read before they have sent, and would
        see no more than a connection that is reset."""
        left = DRAINED * self._config.body_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_seconds):
                more = True
                while more and left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    more = message.get("more_body", False)


def _replaying(body: bytes, receive: Receive) -> Receive:
    """``receive`` for the application: the body that has been read already, then what comes."""
    told = False

    async def replay() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
