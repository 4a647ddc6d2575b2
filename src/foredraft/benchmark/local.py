"""Measuring engines in this process, plain decoding and speculation in turns."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from random import Random
from time import perf_counter

from foredraft.benchmark.results import Answer, Condition, Measurement, PhaseTimes, Run, summarize
from foredraft.benchmark.workloads import Conversation, Workload, request_seed
from foredraft.config import AcceptanceRule, NumSpeculativeTokens, SpeculativeConfig
from foredraft.drafters import load_drafter
from foredraft.engine.sequence import Acceptance
from foredraft.engine.sequence import Sequence as RunningSequence
from foredraft.engine.timings import PHASES
from foredraft.errors import UserError
from foredraft.llm import LLM
from foredraft.models.loading import Target
from foredraft.sampling_params import SamplingParams

WARM_UP_TOKENS = 16

Configuration = SpeculativeConfig | None
"""A way to decode; None is plain decoding."""

Params = Callable[[int, int], SamplingParams]
"""Sampling parameters of a conversation's turn, both counted from 0."""

Report = Callable[[str], None]
"""Told of each finished conversation, with words for what is running."""


@dataclass(frozen=True)
class Plan:
    """What to measure: every configuration on every workload at every concurrency.

    configurations: plain decoding (None) first, because the others are compared with it.
    """

    configurations: tuple[Configuration, ...]
    workloads: tuple[Workload, ...]
    concurrencies: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int

    @property
    def num_conversations(self) -> int:
        """How many times ``measure`` reports."""
        per_pass = sum(len(workload.conversations) for workload in self.workloads)
        return per_pass * len(self.configurations) * len(self.concurrencies)

    def params(self, dataset: str) -> Params:
        def of(prompt: int, turn: int) -> SamplingParams:
            seed = request_seed(self.seed, dataset, prompt, turn)
            return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, seed=seed)

        return of


def configurations(
    methods: Sequence[str],
    num_speculative_tokens: Sequence[NumSpeculativeTokens | None],
    drafters: Mapping[str, str],
    rules: Sequence[AcceptanceRule] = ("exact",),
) -> tuple[Configuration, ...]:
    """Plain decoding, always and first, then each method with each N and rule; N None is the drafter's own default.

    drafters: folder or Hub id by method, for those that do not take the shipped one.
    """
    speculative = (
        SpeculativeConfig(method, drafters.get(method), n, rule)
        for method in dict.fromkeys(methods)
        if method != "none"
        for n in dict.fromkeys(num_speculative_tokens)
        for rule in dict.fromkeys(rules)
    )
    return (None, *speculative)


def fitting(target: Target, plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan without each N that is more than a method's drafter can propose, and a line for each such method.

    With one method all stays, and its drafter refuses. Raises UserError where nothing would be left.
    """
    speculative = [each for each in plan.configurations if each is not None]
    methods = {each.method: each for each in speculative if isinstance(each.num_speculative_tokens, int)}
    if len({each.method for each in speculative}) < 2:
        return plan, ()
    most = {
        method: load_drafter(replace(each, num_speculative_tokens=None), target).max_tokens
        for method, each in methods.items()
    }
    too_many = {each for each in speculative if _exceeds(each, most)}
    if len(too_many) == len(speculative):
        limits = ", ".join(f"{method} {limit}" for method, limit in most.items())
        raise UserError(f"--num-speculative-tokens: every N is more than the drafters propose; their most: {limits}")
    notes = []
    for method, limit in most.items():
        left_out = dict.fromkeys(
            str(each.num_speculative_tokens) for each in speculative if each in too_many and each.method == method
        )
        if left_out:
            notes.append(f"{method} proposes at most {limit} tokens: left out for it is N = {', '.join(left_out)}")
    kept = tuple(each for each in plan.configurations if each not in too_many)
    return replace(plan, configurations=kept), tuple(notes)


def _exceeds(configuration: SpeculativeConfig, most: Mapping[str, int]) -> bool:
    n = configuration.num_speculative_tokens
    return isinstance(n, int) and n > most[configuration.method]


def measure(target: Target, plan: Plan, report: Report) -> Iterator[list[Run]]:
    """Yield the runs of one workload at one concurrency, all configurations at once, as they are complete.

    The target is shared; each configuration has an engine and a drafter of its own.
    Raises UserError before any measuring if a drafter does not fit or a prompt is too long.
    """
    check_lengths(target, plan)
    groups = count()
    for concurrency in plan.concurrencies:
        yield from _measure_concurrency(target, plan, concurrency, groups, report)


def _measure_concurrency(
    target: Target, plan: Plan, concurrency: int, groups: Iterator[int], report: Report
) -> Iterator[list[Run]]:
    engines = [LLM(target, each, max_num_seqs=concurrency) for each in plan.configurations]
    _warm_up(engines, plan.workloads[0], concurrency, plan.max_tokens)
    for workload in plan.workloads:
        measured = measure_workload(engines, workload, plan, concurrency, groups, report)
        yield [
            summarize(_condition(target, plan, llm.speculation, workload, concurrency), own, measured[0])
            for llm, own in zip(engines, measured, strict=True)
        ]


def measure_workload(
    engines: Sequence[LLM],
    workload: Workload,
    plan: Plan,
    concurrency: int,
    groups: Iterator[int],
    report: Report,
) -> list[Measurement]:
    """Run every conversation through every engine, group by group; one measurement for each engine.

    groups: numbers the groups across workloads, so that the order keeps rotating.
    """
    measured = [Measurement(acceptance=Acceptance(), times=PhaseTimes()) for _ in engines]
    params = plan.params(workload.name)
    for group, order in interleaved(len(workload.conversations), len(engines), concurrency, groups):
        for index in order:
            what = f"{workload.name}, concurrency {concurrency}, {label(engines[index].speculation)}"
            told = partial(report, what)
            own = measured[index]
            begin = perf_counter()
            talks = converse(engines[index], workload.conversations, group, params, concurrency, told, own.times)
            own.seconds += perf_counter() - begin
            own.conversations.extend(tuple(talk.answers) for talk in talks)
            for talk in talks:
                assert own.acceptance is not None
                own.acceptance.add(talk.acceptance)
    return measured


def interleaved(
    num_conversations: int, num_engines: int, concurrency: int, groups: Iterator[int]
) -> Iterator[tuple[range, list[int]]]:
    """Groups of conversations, each with the order in which the engines take it.

    A group is small, one conversation where they come one by one, and the order is another for each, so that a machine
    that slows down or speeds up does so for all alike.
    """
    size = 1 if concurrency == 1 else 4 * concurrency
    for begin in range(0, num_conversations, size):
        order = list(range(num_engines))
        Random(next(groups)).shuffle(order)
        yield range(begin, min(begin + size, num_conversations)), order


@dataclass
class Talk:
    """A conversation that is being held."""

    number: int
    turns: Conversation
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)

    @property
    def finished(self) -> bool:
        return len(self.answers) == len(self.turns)

    def ask(self, llm: LLM, params: Params) -> RunningSequence:
        """Start the next turn."""
        turn = len(self.answers)
        self.messages.append({"role": "user", "content": self.turns[turn]})
        return llm.engine.add(llm.tokenizer.encode_chat(self.messages), params(self.number, turn))[0]

    def take(self, sequence: RunningSequence) -> None:
        """Note a finished answer."""
        answer = Answer(
            num_tokens=sequence.num_output,
            ttft=sequence.first_token_at - sequence.arrived,
            decode_seconds=sequence.finished_at - sequence.first_token_at,
            token_ids=tuple(sequence.output),
        )
        self.answers.append(answer)
        self.acceptance.add(sequence.acceptance)
        self.messages.append({"role": "assistant", "content": sequence.text})


def converse(
    llm: LLM,
    conversations: Sequence[Conversation],
    numbers: Sequence[int],
    params: Params,
    concurrency: int,
    finished: Callable[[], None],
    times: PhaseTimes | None = None,
) -> list[Talk]:
    """Hold the conversations ``numbers`` with at most ``concurrency`` of them in flight; ``times`` takes what it took.

    A conversation starts when a place is free, not before, so that the time to its first token holds no waiting
    that a user would not see; each turn follows the answer before it at once.
    """
    talks = [Talk(number, conversations[number]) for number in numbers]
    waiting = deque(talks)
    running: dict[RunningSequence, Talk] = {}
    while waiting or running:
        while waiting and len(running) < concurrency:
            talk = waiting.popleft()
            running[talk.ask(llm, params)] = talk
        for sequence in _step(llm, running, times):
            if not sequence.finished:
                continue
            talk = running.pop(sequence)
            talk.take(sequence)
            if talk.finished:
                finished()
            else:
                running[talk.ask(llm, params)] = talk
    return talks


def _step(llm: LLM, running: Iterable[RunningSequence], times: PhaseTimes | None) -> list[RunningSequence]:
    """One step of the engine, with its phases noted."""
    seconds = llm.engine.timings.seconds
    before = dict(seconds)
    prefill = not all(sequence.decoding for sequence in running)
    moved = llm.engine.step()
    if times is not None:
        times.note({phase: seconds[phase] - before[phase] for phase in PHASES}, prefill)
    return moved


def check_lengths(target: Target, plan: Plan) -> None:
    """Raise UserError if a prompt, with the answers before its last turn at full length, is too long."""
    limit = target.model.config.max_position_embeddings
    for workload in plan.workloads:
        for number, turns in enumerate(workload.conversations, 1):
            messages: list[dict[str, str]] = []
            for turn in turns:
                messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "..."}]
            length = len(target.tokenizer.encode_chat(messages[:-1])) + (len(turns) - 1) * plan.max_tokens
            if length >= limit:
                raise UserError(
                    f"prompt {number} of {workload.name} can reach {length} tokens, but {target.name} takes "
                    f"at most {limit}; leave the dataset out, or lower --max-tokens or --num-prompts"
                )


def label(configuration: Configuration) -> str:
    if configuration is None:
        return "none"
    rule = ", rejection" if configuration.acceptance_rule == "rejection" else ""
    return f"{configuration.method} N={configuration.num_speculative_tokens}{rule}"


def _warm_up(engines: Sequence[LLM], workload: Workload, concurrency: int, max_tokens: int) -> None:
    """Let memory, caches and threads settle before anything is timed."""
    params = SamplingParams(temperature=0, max_tokens=min(WARM_UP_TOKENS, max_tokens))
    first_turns = [turns[:1] for turns in workload.conversations[:concurrency]]
    for llm in engines:
        converse(llm, first_turns, range(len(first_turns)), lambda *_: params, concurrency, lambda: None)


def _condition(
    target: Target, plan: Plan, configuration: Configuration, workload: Workload, concurrency: int
) -> Condition:
    return Condition(
        model=target.name,
        dtype=str(target.model.dtype).removeprefix("torch."),
        quantization=target.quantization,
        method=configuration.method if configuration else "none",
        drafter=configuration.model if configuration else None,
        num_speculative_tokens=configuration.num_speculative_tokens if configuration else 0,
        acceptance_rule=configuration.acceptance_rule if configuration else "exact",
        dataset=workload.name,
        dataset_source=workload.source,
        concurrency=concurrency,
        max_tokens=plan.max_tokens,
        temperature=plan.temperature,
        seed=plan.seed,
    )
