"""foredraft serve: the OpenAI server."""

import logging
import os
import signal
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from foredraft import __version__
from foredraft.cli import options
from foredraft.config import EngineConfig
from foredraft.errors import UserError
from foredraft.llm import LLM
from foredraft.models.loading import EMBEDDED, load_target
from foredraft.ops import NATIVE
from foredraft.server import memory
from foredraft.server.logs import log_to_stderr

if TYPE_CHECKING:
    from foredraft.server.app import ServerConfig

LOG = logging.getLogger("foredraft.server")
PREFILL_BESIDE_DECODE = 128
BACKLOG = 2048
"""Connections that may wait to be accepted, as many as uvicorn lets."""


def serve(
    model: options.Model,
    method: options.Method = None,
    drafter: options.Drafter = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    speculative_config: options.SpeculativeConfigOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name under which the model is served. \\[default: MODEL]", show_default=False)
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that clients must send; repeat for several. Better: FOREDRAFT_API_KEY.", show_default=False
        ),
    ] = None,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for keys and values: bytes (2G, 512M), or a share of the free memory (0.5, 50%). "
            "\\[default: half of it]",
            show_default=False,
        ),
    ] = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.", min=1)] = 64,
    max_queue: Annotated[int, typer.Option(help="Sequences that may wait; more get status 429.", min=0)] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most rows of prompts in a pass.", min=1)] = 512,
    prefill_beside_decode: Annotated[
        int, typer.Option(help="The same in passes in which others decode: lower is smoother.", min=1)
    ] = PREFILL_BESIDE_DECODE,
    prefix_caching: Annotated[bool, typer.Option(help="Keep what prompts that begin alike can share.")] = True,
    per_request_spec_decode_metrics: Annotated[
        str, typer.Option(help="What responses tell of speculation: none, summary or detailed.")
    ] = "none",
    max_body: Annotated[str, typer.Option(help="Largest request body.")] = "4M",
    deadline: Annotated[float, typer.Option(help="Most seconds of a request.", min=0.001)] = 3600.0,
    drain: Annotated[int, typer.Option(help="Seconds that accepted requests get at shutdown.", min=0)] = 600,
    log_format: Annotated[str, typer.Option(help="json, or text to read.")] = "json",
    seed: Annotated[int, typer.Option(help="From which requests without a seed get theirs.")] = 0,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "cpu",
    quantization: options.QuantizationOption = "none",
    kernels: options.KernelsOption = "auto",
) -> None:
    """Serve a model over the OpenAI HTTP API, with a live page at /.

    With the embedded model its DFlash drafter is used, as many tokens as pay, unless --method says otherwise.
    Stops on SIGTERM or Ctrl-C when the accepted requests are done.

    Examples:

      foredraft serve smollm2-135m

      foredraft serve smollm2-135m --method eagle3 -N auto --quantization mxfp4 --port 8001
    """
    # Here, so that the other commands do not wait a third of a second for them.
    import uvicorn

    from foredraft.server.answers import Detail
    from foredraft.server.app import ServerConfig, create_app
    from foredraft.server.connection import Connection

    if per_request_spec_decode_metrics not in get_args(Detail):
        raise UserError(
            f"--per-request-spec-decode-metrics is {per_request_spec_decode_metrics!r}, "
            "expected none, summary or detailed"
        )
    if log_format not in ("json", "text"):
        raise UserError(f"--log-format is {log_format!r}, expected json or text")
    if method is None and speculative_config is None and model == EMBEDDED:
        method = "dflash"
    log_to_stderr(as_json=log_format == "json")
    body_bytes = memory.size("--max-body", max_body)
    speculation = options.speculation(method, drafter, num_speculative_tokens, speculative_config)
    if speculation and speculation.num_speculative_tokens is None:
        speculation = replace(speculation, num_speculative_tokens="auto")
    listener = _listen(host, port)
    began = time.perf_counter()
    target = load_target(
        model,
        options.dtype(dtype),
        device,
        quantization=options.quantization(quantization),
        kernels=options.kernels(kernels),
    )
    paged = target.model.ops is NATIVE
    if kv_cache_memory is not None and not paged:
        raise UserError("--kv-cache-memory needs the native kernels (bfloat16 on the CPU); leave it out")
    limits = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_beside_decode=prefill_beside_decode,
        kv_cache_memory_bytes=memory.kv_bytes(kv_cache_memory) if paged else None,
        enable_prefix_caching=prefix_caching,
        drafter_errors="continue",
        seed=seed,
    )
    llm = LLM(target, speculation, engine_config=limits)
    config = ServerConfig(
        model_name=served_model_name or model,
        api_keys=tuple(api_key or ()) or tuple(filter(None, [os.environ.get("FOREDRAFT_API_KEY")])),
        max_queue=max_queue,
        detail=per_request_spec_decode_metrics,  # type: ignore[arg-type]
        body_bytes=body_bytes,
        deadline_seconds=deadline,
    )
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(llm, config),
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_keep_alive=30,
            timeout_graceful_shutdown=drain,
            h11_max_incomplete_event_size=64 * 1024,
            http=Connection,
            ws="none",
            server_header=False,
        )
    )

    def end(*_: object) -> None:
        server.should_exit = True

    # uvicorn stops at these signals once it runs, and raises them again when it is done: by then they have had their
    # effect.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    # From here on who connects is served: the line must not come before that is true.
    listener.listen(BACKLOG)
    where = f"http://{host}:{listener.getsockname()[1]}"
    LOG.info("serving", extra={"fields": start_line(llm, config, where, time.perf_counter() - began)})
    server.run(sockets=[listener])


def start_line(llm: LLM, config: "ServerConfig", where: str, seconds: float) -> dict[str, Any]:
    """What was loaded, what rounds cost, and where the memory goes."""
    costs, speculation = llm.engine.costs, llm.speculation
    found: dict[str, Any] = {
        "event": "ready",
        "url": where,
        "version": __version__,
        "model": config.model_name,
        "quantization": llm.target.quantization,
        "method": speculation.method if speculation else "none",
        "num_speculative_tokens": speculation.num_speculative_tokens if speculation else 0,
        "max_model_len": llm.engine.max_model_len,
        "max_num_seqs": llm.config.max_num_seqs,
        "max_queue": config.max_queue,
        "api_key_needed": bool(config.api_keys),
        "start_seconds": round(seconds, 2),
        "memory_mib": {name: round(size / memory.MIB, 1) for name, size in memory.plan(llm).items()},
    }
    if costs is not None:
        curve = costs.verify
        found["pass_ms_by_rows"] = {
            rows: round(1000 * taken, 2) for rows, taken in zip(curve.rows, curve.seconds, strict=True)
        }
        found["draft_ms_by_tokens"] = {count: round(1000 * costs.draft(1, count), 2) for count in (1, 3, 7)}
    return found


def _listen(host: str, port: int) -> socket.socket:
    """The socket, before anything slow, so that an address that is taken is told at once."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener
