"""The live page, in headless Chromium against a small server that speaks the same contract from a script."""

import json
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import foredraft.server

PAGE = Path(next(iter(foredraft.server.__path__))) / "page"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install -e '.[dev]')")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on this machine's PATH")
expect = playwright.expect

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "default-src 'self'"

Round = dict[str, Any]


def one_round(kept: list[str], own: str | None, rejected: tuple[str, ...] = ()) -> Round:
    """Accepted draft tokens, then the target's own (None where the answer ends before it)."""
    pieces = [[text, index + 1] for index, text in enumerate(kept)] + ([[own, 0]] if own is not None else [])
    drafted = len(kept) + len(rejected)
    return {"pieces": pieces, "drafted": drafted, "accepted": len(kept), "rejected": list(rejected)}


ROUNDS = [
    one_round([], "The"),
    one_round([" sky", " is"], " blue", (" a", " the", "\n")),
    one_round([" because", " air", " scatters", " short", " waves"], " more"),
    one_round([], " than", (" <b>", " long")),
    one_round([], " long"),
    one_round([" ones", ".", "\n"], "\n", (" End",)),
    one_round(["<img src=x onerror=alert(1)>", "é"], None),
]
TEXT = "The sky is blue because air scatters short waves more than long ones.\n\n<img src=x onerror=alert(1)>é"


def plainly(rounds: list[Round]) -> list[Round]:
    return [one_round([], text) for entry in rounds for text, _ in entry["pieces"]]


@dataclass
class Script:
    """What the server does next.

    hold_after: the chunk after which it sends comments until ``released``. key: the API key it asks for.
    refusal: status and message instead of an answer. break_after: chunks before an error in the stream.
    cut_after: chunks before the connection ends. pause: seconds between two chunks, of (speculative, plain) answers.
    silent_tokens: of the usage, without a piece.
    """

    rounds: list[Round] = field(default_factory=lambda: ROUNDS)
    plain_rounds: list[Round] | None = None
    speculation: dict[str, Any] | None = field(
        default_factory=lambda: {"method": "dflash", "num_speculative_tokens": 5},
    )
    rounds_per_chunk: int = 1
    pause: tuple[float, float] = (0.01, 0.01)
    hold_after: int | None = None
    key: str | None = None
    refusal: tuple[int, str] | None = None
    break_after: int | None = None
    cut_after: int | None = None
    silent_tokens: int = 0


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.script = Script()
        self.released = threading.Event()
        self.disconnected = threading.Event()
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.spans: list[list[float]] = []
        self.sent: list[list[float]] = []

    def handle_error(self, *_: object) -> None:
        pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        script = self.server.script
        name = {"/": "index.html"}.get(self.path, self.path.removeprefix("/page/"))
        if (PAGE / name).is_file():
            kind = TYPES[Path(name).suffix] + ("" if name.endswith(".svg") else "; charset=utf-8")
            self.answer(200, (PAGE / name).read_bytes(), kind)
        elif self.refused():
            return
        elif self.path == "/v1/models":
            model = {"id": "smollm2-135m", "object": "model", "max_model_len": 8192}
            self.json(200, {"object": "list", "data": [{**model, "speculative_config": script.speculation}]})
        elif self.path == "/version":
            self.json(200, {"version": "0.1.0"})
        else:
            self.json(404, error("no such path", "NotFoundError", 404))

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        script = self.server.script
        if script.refusal:
            status, message = script.refusal
            self.json(status, error(message, "BadRequestError", status))
            return
        plain = (body.get("speculative_config") or {}).get("num_speculative_tokens") == 0 or not script.speculation
        span = [time.perf_counter(), math.inf]
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.spans.append(span)
            self.server.sent.append([])
            sent = self.server.sent[-1]
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        try:
            self.stream(script, plain, sent)
        except OSError:
            self.server.disconnected.set()
        span[1] = time.perf_counter()

    def stream(self, script: Script, plain: bool, sent: list[float]) -> None:
        rounds = script.rounds
        if plain:
            rounds = plainly(rounds) if script.plain_rounds is None else script.plain_rounds
        self.chunk({"role": "assistant", "content": ""})
        for index, begin in enumerate(range(0, len(rounds), script.rounds_per_chunk)):
            if index == script.break_after:
                self.event(error("the engine stopped", "InternalServerError", 500))
                return
            if index == script.cut_after:
                return
            time.sleep(script.pause[plain])
            these = rounds[begin : begin + script.rounds_per_chunk]
            self.chunk({"content": "".join(text for entry in these for text, _ in entry["pieces"])}, rounds=these)
            sent.append(time.perf_counter())
            while index == script.hold_after and not self.server.released.is_set():
                self.raw(b": still here\n\n")
                time.sleep(0.02)
        self.chunk({}, finish_reason="stop")
        tokens = sum(len(entry["pieces"]) for entry in rounds) + script.silent_tokens
        usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}
        self.event({"object": "chat.completion.chunk", "choices": [], "usage": usage})
        self.raw(b"data: [DONE]\n\n")

    def chunk(self, delta: dict[str, str], **more: object) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": None, **more}
        self.event({"object": "chat.completion.chunk", "choices": [choice]})

    def event(self, content: dict[str, Any]) -> None:
        self.raw(f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode())

    def raw(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def refused(self) -> bool:
        key = self.server.script.key
        if key is None or self.headers["Authorization"] == f"Bearer {key}":
            return False
        self.json(401, error("Invalid API key.", "AuthenticationError", 401))
        return True

    def json(self, status: int, content: dict[str, Any]) -> None:
        self.answer(status, json.dumps(content).encode(), "application/json")

    def answer(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)


def error(message: str, kind: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


@pytest.fixture(scope="module")
def running_server() -> Iterator[FakeServer]:
    server = FakeServer()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # The module ends it: the loop that playwright runs would be in the way of other tests' own.
    with playwright.sync_playwright() as api:
        chromium = api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def server(running_server: FakeServer) -> FakeServer:
    running_server.reset()
    return running_server


Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, server: FakeServer) -> Iterator[Open]:
    """Opens the page. In the end it must have logged no error but of the statuses told, and asked nobody else."""
    contexts, problems, allowed = [], [], set()

    def on_console(message: Any) -> None:
        status = re.search(r"responded with a status of (\d+)", message.text)
        if message.type in ("error", "warning") and not (status and int(status[1]) in allowed):
            problems.append(message.text)

    def on_request(request: Any) -> None:
        if not request.url.startswith(server.url):
            problems.append(f"asked for {request.url}")

    def open_page(*statuses: int, path: str = "", **options: Any) -> Any:
        allowed.update(statuses)
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", on_console)
        page.on("pageerror", lambda thrown: problems.append(str(thrown)))
        page.on("request", on_request)
        page.goto(server.url + path)
        return page

    yield open_page
    server.released.set()
    for context in contexts:
        context.close()
    assert problems == []


def lane(page: Any, name: str) -> Any:
    return page.get_by_role("region", name=name, exact=True)


def reading(page: Any, name: str, what: str) -> str:
    return lane(page, name).locator(f"[data-reading={what}]").inner_text()


def milliseconds(shown: str) -> float:
    value, unit = shown.split()
    return float(value) * {"ms": 1, "s": 1000}[unit]


def run(page: Any, choice: str = "Method only") -> None:
    page.get_by_role("radio", name=choice).check()
    page.get_by_role("button", name="Generate").click()


def finished(page: Any, *names: str) -> None:
    for name in names:
        expect(lane(page, name).locator(".state")).to_have_text("complete")


def test_header_names_model_method_and_length(opened: Open) -> None:
    page = opened()
    for name, value in {
        "model": "smollm2-135m",
        "method": "dflash",
        "draft-length": "5",
        "context": "8,192 tokens",
        "version": "0.1.0",
    }.items():
        expect(page.locator(f"#{name}")).to_have_text(value)
    expect(page).to_have_title("foredraft · smollm2-135m")


def test_tokens_appear_while_they_stream_and_carry_their_origin(opened: Open, server: FakeServer) -> None:
    server.script.hold_after = 1
    page = opened()
    run(page)
    answer = lane(page, "dflash").locator(".answer")
    expect(answer).to_have_text("The sky is blue")
    expect(lane(page, "dflash").locator(".state")).to_have_text("writing")
    server.released.set()
    finished(page, "dflash")
    assert answer.evaluate("box => box.textContent") == TEXT

    tokens = answer.locator(".token").evaluate_all(
        "all => all.map(t => [t.textContent, Number(t.dataset.position ?? 0), getComputedStyle(t).backgroundColor])",
    )
    assert [[text, origin] for text, origin, _ in tokens] == [piece for entry in ROUNDS for piece in entry["pieces"]]
    colours: dict[int, set[str]] = {}
    for _, origin, colour in tokens:
        colours.setdefault(origin, set()).add(colour)
    assert colours[0] == {"rgba(0, 0, 0, 0)"}
    assert all(len(of_one) == 1 for of_one in colours.values())
    assert len(set.union(*colours.values())) == 6
    steps = page.locator("#scale li").evaluate_all("all => all.map(s => getComputedStyle(s).backgroundColor)")
    assert [{step} for step in steps] == [colours[position] for position in range(1, 6)]


def test_request_holds_what_the_form_says(opened: Open, server: FakeServer) -> None:
    page = opened()
    page.get_by_label("Prompt", exact=True).fill("Why?")
    page.get_by_text("System prompt", exact=True).click()
    page.get_by_label("System prompt, optional").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Seed").fill("12")
    page.get_by_label("Max tokens").fill("33")
    page.get_by_label("Prompt", exact=True).press("Control+Enter")
    finished(page, "dflash", "plain decoding")
    common = {
        "model": "smollm2-135m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
        "temperature": 0.7,
        "seed": 12,
        "max_tokens": 33,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_rounds": True,
    }
    assert server.bodies == [common, {**common, "speculative_config": {"num_speculative_tokens": 0}}]


def test_an_empty_seed_is_drawn_once_for_both(opened: Open, server: FakeServer) -> None:
    page = opened()
    page.get_by_label("Seed").fill("")
    run(page, "Race")
    finished(page, "dflash", "plain decoding")
    first, second = (body["seed"] for body in server.bodies)
    assert first == second >= 0
    assert page.get_by_label("Seed").get_attribute("placeholder") == str(first)


@pytest.mark.parametrize("rounds_per_chunk", [1, 3, 100])
def test_counters_equal_what_was_sent(opened: Open, server: FakeServer, rounds_per_chunk: int) -> None:
    server.script.rounds_per_chunk = rounds_per_chunk
    page = opened()
    run(page)
    finished(page, "dflash")
    tokens = sum(len(entry["pieces"]) for entry in ROUNDS)
    assert reading(page, "dflash", "tokens") == str(tokens) == "18"
    assert reading(page, "dflash", "tau") == f"{(tokens - 1) / (len(ROUNDS) - 1):.2f}" == "2.83"
    assert (reading(page, "dflash", "speed") == "–") == (rounds_per_chunk == 100)
    rows = page.get_by_role("table", name="Acceptance rate by block position").locator("tbody tr")
    shown = rows.evaluate_all("all => all.map(row => [...row.cells].map(cell => cell.innerText.trim()))")
    # By hand, of the rounds above: 5, 5, 2, 0, 4 and 2 drafted, of which 2, 5, 0, 0, 3 and 2 were kept.
    assert [tuple(row) for row in shown] == [
        ("1", "80 %", "4 of 5"),
        ("2", "80 %", "4 of 5"),
        ("3", "67 %", "2 of 3"),
        ("4", "33 %", "1 of 3"),
        ("5", "50 %", "1 of 2"),
    ]
    widths = rows.locator(".bar").evaluate_all("all => all.map(bar => bar.style.width)")
    assert [round(float(width.rstrip("%"))) for width in widths] == [80, 80, 67, 33, 50]


def test_the_usage_counts_tokens_without_text(opened: Open, server: FakeServer) -> None:
    server.script.rounds = [*ROUNDS, one_round([], None, (" and",))]
    server.script.silent_tokens = 1
    page = opened()
    run(page)
    finished(page, "dflash")
    assert reading(page, "dflash", "tokens") == "19"
    assert reading(page, "dflash", "tau") == f"{18 / 7:.2f}"
    last = lane(page, "dflash").locator(".round").last
    last.hover()
    expect(lane(page, "dflash").locator(".details")).to_contain_text("Round 7: 1 drafted, 0 accepted, rejected: ' and'")


def test_a_round_may_say_how_many_tokens_it_committed(opened: Open, server: FakeServer) -> None:
    """Text comes later than its token where a stop string might still match or a character is not complete."""
    late = {**one_round([], None, (" a",)), "committed": 1}
    server.script.rounds = [one_round([], "The"), late, {**one_round([" sky", " is"], " blue"), "committed": 2}]
    server.script.hold_after = 2
    page = opened()
    run(page)
    expect(lane(page, "dflash").locator(".answer")).to_have_text("The sky is blue")
    assert reading(page, "dflash", "tokens") == "4"


def test_speeds_are_those_of_the_stream(opened: Open, server: FakeServer) -> None:
    server.script.pause = (0.1, 0.1)
    page = opened()
    run(page)
    finished(page, "dflash")
    (sent,), ((asked, _),) = server.sent, server.spans
    # As the server saw it, with room for a busy machine: 17 tokens came after the first chunk.
    assert float(reading(page, "dflash", "speed")) == pytest.approx(17 / (sent[-1] - sent[0]), rel=0.4)
    assert milliseconds(reading(page, "dflash", "first")) >= 1000 * (sent[0] - asked) - 1


def test_hover_shows_what_was_rejected(opened: Open) -> None:
    page = opened()
    run(page)
    finished(page, "dflash")
    details = lane(page, "dflash").locator(".details")
    rounds = lane(page, "dflash").locator(".round")
    rounds.nth(1).locator(".token").first.hover()
    expect(details).to_have_text("Round 1: 5 drafted, 2 accepted, rejected: ' a', ' the', '↵'")
    assert details.locator("del").all_inner_texts() == ["' a'", "' the'", "'↵'"]
    assert details.get_attribute("aria-live") == "off"
    rounds.nth(2).hover()
    expect(details).to_have_text("Round 2: 5 drafted, 5 accepted")
    rounds.nth(3).hover()
    expect(details).to_have_text("Round 3: 2 drafted, 0 accepted, rejected: ' <b>', ' long'")
    rounds.nth(4).hover()
    expect(details).to_have_text("Round 4: nothing drafted, the target’s own token")
    rounds.nth(0).hover()
    expect(details).to_have_text("The prompt’s round: nothing drafted, the target’s own token")
    page.get_by_role("heading", level=1).hover()
    expect(details).to_contain_text("Point at a round")


def test_arrow_keys_move_between_rounds(opened: Open) -> None:
    page = opened()
    run(page)
    finished(page, "dflash")
    details = lane(page, "dflash").locator(".details")
    page.get_by_label("Show the positions").focus()
    page.keyboard.press("Tab")
    expect(details).to_contain_text("The prompt’s round")
    assert details.get_attribute("aria-live") == "polite"
    outline = page.evaluate("getComputedStyle(document.activeElement).outline")
    assert "2px" in outline and "solid" in outline
    for key, start in {
        "ArrowRight": "Round 1: 5 drafted, 2 accepted, rejected: ' a'",
        "ArrowDown": "Round 2:",
        "ArrowLeft": "Round 1:",
        "ArrowUp": "The prompt’s round",
        "End": "Round 6: 2 drafted, 2 accepted",
        "Home": "The prompt’s round",
    }.items():
        page.keyboard.press(key)
        expect(details).to_contain_text(start)
    page.keyboard.press("ArrowRight")
    assert lane(page, "dflash").locator(".round[tabindex='0']").count() == 1
    lane(page, "dflash").locator(".round").nth(3).hover()
    expect(details).to_contain_text("Round 3:")
    page.get_by_role("heading", level=1).hover()
    expect(details).to_contain_text("Round 1:")


def test_positions_can_be_read_without_colour(opened: Open) -> None:
    page = opened()
    run(page)
    finished(page, "dflash")
    marks = "all => all.map(t => getComputedStyle(t, '::after').content)"
    tokens = lane(page, "dflash").locator(".round").nth(1).locator(".token")
    assert tokens.evaluate_all(marks) == ["none", "none", "none"]
    page.get_by_label("Show the positions").check()
    assert tokens.evaluate_all(marks) == ['"1"', '"2"', "none"]


def test_race_says_identical_and_how_much_faster(opened: Open, server: FakeServer) -> None:
    server.script.pause = (0.1, 0.1)
    page = opened()
    run(page, "Race")
    expect(lane(page, "plain decoding").locator(".state")).to_have_text("waiting for dflash")
    finished(page, "dflash", "plain decoding")
    result = page.get_by_role("region", name="Result")
    expect(result).to_contain_text("Identical text")
    expect(result).to_contain_text("18 tokens, compared character by character")
    fast, slow = (sent[-1] - asked for sent, (asked, _) in zip(server.sent, server.spans, strict=True))
    assert float(result.locator("#ratio").inner_text().removesuffix("×")) == pytest.approx(slow / fast, rel=0.4)
    assert reading(page, "plain decoding", "tau") == "1.00"
    assert lane(page, "plain decoding").locator("table").is_hidden()
    (_, ended), (began, _) = server.spans
    assert began > ended
    assert "Identical text. dflash took" in page.get_by_role("status").inner_text()


def test_race_at_once_says_that_the_machine_is_shared(opened: Open, server: FakeServer) -> None:
    server.script.pause = (0.05, 0.05)
    page = opened()
    page.get_by_role("radio", name="At once").check()
    run(page, "Race")
    finished(page, "dflash", "plain decoding")
    (first, first_end), (second, second_end) = server.spans
    assert max(first, second) < min(first_end, second_end)
    expect(page.get_by_role("region", name="Result")).to_contain_text("neither speed is its own")


def test_race_says_where_texts_differ(opened: Open, server: FakeServer) -> None:
    server.script.plain_rounds = [one_round([], "The"), one_round([], " sea")]
    page = opened()
    run(page, "Race")
    finished(page, "dflash", "plain decoding")
    result = page.get_by_role("region", name="Result")
    expect(result).to_contain_text("The texts differ")
    expect(result).to_contain_text("From character 6 on.")


def test_plain_only(opened: Open, server: FakeServer) -> None:
    page = opened()
    run(page, "Plain only")
    finished(page, "plain decoding")
    assert [body["speculative_config"] for body in server.bodies] == [{"num_speculative_tokens": 0}]
    assert lane(page, "dflash").count() == 0
    assert page.get_by_role("region", name="Result").count() == 0


def test_stop_aborts_the_request(opened: Open, server: FakeServer) -> None:
    server.script.hold_after = 1
    page = opened()
    run(page, "Race")
    expect(lane(page, "dflash").locator(".answer")).to_have_text("The sky is blue")
    expect(page.get_by_role("button", name="Generate")).to_be_disabled()
    page.get_by_role("button", name="Stop").click()
    assert server.disconnected.wait(5)
    expect(lane(page, "dflash").locator(".state")).to_have_text("stopped")
    expect(lane(page, "dflash").locator(".answer")).to_have_text("The sky is blue")
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    assert len(server.bodies) == 1
    assert page.get_by_role("region", name="Result").count() == 0
    assert page.get_by_role("alert").inner_text() == ""
    page.get_by_role("button", name="Clear").click()
    expect(lane(page, "dflash").locator(".answer")).to_have_text("")
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("")


def test_a_refusal_is_shown(opened: Open, server: FakeServer) -> None:
    server.script.refusal = (400, "max_tokens must be <at most> 8192.")
    page = opened(400)
    run(page, "Race")
    expect(page.get_by_role("alert")).to_contain_text("max_tokens must be <at most> 8192.")
    expect(page.get_by_role("alert")).to_contain_text("BadRequestError, 400")
    expect(lane(page, "dflash").locator(".state")).to_have_text("failed")
    server.script.refusal = None
    page.get_by_role("button", name="Generate").click()
    finished(page, "dflash")
    assert page.get_by_role("alert").inner_text() == ""


@pytest.mark.parametrize(
    ("trouble", "message"),
    [("break_after", "the engine stopped"), ("cut_after", "closed the connection before the answer was complete")],
)
def test_an_error_in_the_stream_is_shown(opened: Open, server: FakeServer, trouble: str, message: str) -> None:
    setattr(server.script, trouble, 2)
    page = opened()
    run(page)
    expect(page.get_by_role("alert")).to_contain_text(message)
    expect(lane(page, "dflash").locator(".state")).to_have_text("failed")
    expect(lane(page, "dflash").locator(".answer")).to_have_text("The sky is blue")


def test_a_key_is_asked_for_only_when_the_server_wants_one(opened: Open, server: FakeServer) -> None:
    page = opened()
    expect(page.locator("#model")).to_have_text("smollm2-135m")
    assert page.get_by_label("API key").count() == 0 or page.get_by_label("API key").is_hidden()

    server.script.key = "sesame"
    page = opened(401)
    key = page.get_by_label("API key")
    expect(key).to_be_focused()
    assert page.get_by_role("alert").inner_text() == ""
    key.fill("wrong")
    key.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Invalid API key.")
    key.fill("sesame")
    page.get_by_role("button", name="Use key").click()
    expect(key).to_be_hidden()
    expect(page.locator("#model")).to_have_text("smollm2-135m")
    run(page)
    finished(page, "dflash")
    kept = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, document.forms[0].key.value]")
    assert kept == [0, 0, "", ""]


def test_n_auto_grows_the_scale_with_the_rounds(opened: Open, server: FakeServer) -> None:
    server.script.speculation = {"method": "ngram", "num_speculative_tokens": "auto"}
    server.script.rounds = [one_round([], "1"), one_round([" 2"] * 9, "3", ("4",))]
    page = opened()
    expect(page.locator("#draft-length")).to_have_text("auto")
    expect(page.locator("#scale li")).to_have_count(7)
    run(page)
    finished(page, "ngram")
    expect(page.locator("#scale li")).to_have_count(10)
    expect(lane(page, "ngram").locator("tbody tr")).to_have_count(10)


def test_without_a_drafter_only_plain_decoding_is_offered(opened: Open, server: FakeServer) -> None:
    server.script.speculation = None
    page = opened()
    expect(page.locator("#method")).to_have_text("none, plain decoding")
    expect(page.get_by_role("radio", name="Race")).to_be_disabled()
    page.get_by_role("button", name="Generate").click()
    finished(page, "plain decoding")
    assert "speculative_config" not in server.bodies[0]
    expect(page.get_by_role("radio", name="Race")).to_be_disabled()


def test_markup_in_tokens_stays_text(opened: Open) -> None:
    page = opened()
    run(page)
    finished(page, "dflash")
    assert page.locator("img").count() == 0


def test_the_page_is_all_the_server_is_asked_for(opened: Open, server: FakeServer) -> None:
    page = opened()
    expect(page.locator("#model")).to_have_text("smollm2-135m")
    asked = {"/", "/page/page.css", "/page/page.js", "/v1/models", "/version"}
    assert asked <= set(server.paths) <= asked | {"/page/icon.svg"}


def test_the_policy_is_in_force(browser: Any, server: FakeServer) -> None:
    """So that the other tests' silence means something."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url)
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'seen = 1'}))")
    assert page.evaluate("'seen' in window") is False
    context.close()
    source = (PAGE / "index.html").read_text()
    assert not re.search(r"\sstyle=|<style|\son\w+=|https?:|<script(?![^>]*\ssrc=)", source)


# ---------------------------------------------------------------------------------------------- accessibility

# The colour that an element's text or background really has, as the screen would show it.
PIXELS = """
const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
const pixel = (colour) => {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const colour = pixel(getComputedStyle(node).backgroundColor);
    if (colour[3]) return colour;
  }
  return [255, 255, 255, 255];
};
"""
TEXTS = f"""() => {{ {PIXELS}
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {{
    const parent = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !parent.checkVisibility() || parent.closest(":disabled, noscript")) continue;
    found.push([walker.currentNode.data, pixel(getComputedStyle(parent).color), behind(parent)]);
  }}
  return found;
}}"""
EDGES = f"""() => {{ {PIXELS}
  return [...document.querySelectorAll("textarea, input[type=number], .segments, button:enabled")].map((part) =>
    [part.id, pixel(getComputedStyle(part).borderTopColor), behind(part.parentElement)]);
}}"""
SCALE = f"""() => {{ {PIXELS}
  const panel = document.querySelector(".lane");
  return [behind(panel), ...[...document.querySelectorAll("#scale li")].map(behind)];
}}"""
RGB = list[int]


def linear(colour: RGB) -> list[float]:
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in colour[:3])]


def luminance(colour: list[float]) -> float:
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), colour, strict=True))


def contrast(one: RGB, other: RGB) -> float:
    """WCAG 2.2's contrast ratio."""
    low, high = sorted((luminance(linear(one)), luminance(linear(other))))
    return (high + 0.05) / (low + 0.05)


def product(matrix: list[list[float]], vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def oklab(colour: list[float]) -> list[float]:
    """Of linear sRGB (Ottosson 2020)."""
    cones = product(
        [
            [0.41222147, 0.53633254, 0.05144599],
            [0.21190350, 0.68069955, 0.10739696],
            [0.08830246, 0.28171884, 0.62997870],
        ],
        [max(0.0, part) for part in colour],
    )
    return product(
        [
            [0.21045426, 0.79361779, -0.00407205],
            [1.97799850, -2.42859221, 0.45059371],
            [0.02590404, 0.78277177, -0.80867577],
        ],
        [math.cbrt(cone) for cone in cones],
    )


# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear sRGB.
VISIONS = {
    "full": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    "none, grey": [[0.2126, 0.7152, 0.0722]] * 3,
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("positions", [3, 7, 15])
def test_the_colour_scale_is_ordered_for_every_eye(
    opened: Open, server: FakeServer, scheme: str, positions: int
) -> None:
    server.script.speculation = {"method": "dflash", "num_speculative_tokens": positions}
    page = opened(color_scheme=scheme)
    expect(page.locator("#scale li")).to_have_count(positions)
    colours = [linear(colour) for colour in page.evaluate(SCALE)]
    for vision, matrix in VISIONS.items():
        panel, *steps = (oklab(product(matrix, colour)) for colour in colours)
        away = [abs(step[0] - panel[0]) for step in steps]
        assert away == sorted(away), f"{vision}: not ordered"
        apart = [math.dist(one, other) for one, other in pairwise([panel, *steps])]
        # In OKLab about 0.02 is a just noticeable difference: the usual seven steps are above it.
        assert min(apart) > min(0.05, 0.16 / positions), f"{vision}: {apart}"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(opened: Open, server: FakeServer, scheme: str) -> None:
    page = opened(400, color_scheme=scheme)
    run(page, "Race")
    finished(page, "dflash", "plain decoding")
    page.get_by_label("Show the positions").check()
    lane(page, "dflash").locator(".round").nth(1).hover()
    texts = page.evaluate(TEXTS)
    assert {" sky", "Identical text", "' a'"} <= {text for text, *_ in texts}
    server.script.refusal = (400, "Refused.")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_contain_text("Refused.")
    texts += page.evaluate(TEXTS)
    assert [(text, ratio) for text, *colours in texts if (ratio := contrast(*colours)) < 4.5] == []
    edges = page.evaluate(EDGES)
    assert len(edges) > 8
    assert [(part, ratio) for part, *colours in edges if (ratio := contrast(*colours)) < 3] == []


def test_structure(opened: Open) -> None:
    page = opened()
    run(page, "Race")
    finished(page, "dflash", "plain decoding")
    unnamed = page.evaluate("""() => [...document.querySelectorAll("input, textarea, select, button")]
        .filter((part) => !part.labels?.length && !part.textContent.trim()).map((part) => part.outerHTML)""")
    assert unnamed == []
    levels = page.evaluate("""() => [...document.querySelectorAll("h1, h2, h3, h4")]
        .filter((part) => part.checkVisibility()).map((part) => Number(part.tagName[1]))""")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map((part) => part.id)")
    assert len(ids) == len(set(ids))
    dangling = page.evaluate("""() => [...document.querySelectorAll("[for], [aria-describedby], [aria-labelledby]")]
        .flatMap((part) => ["for", "aria-describedby", "aria-labelledby"].map((name) => part.getAttribute(name)))
        .filter((id) => id && !document.getElementById(id))""")
    assert dangling == []
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.get_by_role("main").count() == page.get_by_role("banner").count() == 1


def test_every_control_is_reached_and_seen_with_the_keyboard(opened: Open) -> None:
    page = opened()
    run(page, "Race")
    finished(page, "dflash", "plain decoding")
    page.get_by_label("Prompt", exact=True).focus()
    seen = []
    for _ in range(14):
        seen.append(
            page.evaluate("""() => { const part = document.activeElement;
                const shown = part.type === "radio" ? part.nextSibling : part;
                return [part.id || part.name || part.className || part.tagName,
                    getComputedStyle(shown).outlineStyle]; }"""),
        )
        page.keyboard.press("Tab")
    assert [name for name, _ in seen if name != "BODY"][:12] == [
        *("prompt", "SUMMARY", "run", "order", "temperature", "max-tokens", "seed", "generate", "clear", "positions"),
        *("round shown", "round shown"),
    ]
    assert {outline for name, outline in seen if name != "BODY"} <= {"solid", "auto"}


@pytest.mark.parametrize("width", [360, 700, 1000, 1600])
def test_nothing_runs_over_the_edge(opened: Open, server: FakeServer, width: int) -> None:
    server.script.rounds = [*ROUNDS, one_round(["x" * 300], "y", ("z" * 200,))]
    page = opened(viewport={"width": width, "height": 800})
    run(page, "Race")
    finished(page, "dflash", "plain decoding")
    lane(page, "dflash").locator(".round").last.hover()
    over = page.evaluate("""() => [...document.querySelectorAll("body *")].filter((part) => part.checkVisibility()
        && !part.closest(".unseen") && part.getBoundingClientRect().right > innerWidth + 1)
        .map((part) => part.outerHTML)""")
    assert over == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_less_motion_where_it_is_asked_for(opened: Open, server: FakeServer) -> None:
    server.script.hold_after = 1
    page = opened(reduced_motion="reduce")
    run(page)
    expect(lane(page, "dflash").locator(".state")).to_have_text("writing")
    moving = page.evaluate("() => document.getAnimations().length")
    assert moving == 0
    server.released.set()
    finished(page, "dflash")
