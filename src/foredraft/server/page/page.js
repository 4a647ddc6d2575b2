// The live page of `foredraft serve`: one prompt, its answer as it is generated, and where each token came from.
// Text from the server or the user enters the document as text nodes only.

const METHOD_HINT = "Point at a round to see what was rejected, or go into the text with Tab and move with the arrow keys.";
const PLAIN_HINT = "Nothing is drafted: each round is one pass of the target for one token.";
const AUTO_POSITIONS = 7; // Of the colour scale when N is auto, until a round drafts further.
const PLAIN = { speculative_config: { num_speculative_tokens: 0 } };
const REFRESH_MS = 40; // Drawing shares the cores with the model: no more often than the eye needs.

const $ = (id) => document.getElementById(id);

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
const speed = (value) => (value < 100 ? value.toFixed(1) : Math.round(value).toString());
const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥");

// ---------------------------------------------------------------------------------------------- the server

let apiKey = ""; // In memory only.

class ServerError extends Error {
  constructor(error, status) {
    super(error?.message ?? `The server answered with status ${status}.`);
    this.label = [error?.type, error?.code].filter((part) => part != null).join(", ");
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(apiKey && { Authorization: `Bearer ${apiKey}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new ServerError(answer?.error, response.status);
}

/** The objects of a stream of server-sent events, up to [DONE]. */
async function* objects(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The server closed the connection before the answer was complete.");
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const object = JSON.parse(data);
      if (object.error) throw new ServerError(object.error, 200);
      yield object;
    }
  }
}

// -------------------------------------------------------------------------------------------- measurements

/**
 * What one answer measured, in milliseconds since its request.
 *
 * The first round is the prompt's: its one token was not drafted for, so τ leaves it out. Tokens per second are counted
 * after the first chunk of tokens has arrived, the prompt's time is the time to first token. While text streams, a
 * round without `committed` counts as many tokens as it has pieces; the usage at the end has the last word, for a
 * stop token has no text.
 */
class Measurement {
  start = performance.now();
  first = null;
  last = null;
  rounds = 0;
  tokens = 0;
  firstTokens = 0; // Of the first chunk.
  proposed = []; // By position: rounds that drafted there,
  kept = []; // and rounds that kept it.

  add(rounds) {
    const now = performance.now() - this.start;
    for (const round of rounds) {
      this.rounds += 1;
      this.tokens += round.committed ?? round.pieces.length;
      for (let position = 0; position < round.drafted; position += 1) {
        this.proposed[position] = (this.proposed[position] ?? 0) + 1;
        this.kept[position] = (this.kept[position] ?? 0) + (position < round.accepted ? 1 : 0);
      }
    }
    if (this.tokens === 0) return;
    this.last = now;
    if (this.first === null) [this.first, this.firstTokens] = [now, this.tokens];
  }

  get tau() {
    return this.rounds > 1 ? (this.tokens - 1) / (this.rounds - 1) : null;
  }

  /** Tokens per second after the first. */
  get decoding() {
    return this.last > this.first ? (1000 * (this.tokens - this.firstTokens)) / (this.last - this.first) : null;
  }

  /** Tokens per second, the prompt's time included. */
  get overall() {
    return this.last > 0 ? (1000 * this.tokens) / this.last : null;
  }
}

// --------------------------------------------------------------------------------------------------- lanes

/** One way of decoding: its answer, its readings, its acceptance rates. */
class Lane {
  constructor(kind, name) {
    this.plain = kind === "plain";
    this.root = $("lane").content.cloneNode(true).firstElementChild;
    this.answer = this.root.querySelector(".answer");
    this.details = this.root.querySelector(".details");
    this.table = this.root.querySelector(".acceptance");
    this.readings = Object.fromEntries(
      [...this.root.querySelectorAll("[data-reading]")].map((reading) => [reading.dataset.reading, reading]),
    );
    this.root.classList.add(kind);
    const title = this.root.querySelector("h2");
    title.id = `title-${kind}`;
    this.root.setAttribute("aria-labelledby", title.id);
    this.rename(name);
    this.answer.addEventListener("mouseover", (event) => this.#point(event.target));
    this.answer.addEventListener("mouseleave", () => this.#point(document.activeElement));
    this.answer.addEventListener("focusin", (event) => this.#enter(event.target));
    this.answer.addEventListener("focusout", () => this.#show(null));
    this.answer.addEventListener("keydown", (event) => this.#move(event));
    this.clear();
  }

  rename(name) {
    this.name = name;
    this.root.querySelector("h2").textContent = name;
    this.answer.setAttribute("aria-label", `Answer, ${name}`);
  }

  set state(text) {
    this.root.querySelector(".state").textContent = text;
  }

  clear() {
    clearTimeout(this.timer);
    Object.assign(this, { measurement: null, text: "", rounds: [], drawn: 0, timer: null, finishReason: null });
    this.answer.replaceChildren();
    this.state = "ready";
    for (const reading of Object.values(this.readings)) reading.textContent = "–";
    this.#show(null);
    this.drawRates();
  }

  /** Resolves when the answer is complete; throws what went wrong, AbortError if it was stopped. */
  async run(body, signal) {
    this.state = "reading the prompt";
    this.measurement = new Measurement();
    this.root.classList.add("running");
    try {
      const response = await ask("v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(this.plain && server.method ? { ...body, ...PLAIN } : body),
        signal,
      });
      for await (const chunk of objects(response)) this.#take(chunk);
      this.state = { stop: "complete", length: "stopped at max tokens" }[this.finishReason] ?? this.finishReason ?? "complete";
    } catch (error) {
      this.state = error.name === "AbortError" ? "stopped" : "failed";
      throw error;
    } finally {
      this.root.classList.remove("running");
      this.#draw();
    }
  }

  #take(chunk) {
    const choice = chunk.choices?.[0];
    const content = choice?.delta?.content ?? "";
    const rounds = choice?.rounds ?? [];
    if (chunk.usage) this.measurement.tokens = chunk.usage.completion_tokens;
    if (content && !rounds.length) throw new Error("The server sent text without its rounds (return_rounds).");
    this.text += content;
    this.finishReason = choice?.finish_reason ?? this.finishReason;
    if (!rounds.length) return;
    if (!this.rounds.length) this.state = "writing";
    this.rounds.push(...rounds);
    this.measurement.add(rounds);
    this.timer ??= setTimeout(() => this.#draw(), REFRESH_MS);
  }

  #draw() {
    clearTimeout(this.timer);
    this.timer = null;
    const box = this.answer;
    const follow = box.scrollHeight - box.scrollTop - box.clientHeight < 40 && !box.contains(document.activeElement);
    const fresh = document.createDocumentFragment();
    for (; this.drawn < this.rounds.length; this.drawn += 1) fresh.append(this.#round(this.drawn));
    box.append(fresh);
    if (!box.querySelector(".shown")) this.#show(null);
    if (follow) box.scrollTop = box.scrollHeight;
    const { tau, decoding, first, tokens } = this.measurement;
    this.readings.tau.textContent = tau === null ? "–" : tau.toFixed(2);
    this.readings.speed.textContent = decoding === null ? "–" : speed(decoding);
    this.readings.first.textContent = first === null ? "–" : seconds(first);
    this.readings.tokens.textContent = tokens;
    this.drawRates();
  }

  #round(index) {
    const made = element("span", { className: "round", tabIndex: index ? -1 : 0 });
    made.dataset.round = index;
    const { pieces } = this.rounds[index];
    if (pieces.every(([text]) => !text)) made.classList.add("silent");
    for (const [text, origin] of pieces) {
      const token = element("span", { className: "token", textContent: text });
      if (origin) {
        token.dataset.position = origin;
        paint(token, origin);
        if (/^\s*\n\s*$/.test(text)) token.classList.add("break");
      }
      made.append(token);
    }
    return made;
  }

  drawRates() {
    const proposed = this.measurement?.proposed ?? [];
    const body = this.table.tBodies[0];
    const rows = Math.max(proposed.length, this.plain ? 0 : server.positions);
    while (body.rows.length > rows) body.lastChild.remove();
    while (body.rows.length < rows) body.append(rateRow(body.rows.length + 1));
    this.table.hidden = rows === 0;
    for (let position = 0; position < rows; position += 1) {
      const [, rate, counts] = body.rows[position].cells;
      const rounds = proposed[position] ?? 0;
      const kept = rounds ? this.measurement.kept[position] : 0;
      rate.querySelector(".bar").style.width = rounds ? `${(100 * kept) / rounds}%` : "0";
      rate.querySelector(".value").textContent = rounds ? `${Math.round((100 * kept) / rounds)} %` : "–";
      counts.textContent = rounds ? `${kept} of ${rounds}` : "–";
    }
    if (!this.plain && rows > $("scale").children.length) drawScale(rows);
  }

  // Rounds: pointed at, or reached with the keyboard. Only the keyboard makes the details line speak.

  #point(target) {
    const round = this.answer.contains(target) ? target.closest(".round") : null;
    this.details.setAttribute("aria-live", "off");
    this.#show(round);
  }

  #enter(target) {
    const round = target.closest(".round");
    if (!round) return;
    this.answer.querySelector('.round[tabindex="0"]').tabIndex = -1;
    round.tabIndex = 0;
    this.details.setAttribute("aria-live", "polite");
    this.#show(round);
  }

  #move(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const here = event.target.closest(".round");
    const there = {
      ArrowLeft: here?.previousSibling,
      ArrowUp: here?.previousSibling,
      ArrowRight: here?.nextSibling,
      ArrowDown: here?.nextSibling,
      Home: this.answer.firstChild,
      End: this.answer.lastChild,
    };
    if (!here || !(event.key in there)) return;
    event.preventDefault();
    there[event.key]?.focus();
  }

  #show(round) {
    this.answer.querySelector(".shown")?.classList.remove("shown");
    round?.classList.add("shown");
    if (!round) {
      this.details.replaceChildren(!this.rounds.length ? "" : this.plain ? PLAIN_HINT : METHOD_HINT);
      return;
    }
    const index = Number(round.dataset.round);
    const { drafted, accepted, rejected } = this.rounds[index];
    const name = index ? `Round ${index}: ` : "The prompt’s round: ";
    if (!drafted) {
      this.details.replaceChildren(`${name}nothing drafted, the target’s own token`);
      return;
    }
    const words = rejected.flatMap((text) => [", ", element("del", { textContent: `'${visible(text)}'` })]).slice(1);
    this.details.replaceChildren(`${name}${drafted} drafted, ${accepted} accepted`, ...(words.length ? [", rejected: ", ...words] : []));
  }
}

function rateRow(position) {
  const bar = element("span", { className: "bar" });
  paint(bar, position);
  const track = element("span", { className: "track", ariaHidden: "true" }, bar);
  return element(
    "tr",
    {},
    element("th", { scope: "row", textContent: position }),
    element("td", {}, track, element("span", { className: "value" })),
    element("td"),
  );
}

/** Gives an element the colour of a block position. */
function paint(target, position) {
  target.style.backgroundColor = `var(--position-${position})`;
}

/** Spreads the colour scale over so many positions, and shows it. */
function drawScale(positions) {
  const steps = Array.from({ length: positions }, (_, index) => {
    const share = positions > 1 ? (100 * index) / (positions - 1) : 0;
    const colour = `color-mix(in oklch, var(--near), var(--far) ${share.toFixed(2)}%)`;
    document.documentElement.style.setProperty(`--position-${index + 1}`, colour);
    const step = element("li", { textContent: index + 1 });
    paint(step, index + 1);
    return step;
  });
  $("scale").replaceChildren(...steps);
}

// ------------------------------------------------------------------------------------------------- the page

const server = { model: null, method: null, positions: 0 };
const lanes = { method: new Lane("method", "method"), plain: new Lane("plain", "plain decoding") };
let running = null; // The AbortController of what runs.

$("lanes").append(lanes.method.root, lanes.plain.root);

async function learnServer() {
  try {
    const [models, version] = await Promise.all([ask("v1/models"), ask("version")].map(async (answer) => (await answer).json()));
    const model = models.data[0];
    const speculation = model.speculative_config;
    const length = speculation?.num_speculative_tokens;
    server.model = model.id;
    server.method = speculation?.method ?? null;
    server.positions = Number.isInteger(length) ? length : 0;
    document.title = `foredraft · ${model.id}`;
    $("model").textContent = model.id;
    $("method").textContent = server.method ?? "none, plain decoding";
    $("draft-length").textContent = length ?? "–";
    $("context").textContent = model.max_model_len ? counted(model.max_model_len.toLocaleString("en"), "token") : "–";
    $("version").textContent = version.version;
    if (model.max_model_len) $("max-tokens").max = model.max_model_len;
    if (server.method) lanes.method.rename(server.method);
    else {
      document.querySelector('[name="run"][value="plain"]').checked = true;
      $("run-choice").disabled = true;
    }
    drawScale(server.positions || AUTO_POSITIONS);
    $("legend").hidden = !server.method;
    lanes.method.drawRates();
    arrange();
    return true;
  } catch (error) {
    report(error);
    return false;
  }
}

const choice = (name) => document.querySelector(`[name="${name}"]:checked`).value;

/** Shows what the chosen run needs. */
function arrange() {
  const run = choice("run");
  $("order-choice").disabled = run !== "race";
  lanes.method.root.hidden = run === "plain";
  lanes.plain.root.hidden = run === "method";
  $("lanes").className = run;
  $("verdict").hidden = true;
}

function report(error) {
  if (error.status === 401) $("key-form").hidden = false;
  if (error.status === 401 && !apiKey) {
    $("key").focus();
    return;
  }
  const unreachable = error instanceof TypeError;
  const message = element("p", {}, unreachable ? `The server cannot be reached (${error.message}).` : error.message);
  if (error.label) message.append(" ", element("span", { className: "label", textContent: error.label }));
  $("alert").replaceChildren(message);
  if (error.status === 401) $("key").focus();
}

function requestBody() {
  if ($("seed").value === "") $("seed").placeholder = String(Math.floor(Math.random() * 2 ** 31));
  const messages = [{ role: "user", content: $("prompt").value }];
  if ($("system").value.trim()) messages.unshift({ role: "system", content: $("system").value });
  return {
    model: server.model,
    messages,
    temperature: Number($("temperature").value),
    seed: Number($("seed").value || $("seed").placeholder),
    max_tokens: Number($("max-tokens").value),
    stream: true,
    stream_options: { include_usage: true },
    return_rounds: true,
  };
}

function busy(is) {
  const [from, to] = is ? [$("generate"), $("stop")] : [$("stop"), $("generate")];
  const moved = document.activeElement === from;
  to.disabled = false;
  from.disabled = true;
  if (moved) to.focus();
  for (const part of [$("order-choice"), $("run-choice"), $("clear")]) part.disabled = is;
  if (!is) {
    $("run-choice").disabled = !server.method;
    $("order-choice").disabled = choice("run") !== "race";
  }
}

async function generate() {
  if (running) return;
  $("alert").replaceChildren();
  running = new AbortController();
  busy(true);
  const { signal } = running;
  try {
    if (!server.model && !(await learnServer())) return;
    clearAnswers();
    const body = requestBody();
    const run = choice("run");
    // The method goes first: whatever the first run leaves warm can then only help plain decoding.
    const runners = run === "race" ? [lanes.method, lanes.plain] : [lanes[run]];
    const together = run === "race" && choice("order") === "together";
    if (together) await Promise.all(runners.map((lane) => lane.run(body, signal)));
    else {
      for (const lane of runners.slice(1)) lane.state = `waiting for ${runners[0].name}`;
      for (const lane of runners) await lane.run(body, signal);
    }
    if (run === "race") judge(together, body);
    else announce(runners[0]);
  } catch (error) {
    running.abort();
    if (error.name === "AbortError") $("announcer").textContent = "Stopped.";
    else report(error);
  } finally {
    running = null;
    busy(false);
    for (const lane of Object.values(lanes)) if (!lane.measurement) lane.state = "ready";
  }
}

function announce(lane) {
  const { tokens, tau, decoding } = lane.measurement;
  const parts = [counted(tokens, "token")];
  if (tau !== null) parts.push(`${tau.toFixed(2)} tokens per round`);
  if (decoding !== null) parts.push(`${speed(decoding)} tokens per second`);
  $("announcer").textContent = `${lane.name}: ${parts.join(", ")}.`;
}

/** After a race: are the texts identical, and which was faster by how much. */
function judge(together, { temperature }) {
  const { method, plain } = lanes;
  const [fast, slow] = [method.measurement, plain.measurement];
  const ratio = fast.overall && slow.overall ? fast.overall / slow.overall : null;
  const decoding = fast.decoding && slow.decoding ? fast.decoding / slow.decoding : null;
  const identical = method.text === plain.text;

  $("ratio").textContent = ratio === null ? "–" : `${ratio.toFixed(2)}×`;
  $("sameness").textContent = identical ? "Identical text" : "The texts differ";
  $("sameness").className = identical ? "same" : "different";
  const findings = [];
  if (identical) findings.push(`${counted(fast.tokens, "token")}, compared character by character.`);
  else {
    findings.push(`From character ${firstDifference(method.text, plain.text) + 1} on.`);
    if (temperature > 0) findings.push("The rejection rule keeps the distribution, not the text; under the exact rule this is an error.");
    findings.push("foredraft’s native kernels promise the same text; its PyTorch path may round differently.");
  }
  if (decoding !== null) findings.push(`The ratio counts the time to the first token, the first part of the bars; after the first token it is ${decoding.toFixed(2)}×.`);
  if (together) findings.push("Both ran at once and shared the machine, so neither speed is its own.");
  $("finding").textContent = findings.join(" ");
  drawTimes([method, plain]);
  $("verdict").hidden = false;
  $("announcer").textContent =
    `${$("sameness").textContent}. ${method.name} took ${seconds(fast.last ?? 0)}, plain decoding ${seconds(slow.last ?? 0)}` +
    (ratio === null ? "." : `, ${$("ratio").textContent} the speed.`);
}

function firstDifference(one, other) {
  let index = 0;
  while (index < one.length && one[index] === other[index]) index += 1;
  return index;
}

function drawTimes(shown) {
  const longest = Math.max(...shown.map((lane) => lane.measurement.last ?? 0), 1);
  const width = (ms) => `${(100 * ms) / longest}%`;
  $("times").replaceChildren(
    ...shown.flatMap(({ name, measurement: { first, last } }) => {
      const prompt = element("span", { className: "prompt-time" });
      const rest = element("span", { className: "token-time" });
      prompt.style.width = width(first ?? 0);
      rest.style.width = width((last ?? 0) - (first ?? 0));
      return [
        element("span", { textContent: name }),
        element("span", { className: "track" }, prompt, rest),
        element("span", { className: "value", textContent: seconds(last ?? 0) }),
      ];
    }),
  );
}

function clearAnswers() {
  for (const lane of Object.values(lanes)) lane.clear();
  $("verdict").hidden = true;
  $("announcer").textContent = "";
}

$("request").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
$("request").addEventListener("change", (event) => event.target.type === "radio" && arrange());
$("request").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !running) $("request").requestSubmit();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  clearAnswers();
  $("alert").replaceChildren();
  $("prompt").value = "";
  $("prompt").focus();
});
$("positions").addEventListener("change", () => $("lanes").toggleAttribute("data-positions", $("positions").checked));
$("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  apiKey = $("key").value;
  $("alert").replaceChildren();
  if (await learnServer()) {
    $("key-form").hidden = true;
    $("key").value = "";
    $("generate").focus();
  }
});

arrange();
learnServer();
